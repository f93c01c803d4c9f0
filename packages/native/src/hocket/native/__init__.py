"""The Rust layer of Hocket: object stores, shards and checkpoints.

- `_native`: the extension, made of the crates
- `credentials`: keys of AWS, which a Python thread looks up for the extension
- `hub`: the commit of a repository on a hub of Hugging Face, the same on all ranks
- `paths`, `arguments`: paths as text, and the refusal of unknown arguments
- `cli`: what the commands of Hocket's packages share
- `errors`: the errors of object stores, and the base of those of checkpoints and data sets
"""

import atexit

from hocket.native import errors
from hocket.native._native import ObjectMeta, Store, __version__, counters, flush_log

__all__ = ["ObjectMeta", "Store", "__version__", "counters", "errors"]

# Threads of the Rust layer may have written to the log after the last call.
atexit.register(flush_log)
