"""Layer norm and group norm in the precision of autocast."""

from hocket.algos.low_precision_norm.low_precision_norm import (
    LowPrecisionGroupNorm,
    LowPrecisionLayerNorm,
    apply_low_precision_groupnorm,
    apply_low_precision_layernorm,
)

__all__ = [
    "LowPrecisionGroupNorm",
    "LowPrecisionLayerNorm",
    "apply_low_precision_groupnorm",
    "apply_low_precision_layernorm",
]
