"""Gradient clipping by norm, by value, and adaptively for each unit."""

from hocket.algos.gradient_clipping.gradient_clipping import (
    ClippingType,
    GradientClipping,
    apply_gradient_clipping,
)

__all__ = ["ClippingType", "GradientClipping", "apply_gradient_clipping"]
