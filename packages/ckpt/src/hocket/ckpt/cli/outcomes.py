"""Mapping of exceptions to one-line messages and exit codes."""

import contextlib
from collections.abc import Iterator

from hocket.ckpt.cli.retry_notice import retry_notice
from hocket.ckpt.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointIncompatibleError,
    CheckpointNotFoundError,
    CheckpointUnfencedError,
    CheckpointUnsafeError,
)
from hocket.native.cli import exits
from hocket.native.errors import StoreConfigError, StoreExistsError, StoreNotFoundError

__all__ = ["exit_on_error"]

_CODES: list[tuple[tuple[type[BaseException], ...], int]] = [
    ((CheckpointCorruptError,), 1),
    (
        (
            CheckpointExistsError,
            CheckpointIncompatibleError,
            CheckpointUnfencedError,
            CheckpointUnsafeError,
            StoreExistsError,
        ),
        4,
    ),
    ((CheckpointNotFoundError, StoreNotFoundError), 3),
    ((StoreConfigError, ValueError), 2),
]


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn an exception of this package into a line on stderr and its exit code; others propagate."""
    with exits.exit_on_error("hocket-ckpt", _CODES), retry_notice():
        yield
