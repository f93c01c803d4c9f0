"""Suites that an implementation of a seam passes, ours or yours: plain functions that raise `AssertionError`.

They need no test framework. Each takes a function that makes the thing to check, and says in its message what
was expected and what came.
"""

from hocket.trainer.testing.callbacks import check_callback, check_logger
from hocket.trainer.testing.checkpoint_store import check_checkpoint_store
from hocket.trainer.testing.parallelism import check_parallelism
from hocket.trainer.testing.stateful import check_stateful

__all__ = ["check_callback", "check_checkpoint_store", "check_logger", "check_parallelism", "check_stateful"]
