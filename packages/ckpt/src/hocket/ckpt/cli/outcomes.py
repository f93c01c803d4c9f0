"""From errors to one readable line and an exit code."""

import contextlib
import os
import sys
from collections.abc import Iterator

import typer

from hocket.ckpt.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointIncompatibleError,
    CheckpointNotFoundError,
    CheckpointUnfencedError,
    CheckpointUnsafeError,
)
from hocket.native.errors import HocketError, StoreConfigError, StoreExistsError, StoreNotFoundError

__all__ = ["told"]

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
_STORE_FAILED = 5
_INTERRUPTED = 130


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Turns an error of ours into a line on stderr and the exit code that belongs to it; others pass."""
    try:
        yield
    except BrokenPipeError:
        # The reader has had enough (`| head`): not our failure, and the flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from None
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    except (HocketError, ValueError) as error:
        from hocket.ckpt.cli.text import shown

        message = " ".join(str(error).split())
        print(f"hocket-ckpt: {shown(message)}", file=sys.stderr)
        codes = (code for kinds, code in _CODES if isinstance(error, kinds))
        raise typer.Exit(next(codes, _STORE_FAILED)) from None
