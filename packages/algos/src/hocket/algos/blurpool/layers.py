"""Layers that blur before they take every second pixel."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn


def blur_2d(
    input: torch.Tensor,  # noqa: A002 - Composer's and torch's name
    channels: int = -1,
    stride: int | tuple[int, int] = 1,
    filter: torch.Tensor | None = None,  # noqa: A002 - Composer's name
) -> torch.Tensor:
    """Blur each channel with a 3 by 3 binomial filter, with "same" padding by zeros.

    Args:
        input: `(B, C, H, W)`.
        channels: How many channels; below 1 takes them from `input`.
        stride: Of the output.
        filter: `(1, 1, h, w)` or `(C, 1, h, w)` with odd sides; the binomial filter if None.

    Returns:
        `(B, C, H / stride, W / stride)`, rounded up for the 3 by 3 filter.
    """
    kernel = binomial_filter(1).to(input) if filter is None else filter.to(input)
    channels = input.shape[1] if channels < 1 else channels
    if kernel.shape[0] == 1 and channels > 1:
        kernel = kernel.expand(channels, -1, -1, -1)
    padding = (kernel.shape[2] // 2, kernel.shape[3] // 2)
    return F.conv2d(input, kernel, None, stride, padding, 1, channels)


def binomial_filter(channels: int) -> torch.Tensor:
    """Return `(channels, 1, 3, 3)`: the outer product of (1, 2, 1) / 4 with itself, for each channel."""
    row = torch.tensor([1.0, 2.0, 1.0]) / 4
    return torch.outer(row, row).repeat(channels, 1, 1, 1)


class BlurMaxPool2d(nn.Module):
    """Max pooling with stride 1, then a blur with the pooling's stride (Zhang 2019, figure 2)."""

    filt2d: torch.Tensor

    def __init__(
        self,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] | None = None,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
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
        """Make one with the settings of a max pooling."""
        return cls(
            cast("Any", module.kernel_size),
            cast("Any", module.stride),
            cast("Any", module.padding),
            cast("Any", module.dilation),
            module.ceil_mode,
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Pool `(B, C, H, W)`."""
        highest = F.max_pool2d(input, self.kernel_size, 1, self.padding, self.dilation, self.ceil_mode)
        return blur_2d(highest, stride=self.stride, filter=self.filt2d)

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class BlurConv2d(nn.Module):
    """A strided convolution with a blur in front, or, with `blur_first=False`, behind, which strides then.

    Args:
        conv: The convolution, whose parameters are used as they are. With `blur_first=False` its stride is
            set to 1.
        blur_first: Whether the blur comes before the convolution, which is cheaper.
    """

    blur_filter: torch.Tensor

    def __init__(self, conv: nn.Conv2d, *, blur_first: bool = True) -> None:
        super().__init__()
        self.conv = conv
        self.blur_first = blur_first
        self.blur_nchannels = conv.in_channels if blur_first else conv.out_channels
        self.blur_stride: int | tuple[int, int] = 1
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
