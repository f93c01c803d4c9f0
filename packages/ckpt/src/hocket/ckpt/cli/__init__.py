"""The command `hocket-ckpt`: inspects, checks and converts checkpoints, without torch."""

from hocket.ckpt.cli.app import main

__all__ = ["main"]
