"""Weight standardization of convolutions."""

from hocket.algos.weight_standardization.weight_standardization import (
    WeightStandardization,
    apply_weight_standardization,
)

__all__ = ["WeightStandardization", "apply_weight_standardization"]
