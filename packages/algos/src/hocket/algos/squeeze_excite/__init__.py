"""Squeeze-and-excitation: channels weighted by the means of all channels over the image."""

from hocket.algos.squeeze_excite.squeeze_excite import (
    SqueezeExcite,
    SqueezeExcite2d,
    SqueezeExciteConv2d,
    apply_squeeze_excite,
)

__all__ = ["SqueezeExcite", "SqueezeExcite2d", "SqueezeExciteConv2d", "apply_squeeze_excite"]
