"""The Rust layer of Hocket: object stores, shards and checkpoints."""

from hocket.native._native import __version__

__all__ = ["__version__"]
