"""Freezing of early layers."""

from hocket.algos.layer_freezing.layer_freezing import LayerFreezing, freeze_layers

__all__ = ["LayerFreezing", "freeze_layers"]
