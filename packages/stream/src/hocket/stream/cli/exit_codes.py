"""Maps errors to a one-line message and an exit code."""

import contextlib
import os
import re
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

__all__ = ["exit_on_error"]

_CODES: list[tuple[tuple[type[BaseException], ...], int]] = [
    ((IndexCorruptError, ShardCorruptError, ShardNotFoundError, SampleError), 1),
    ((DatasetExistsError, StoreExistsError, StorePermissionError), 4),
    ((IndexNotFoundError, SourceNotFoundError, StoreNotFoundError), 3),
    ((ConfigError, StoreConfigError, ValueError), 2),
]
_STORE_FAILED = 5
_INTERRUPTED = 130

#: The options of the command by the names of the arguments that they set, which messages of the package use.
OPTIONS = {
    "batch_size": "--batch-size",
    "cache_limit": "--cache-limit",
    "columns": "--columns",
    "compression": "--compression",
    "epoch": "--epoch",
    "exist_ok": "--exist-ok",
    "format": "--from",
    "hashes": "--hashes",
    "local": "--local",
    "num_canonical_nodes": "--num-canonical-nodes",
    "shuffle_block_size": "--shuffle-block-size",
    "shuffle_seed": "--shuffle-seed",
    "size_limit": "--size-limit",
}
# A column may have the name of an argument.
_ARGUMENT = re.compile(rf"(?<!column )`({'|'.join(OPTIONS)})(?:=True)?`")


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Report an error of this package on stderr and exit with its code; other errors pass through."""
    try:
        yield
    except BrokenPipeError:
        # The reader closed the pipe (`| head`), which is not an error.
        _discard_output()
        raise typer.Exit from None
    except KeyboardInterrupt:
        print("hocket-stream: interrupted", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None
    except (HocketError, ValueError, OSError) as error:
        message = _ARGUMENT.sub(lambda found: f"`{OPTIONS[found[1]]}`", " ".join(str(error).split()))
        print(f"hocket-stream: {visible(message)}", file=sys.stderr)
        _discard_output()
        codes = (code for kinds, code in _CODES if isinstance(error, kinds))
        raise typer.Exit(next(codes, _STORE_FAILED)) from None


def _discard_output() -> None:
    """Discard unwritten output, so that flushing it at exit does not fail again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
