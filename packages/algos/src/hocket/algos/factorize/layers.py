"""Layers of low rank: a product of two thin layers in place of one."""

import math
from typing import Any, Literal, cast

import torch
from torch import nn

from hocket.algos.errors import AlgorithmConfigError
from hocket.algos.factorize.low_rank import factorize_conv2d, factorize_matrix, latent_size_of

Initialize = Literal["random", "svd"]


def max_rank_with_speedup(in_size: int, out_size: int, kernel_elements: int = 1) -> int:
    """Return the largest rank whose two factors have fewer elements than the product."""
    fan_in = in_size * kernel_elements
    return math.ceil(fan_in * out_size / (fan_in + out_size) - 1)


class FactorizedLinear(nn.Module):
    """A linear layer of low rank: `module1(module0(x))`.

    Args:
        in_features: Same as for `nn.Linear`.
        out_features: Same as for `nn.Linear`.
        bias: Whether the second layer has a bias; the first has none.
        latent_features: Width between the two layers; below 1, as a share of the smaller side.

    Raises:
        AlgorithmConfigError: The factors would not be smaller than the whole.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        latent_features: float = 0.25,
    ) -> None:
        super().__init__()
        rank = latent_size_of(latent_features, in_features, out_features)
        _check_rank(rank, max_rank_with_speedup(in_features, out_features), "latent_features")
        self.in_features, self.out_features, self.latent_features = in_features, out_features, rank
        self.module0 = nn.Linear(in_features, rank, bias=False)
        self.module1 = nn.Linear(rank, out_features, bias=bias)

    @classmethod
    def from_linear(
        cls, module: nn.Linear, latent_features: float = 0.25, *, initialize: Initialize = "random"
    ) -> "FactorizedLinear":
        """Make a layer with the sizes of a linear layer, and with `initialize="svd"` its nearest weights."""
        layer = cls(module.in_features, module.out_features, module.bias is not None, latent_features)
        layer.to(module.weight.dtype)
        if initialize == "svd":
            first, second = _nearest(module.weight, layer.latent_features)
            _fill(layer.module0.weight, first)
            _fill(layer.module1.weight, second)
            if module.bias is not None:
                _fill(layer.module1.bias, module.bias)
        return layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Map `(..., in_features)` to `(..., out_features)`."""
        out: torch.Tensor = self.module1(self.module0(input))
        return out

    @torch.no_grad()
    def set_rank(self, input: torch.Tensor, rank: float) -> None:  # noqa: A002 - torch's name
        """Make the layer thinner, such that its outputs for `input` change least.

        The parameters are new objects: add them to the optimizers that had the old ones.

        Args:
            input: Sample inputs, `(..., in_features)`.
            rank: The new width; below 1, as a share of the smaller side.

        Raises:
            AlgorithmConfigError: The layer would not get thinner.
        """
        latent_features = latent_size_of(rank, self.in_features, self.out_features)
        most = max_rank_with_speedup(self.in_features, self.out_features)
        _check_rank(latent_features, min(most, self.latent_features), "rank")
        samples = input.flatten(0, -2)
        first, second = self.module0.weight.T, self.module1.weight.T
        solution = factorize_matrix(samples, self(samples), first, second, self.module1.bias, latent_features)
        if solution.Wa is None or solution.Wb is None:
            return
        self.latent_features = self.module0.out_features = self.module1.in_features = solution.rank
        self.module0.weight = nn.Parameter(solution.Wa.T.contiguous())
        self.module1.weight = nn.Parameter(solution.Wb.T.contiguous())
        if self.module1.bias is not None and solution.bias is not None:
            _fill(self.module1.bias, solution.bias)


class FactorizedConv2d(nn.Module):
    """A convolution of low rank: a convolution into few channels, then one of 1 by 1.

    Args:
        in_channels: Same as for `nn.Conv2d`.
        out_channels: Same as for `nn.Conv2d`.
        kernel_size: Same as for `nn.Conv2d`.
        latent_channels: Channels between the two; below 1, as a share of the smaller side.
        bias: Whether the second convolution has a bias; the first has none.
        **options: `stride`, `padding`, `dilation`, `padding_mode` of the first convolution.

    Raises:
        AlgorithmConfigError: The factors would not be smaller than the whole, or `groups` is above 1.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        latent_channels: float = 0.25,
        bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        if options.pop("groups", 1) != 1:
            raise AlgorithmConfigError("a convolution with `groups` above 1 cannot be factorised")
        rank = latent_size_of(latent_channels, in_channels, out_channels)
        sides = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        _check_rank(
            rank, max_rank_with_speedup(in_channels, out_channels, math.prod(sides)), "latent_channels"
        )
        self.in_channels, self.out_channels, self.latent_channels = in_channels, out_channels, rank
        self.module0 = nn.Conv2d(in_channels, rank, kernel_size, bias=False, **options)
        self.module1 = nn.Conv2d(rank, out_channels, 1, bias=bias)

    @classmethod
    def from_conv2d(
        cls, module: nn.Conv2d, latent_channels: float = 0.25, *, initialize: Initialize = "random"
    ) -> "FactorizedConv2d":
        """Make a layer with a convolution's settings, and with `initialize="svd"` its nearest weights."""
        layer = cls(
            module.in_channels,
            module.out_channels,
            cast("tuple[int, int]", module.kernel_size),
            latent_channels,
            module.bias is not None,
            stride=module.stride,
            padding=module.padding,
            dilation=module.dilation,
            groups=module.groups,
            padding_mode=module.padding_mode,
        )
        layer.to(module.weight.dtype)
        if initialize == "svd":
            first, second = _nearest(module.weight.flatten(1), layer.latent_channels)
            _fill(layer.module0.weight, first)
            _fill(layer.module1.weight, second)
            if module.bias is not None and layer.module1.bias is not None:
                _fill(layer.module1.bias, module.bias)
        return layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Convolve `(B, C, H, W)`."""
        out: torch.Tensor = self.module1(self.module0(input))
        return out

    @torch.no_grad()
    def set_rank(self, input: torch.Tensor, rank: float) -> None:  # noqa: A002 - torch's name
        """Make the layer thinner, such that its outputs for `input` change least.

        The parameters are new objects: add them to the optimizers that had the old ones.

        Args:
            input: Sample inputs, `(B, C, H, W)`.
            rank: The new number of channels between the two; below 1, as a share of the smaller side.

        Raises:
            AlgorithmConfigError: The layer would not get thinner.
        """
        latent_channels = latent_size_of(rank, self.in_channels, self.out_channels)
        elements = math.prod(self.module0.kernel_size)
        most = max_rank_with_speedup(self.in_channels, self.out_channels, elements)
        _check_rank(latent_channels, min(most, self.latent_channels), "rank")
        first, second, bias = self.module0.weight, self.module1.weight, self.module1.bias
        solution = factorize_conv2d(input, first, second, None, bias, latent_channels)
        if solution.Wa is None or solution.Wb is None:
            return
        self.latent_channels = self.module0.out_channels = self.module1.in_channels = solution.rank
        self.module0.weight = nn.Parameter(solution.Wa.contiguous())
        self.module1.weight = nn.Parameter(solution.Wb.contiguous())
        if bias is not None and solution.bias is not None:
            _fill(bias, solution.bias)


def _nearest(weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(rank, in)` and `(out, rank)`, whose product is the nearest to `weight` of that rank."""
    left, sizes, right = torch.linalg.svd(weight.detach().float(), full_matrices=False)
    root = sizes[:rank].sqrt()
    return root[:, None] * right[:rank], left[:, :rank] * root


def _fill(parameter: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(values.reshape(parameter.shape))


def _check_rank(rank: int, most: int, name: str) -> None:
    if rank > most:
        raise AlgorithmConfigError(
            f"`{name}` asks for {rank}, and the two layers are smaller than the one only up to {most}"
        )
