"""Gated linear units in the feed-forward layers of BERT."""

from hocket.algos.gated_linear_units.gated_linear_units import (
    GatedIntermediate,
    GatedLinearUnits,
    apply_gated_linear_units,
)

__all__ = ["GatedIntermediate", "GatedLinearUnits", "apply_gated_linear_units"]
