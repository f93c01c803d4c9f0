"""BlurPool: a blur before each downsampling, against aliasing."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from torch import nn

from hocket.algos.blurpool.layers import BlurConv2d, BlurMaxPool2d
from hocket.algos.checks import check_number
from hocket.algos.errors import AlgorithmConfigError
from hocket.algos.order import Order
from hocket.algos.surgery import (
    SurgeryAlgorithm,
    SurgeryReport,
    is_plain,
    parts_of,
    replace_module_classes,
)
from hocket.algos.surgery.optimizers import Optimizers
from hocket.algos.surgery.replace import Policy

if TYPE_CHECKING:
    from hocket.trainer.state import State


class BlurPool(SurgeryAlgorithm):
    """Blurs before each strided convolution and max pooling, at INIT.

    Args:
        replace_convs: Whether strided convolutions get a blur.
        replace_maxpools: Whether max pooling gets a blur.
        blur_first: Blur before a convolution instead of after it; after it is slower and a little better.
        min_channels: Convolutions with fewer input channels are left, such as the first one, on pixels.
        reapply: Same as for every `SurgeryAlgorithm`.

    Raises:
        AlgorithmConfigError: Nothing is to be replaced, or `min_channels` is not a number from 0 on.

    Example:
        >>> BlurPool(blur_first=False)
        BlurPool(replace_convs=True, replace_maxpools=True, blur_first=False, min_channels=16)
    """

    order = Order.BLUR_POOL

    def __init__(
        self,
        replace_convs: bool = True,
        replace_maxpools: bool = True,
        blur_first: bool = True,
        min_channels: int = 16,
        *,
        reapply: bool = False,
    ) -> None:
        super().__init__(reapply=reapply)
        _check(replace_convs, replace_maxpools, min_channels)
        self.replace_convs = replace_convs
        self.replace_maxpools = replace_maxpools
        self.blur_first = blur_first
        self.min_channels = min_channels

    @property
    def targets(self) -> tuple[type[nn.Module], ...]:
        """The kinds of layers to replace: convolutions, max pooling, or both."""
        return tuple(_policies(self.replace_convs, self.replace_maxpools, self.blur_first, self.min_channels))

    def operate(self, state: "State") -> SurgeryReport:
        """Put the blurs into `state.model`."""
        return apply_blurpool(
            state.model,
            self.replace_convs,
            self.replace_maxpools,
            self.blur_first,
            self.min_channels,
            state.optimizers,
        )

    def __repr__(self) -> str:
        return (
            f"BlurPool(replace_convs={self.replace_convs}, replace_maxpools={self.replace_maxpools}, "
            f"blur_first={self.blur_first}, min_channels={self.min_channels})"
        )


def apply_blurpool(
    model: nn.Module,
    replace_convs: bool = True,
    replace_maxpools: bool = True,
    blur_first: bool = True,
    min_channels: int = 16,
    optimizers: Optimizers | None = None,
) -> SurgeryReport:
    """Put a blur at each strided convolution and max pooling of a model, in place; needs no trainer.

    Parameters of convolutions stay the same objects; their names get `conv.` before the last part.

    Args:
        model: Changed in place.
        replace_convs: Same as for `BlurPool`.
        replace_maxpools: Same as for `BlurPool`.
        blur_first: Same as for `BlurPool`.
        min_channels: Same as for `BlurPool`.
        optimizers: Built over the model's parameters; nothing in them has to change.

    Returns:
        The report of the surgery.

    Raises:
        AlgorithmConfigError: Nothing is to be replaced, or `min_channels` is not a number from 0 on.

    Source: Zhang, Making Convolutional Networks Shift-Invariant Again, 2019.
    """
    _check(replace_convs, replace_maxpools, min_channels)
    inside = parts_of(model, BlurConv2d)
    policies = _policies(replace_convs, replace_maxpools, blur_first, min_channels, inside)
    return replace_module_classes(model, policies, optimizers, title="BlurPool")


def _policies(
    replace_convs: bool,
    replace_maxpools: bool,
    blur_first: bool,
    min_channels: int,
    inside: Collection[int] = (),
) -> dict[type[nn.Module], Policy]:
    def blur_conv(module: nn.Conv2d, index: int) -> nn.Module | None:
        is_strided = max(module.stride) > 1 and module.in_channels >= min_channels
        if not is_strided or id(module) in inside:
            return None
        return BlurConv2d.from_conv2d(module, index, blur_first)

    def blur_maxpool(module: nn.MaxPool2d, index: int) -> nn.Module | None:
        if not is_plain(module, nn.MaxPool2d) or module.return_indices:
            return None
        return BlurMaxPool2d.from_maxpool2d(module, index)

    policies: dict[type[nn.Module], Policy] = {}
    if replace_maxpools:
        policies[nn.MaxPool2d] = blur_maxpool
    if replace_convs:
        policies[nn.Conv2d] = blur_conv
    return policies


def _check(replace_convs: bool, replace_maxpools: bool, min_channels: int) -> None:
    if not (replace_convs or replace_maxpools):
        raise AlgorithmConfigError(
            "`replace_convs` and `replace_maxpools` are both False, so nothing would be replaced; set one"
        )
    check_number("min_channels", min_channels, least=0)
