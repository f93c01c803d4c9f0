"""Mapping of exceptions to one-line messages and exit codes."""

import contextlib
import os
import sys
from collections.abc import Iterator

import typer

from hocket.ckpt.cli.retry_notice import retry_notice
from hocket.ckpt.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointIncompatibleError,
    CheckpointNotFoundError,
    CheckpointUnfencedError,
    CheckpointUnsafeError,
)
from hocket.native.errors import HocketError, StoreConfigError, StoreExistsError, StoreNotFoundError

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
_STORE_FAILED = 5
_INTERRUPTED = 130


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn an exception of this package into a line on stderr and its exit code; others propagate."""
    try:
        with retry_notice():
            yield
    except BrokenPipeError:
        # The reader closed the pipe (`| head`), which is not an error.
        _settle_output()
        raise typer.Exit from None
    except KeyboardInterrupt:
        print("hocket-ckpt: interrupted", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None
    except (HocketError, ValueError, OSError) as error:
        from hocket.ckpt.cli.text import shown

        message = " ".join(str(error).split())
        print(f"hocket-ckpt: {shown(message)}", file=sys.stderr)
        _settle_output()
        codes = (code for kinds, code in _CODES if isinstance(error, kinds))
        raise typer.Exit(next(codes, _STORE_FAILED)) from None


def _settle_output() -> None:
    """Redirect stdout after a broken pipe, so that Python's flush at exit does not fail again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
