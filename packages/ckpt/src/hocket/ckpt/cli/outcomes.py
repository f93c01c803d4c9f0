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
        # The reader has had enough (`| head`): not our failure.
        _settle_output()
        raise typer.Exit from None
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    except (HocketError, ValueError, OSError) as error:
        from hocket.ckpt.cli.text import shown

        message = " ".join(str(error).split())
        print(f"hocket-ckpt: {shown(message)}", file=sys.stderr)
        _settle_output()
        codes = (code for kinds, code in _CODES if isinstance(error, kinds))
        raise typer.Exit(next(codes, _STORE_FAILED)) from None


def _settle_output() -> None:
    """What stdout did not take is not to fail once more at exit, with a code and a text of Python's."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
