"""The command `hocket-ckpt`: checkpoints looked at and checked, without torch."""

from hocket.ckpt.cli.app import main

__all__ = ["main"]
