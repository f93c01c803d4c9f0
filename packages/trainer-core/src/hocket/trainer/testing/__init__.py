"""Conformance suites for implementations of the interfaces, as functions that raise `AssertionError`.

The suites need no test framework. Most take a function that makes the object to check. The message of a
failure states the expected and the actual result.
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
