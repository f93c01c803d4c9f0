"""Layers that blur before they take every second pixel."""

from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import nn

Size = int | tuple[int, int]
"""The size of both sides, or a pair of height and width."""


def blur_2d(
    input: torch.Tensor,  # noqa: A002 - Composer's and torch's name
    channels: int = -1,
    stride: Size = 1,
    filter: torch.Tensor | None = None,  # noqa: A002 - Composer's name
) -> torch.Tensor:
    """Blur each channel with a 3 by 3 binomial filter, with "same" padding by zeros.

    Args:
        input: `(B, C, H, W)`.
        channels: Number of channels; below 1, that of `input`.
        stride: Stride of the output.
        filter: `(1, 1, h, w)` or `(C, 1, h, w)` with odd sides; the binomial filter if None.

    Returns:
        `(B, C, H / stride, W / stride)`, rounded up for the 3 by 3 filter.
    """
    kernel = binomial_filter(1, input.device).to(input) if filter is None else filter.to(input)
    channels = input.shape[1] if channels < 1 else channels
    if kernel.shape[0] == 1 and channels > 1:
        kernel = kernel.expand(channels, -1, -1, -1)
    padding = (kernel.shape[2] // 2, kernel.shape[3] // 2)
    return F.conv2d(input, kernel, None, stride, padding, 1, channels)


def binomial_filter(channels: int, device: torch.device | None = None) -> torch.Tensor:
    """Return `(channels, 1, 3, 3)`: the outer product of (1, 2, 1) / 4 with itself, for each channel."""
    row = torch.tensor([1.0, 2.0, 1.0], device=device) / 4
    return torch.outer(row, row).repeat(channels, 1, 1, 1)


def blurmax_pool2d(
    input: torch.Tensor,  # noqa: A002 - Composer's and torch's name
    kernel_size: Size | None = None,
    stride: Size = 2,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    filter: torch.Tensor | None = None,  # noqa: A002 - Composer's name
) -> torch.Tensor:
    """Take the maxima with stride 1, then blur them with the stride given.

    Args:
        input: `(B, C, H, W)`.
        kernel_size: Kernel size of the pooling; 2 if None.
        stride: Stride of the output.
        padding: Padding of the pooling.
        dilation: Dilation of the pooling.
        ceil_mode: Ceil mode of the pooling.
        filter: Filter of the blur, as for `blur_2d`.
    """
    highest = F.max_pool2d(input, 2 if kernel_size is None else kernel_size, 1, padding, dilation, ceil_mode)
    return blur_2d(highest, stride=stride, filter=filter)


class BlurPool2d(nn.Module):
    """A blur with a stride: `blur_2d` as a layer.

    Args:
        channels: Number of channels; below 1, that of the input.
        stride: Stride of the output.
        padding: Accepted for Composer's users; the blur pads such that a stride of 1 keeps the size.
    """

    blur_filter: torch.Tensor

    def __init__(self, channels: int = 0, stride: Size = 2, padding: Size = 1) -> None:
        super().__init__()
        self.channels = channels
        self.stride = stride
        self.padding = padding
        self.register_buffer("blur_filter", binomial_filter(max(channels, 1)))

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Blur `(B, C, H, W)`."""
        return blur_2d(input, self.channels, self.stride, self.blur_filter)


class BlurMaxPool2d(nn.Module):
    """Max pooling with stride 1, then a blur with the pooling's stride (Zhang 2019, figure 2)."""

    filt2d: torch.Tensor

    def __init__(
        self,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.stride = kernel_size if stride is None else stride
        self.padding = padding
        self.dilation = dilation
        self.ceil_mode = ceil_mode
        self.register_buffer("filt2d", binomial_filter(1))

    @classmethod
    def from_maxpool2d(cls, module: nn.MaxPool2d, module_index: int = -1) -> "BlurMaxPool2d":  # noqa: ARG003
        """Make a layer with the settings of a max pooling."""
        return cls(
            cast("Any", module.kernel_size),
            cast("Any", module.stride),
            cast("Any", module.padding),
            cast("Any", module.dilation),
            module.ceil_mode,
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Pool `(B, C, H, W)`."""
        return blurmax_pool2d(
            input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode, self.filt2d
        )

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class BlurConv2d(nn.Module):
    """A blur before a strided convolution, or with `blur_first=False` a strided blur after a convolution.

    Args:
        in_channels: Same as for `nn.Conv2d`.
        out_channels: Same as for `nn.Conv2d`.
        kernel_size: Same as for `nn.Conv2d`.
        stride: Stride of the whole layer; the kernel's size if None.
        padding: Same as for `nn.Conv2d`.
        dilation: Same as for `nn.Conv2d`.
        groups: Same as for `nn.Conv2d`.
        bias: Same as for `nn.Conv2d`.
        blur_first: Whether the blur comes before the convolution, which is cheaper.
    """

    blur_filter: torch.Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        blur_first: bool = True,
    ) -> None:
        super().__init__()
        stride = kernel_size if stride is None else stride
        self._take(
            nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias),
            blur_first,
        )

    @classmethod
    def from_conv2d(
        cls,
        module: nn.Conv2d,
        module_index: int = -1,  # noqa: ARG003 - as `replace_module_classes` calls it
        blur_first: bool = True,
    ) -> Self:
        """Make a layer around a convolution, whose parameters are used as they are.

        Args:
            module: The convolution. With `blur_first=False` its stride is set to 1.
            module_index: Unused.
            blur_first: Same as for the class.
        """
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take(module, blur_first)
        return made

    def _take(self, conv: nn.Conv2d, blur_first: bool) -> None:
        self.conv = conv
        self.blur_first = blur_first
        self.blur_nchannels = conv.in_channels if blur_first else conv.out_channels
        self.blur_stride: Size = 1
        if not blur_first:
            self.blur_stride, conv.stride = cast("tuple[int, int]", conv.stride), (1, 1)
        self.register_buffer("blur_filter", binomial_filter(self.blur_nchannels))

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Convolve `(B, C, H, W)`."""
        if self.blur_first:
            blurred: torch.Tensor = self.conv(
                blur_2d(input, self.blur_nchannels, self.blur_stride, self.blur_filter)
            )
            return blurred
        return blur_2d(self.conv(input), self.blur_nchannels, self.blur_stride, self.blur_filter)

    def extra_repr(self) -> str:
        """Show where the blur is."""
        return f"blur_first={self.blur_first}"
