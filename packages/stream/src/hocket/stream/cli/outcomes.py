"""From errors to one readable line and an exit code."""

import contextlib
import os
import sys
from collections.abc import Iterator

import typer

from hocket.native.errors import (
    HocketError,
    StoreConfigError,
    StoreExistsError,
    StoreNotFoundError,
    StorePermissionError,
)
from hocket.stream.cli.text import visible
from hocket.stream.errors import (
    ConfigError,
    DatasetExistsError,
    IndexCorruptError,
    IndexNotFoundError,
    SampleError,
    ShardCorruptError,
    ShardNotFoundError,
    SourceNotFoundError,
)

__all__ = ["told"]

_CODES: list[tuple[tuple[type[BaseException], ...], int]] = [
    ((IndexCorruptError, ShardCorruptError, ShardNotFoundError, SampleError), 1),
    ((DatasetExistsError, StoreExistsError, StorePermissionError), 4),
    ((IndexNotFoundError, SourceNotFoundError, StoreNotFoundError), 3),
    ((ConfigError, StoreConfigError, ValueError), 2),
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
        message = " ".join(str(error).split())
        print(f"hocket-stream: {visible(message)}", file=sys.stderr)
        _settle_output()
        codes = (code for kinds, code in _CODES if isinstance(error, kinds))
        raise typer.Exit(next(codes, _STORE_FAILED)) from None


def _settle_output() -> None:
    """What stdout did not take is not to fail once more at exit, with a code and a text of Python's."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
