"""Squeeze-and-excitation: channels weighted by the means of all channels over the image."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from hocket.algos.checks import check_number
from hocket.algos.errors import AlgorithmConfigError
from hocket.algos.order import Order
from hocket.algos.surgery import SurgeryAlgorithm, SurgeryReport, parts_of, replace_module_classes
from hocket.algos.surgery.optimizers import Optimizers

if TYPE_CHECKING:
    from hocket.trainer.state import State


class SqueezeExcite2d(nn.Module):
    """Scales each channel of `(B, C, H, W)` by a number from 0 to 1, computed from all channels' means.

    Args:
        num_features: `C`.
        latent_channels: Width of the hidden layer; below 1, as a share of `num_features`.
    """

    def __init__(self, num_features: int, latent_channels: float = 0.125) -> None:
        super().__init__()
        _check(latent_channels, 0)
        self.latent_channels = max(
            1, int(latent_channels if latent_channels >= 1 else latent_channels * num_features)
        )
        self.pool_and_mlp = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(num_features, self.latent_channels, bias=False),
            nn.ReLU(),
            nn.Linear(self.latent_channels, num_features, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Scale the channels."""
        scales: torch.Tensor = self.pool_and_mlp(input)
        return input * scales[:, :, None, None]


class SqueezeExciteConv2d(nn.Module):
    """A convolution with squeeze-and-excitation behind it.

    Args:
        conv: The convolution, used as it is.
        latent_channels: Same as for `SqueezeExcite2d`.
    """

    def __init__(self, conv: nn.Conv2d, latent_channels: float = 0.125) -> None:
        super().__init__()
        self.conv = conv
        self.se = SqueezeExcite2d(conv.out_channels, latent_channels)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Convolve and scale."""
        scaled: torch.Tensor = self.se(self.conv(input))
        return scaled


class SqueezeExcite(SurgeryAlgorithm):
    """Adds squeeze-and-excitation behind wide convolutions, at INIT.

    Args:
        latent_channels: Width of the hidden layer; below 1, as a share of the output channels.
        min_channels: Convolutions with fewer input or output channels are left.
        reapply: Same as for every `SurgeryAlgorithm`.

    Raises:
        AlgorithmConfigError: A number is out of range.

    Example:
        >>> SqueezeExcite(latent_channels=0.125)
        SqueezeExcite(latent_channels=0.125, min_channels=128)
    """

    order = Order.SQUEEZE_EXCITE

    def __init__(
        self, latent_channels: float = 64, min_channels: int = 128, *, reapply: bool = False
    ) -> None:
        super().__init__(reapply=reapply)
        _check(latent_channels, min_channels)
        self.latent_channels = latent_channels
        self.min_channels = min_channels

    @property
    def targets(self) -> tuple[type[nn.Module], ...]:
        """Convolutions."""
        return (nn.Conv2d,)

    def operate(self, state: "State") -> SurgeryReport:
        """Add the modules to `state.model`."""
        return apply_squeeze_excite(state.model, self.latent_channels, self.min_channels, state.optimizers)

    def __repr__(self) -> str:
        return f"SqueezeExcite(latent_channels={self.latent_channels}, min_channels={self.min_channels})"


def apply_squeeze_excite(
    model: nn.Module,
    latent_channels: float = 64,
    min_channels: int = 128,
    optimizers: Optimizers | None = None,
) -> SurgeryReport:
    """Add squeeze-and-excitation behind each wide convolution of a model, in place; needs no trainer.

    Args:
        model: Changed in place.
        latent_channels: Width of the hidden layer; below 1, as a share of the output channels.
        min_channels: Convolutions with fewer input or output channels are left.
        optimizers: Receive the new parameters, in the group of the convolution's weight.

    Returns:
        The report of the surgery.

    Raises:
        AlgorithmConfigError: A number is out of range.

    Source: Hu et al., Squeeze-and-Excitation Networks, 2017.
    """
    _check(latent_channels, min_channels)
    inside = parts_of(model, SqueezeExciteConv2d)

    def excite(module: nn.Conv2d, index: int) -> nn.Module | None:  # noqa: ARG001 - the policy's form
        if id(module) in inside or min(module.in_channels, module.out_channels) < min_channels:
            return None
        return SqueezeExciteConv2d(module, latent_channels)

    return replace_module_classes(model, {nn.Conv2d: excite}, optimizers, title="SqueezeExcite")


def _check(latent_channels: float, min_channels: int) -> None:
    if not latent_channels > 0:
        raise AlgorithmConfigError(
            f"`latent_channels` is {latent_channels!r}, expected a number of channels or a share above 0"
        )
    check_number("min_channels", min_channels, least=0)
