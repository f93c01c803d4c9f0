"""The Rust layer of Hocket: object stores, shards and checkpoints."""

import atexit

from hocket.native import errors
from hocket.native._native import ObjectMeta, Store, __version__, counters, flush_log

__all__ = ["ObjectMeta", "Store", "__version__", "counters", "errors"]

# Threads of the Rust layer may have written to the log after the last call.
atexit.register(flush_log)
