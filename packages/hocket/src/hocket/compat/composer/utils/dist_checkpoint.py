"""Functions that save and load on any number of ranks, which every checkpoint supports."""

from __future__ import annotations

from hocket.compat.composer.utils.checkpoint import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
