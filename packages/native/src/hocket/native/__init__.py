"""The Rust layer of Hocket: object stores, shards and checkpoints."""

from hocket.native import errors
from hocket.native._native import ObjectMeta, Store, __version__, counters

__all__ = ["ObjectMeta", "Store", "__version__", "counters", "errors"]
