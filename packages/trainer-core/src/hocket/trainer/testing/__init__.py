"""Suites that an implementation of a seam passes, ours or yours: plain functions that raise `AssertionError`.

They need no test framework. Each takes a function that makes the thing to check, and says in its message what
was expected and what came.
"""

from hocket.trainer.testing.algorithm import check_algorithm
from hocket.trainer.testing.callbacks import check_callback, check_logger
from hocket.trainer.testing.checkpoint_store import check_checkpoint_store
from hocket.trainer.testing.data_plan import check_data_plan
from hocket.trainer.testing.parallelism import check_parallelism
from hocket.trainer.testing.stateful import check_stateful
from hocket.trainer.testing.train_step import check_train_step

__all__ = [
    "check_algorithm",
    "check_callback",
    "check_checkpoint_store",
    "check_data_plan",
    "check_logger",
    "check_parallelism",
    "check_stateful",
    "check_train_step",
]
