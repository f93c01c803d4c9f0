"""Saving and loading on any number of ranks: every checkpoint is of this kind."""

from __future__ import annotations

from hocket.compat.composer.utils.checkpoint import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
