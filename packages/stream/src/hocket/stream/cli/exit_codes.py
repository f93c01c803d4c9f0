"""Mapping of errors to one-line messages and exit codes."""

import contextlib
import re

from hocket.native.cli import exits
from hocket.native.errors import (
    StoreConfigError,
    StoreExistsError,
    StoreNotFoundError,
    StorePermissionError,
)
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

#: The options of the command by the argument that each one sets; messages of the package name arguments.
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
    "split": "--split",
}
# A column may have the name of an argument.
_ARGUMENT = re.compile(rf"(?<!column )`({'|'.join(OPTIONS)})(?:=True)?`")


def exit_on_error() -> contextlib.AbstractContextManager[None]:
    """Report an error of this package on stderr and exit with its code; other errors pass through."""
    return exits.exit_on_error("hocket-stream", _CODES, _in_options)


def _in_options(message: str) -> str:
    """Return a message with the command's options in place of the arguments that they set."""
    return _ARGUMENT.sub(lambda found: f"`{OPTIONS[found[1]]}`", message)
