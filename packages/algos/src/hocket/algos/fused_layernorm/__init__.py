"""Fused norms of torch in place of hand-written ones."""

from hocket.algos.fused_layernorm.fused_layernorm import FusedLayerNorm, apply_fused_layernorm

__all__ = ["FusedLayerNorm", "apply_fused_layernorm"]
