"""The Rust extension: one function per operation; none holds the interpreter lock while bytes move."""

# The stub is in three parts. They are not modules: at runtime everything is in `_native`.
from hocket.native._ckpt import *
from hocket.native._store import *
from hocket.native._stream import *

__version__: str
