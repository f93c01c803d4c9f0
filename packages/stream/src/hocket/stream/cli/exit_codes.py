"""Mapping of errors to one-line messages and exit codes."""

import contextlib
from collections.abc import Collection

import typer

from hocket.native.cli import exits
from hocket.native.cli.options import Advice, in_options, options_of
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

__all__ = ["exit_on_error", "in_options_of"]

_CODES: list[tuple[tuple[type[BaseException], ...], int]] = [
    ((IndexCorruptError, ShardCorruptError, ShardNotFoundError, SampleError), 1),
    ((DatasetExistsError, StoreExistsError, StorePermissionError), 4),
    ((IndexNotFoundError, SourceNotFoundError, StoreNotFoundError), 3),
    ((ConfigError, StoreConfigError, ValueError), 2),
]

#: The options of the subcommands by the argument that each one sets; messages of the package name arguments.
OPTIONS = {
    "batch_size": "--batch-size",
    "cache_limit": "--cache-limit",
    "columns": "--columns",
    "compression": "--compression",
    "config": "--config",
    "epoch": "--epoch",
    "epoch_size": "--epoch-size",
    "empty_as_nan": "--empty-as-nan",
    "exist_ok": "--exist-ok",
    "format": "--from",
    "hashes": "--hashes",
    "local": "--local",
    "max_samples": "--max-samples",
    "num_canonical_nodes": "--num-canonical-nodes",
    "num_nodes": "--nodes",
    "num_shards": "--shards",
    "out": "--out",
    "ranks_per_node": "--ranks-per-node",
    "shuffle_block_size": "--shuffle-block-size",
    "shuffle_seed": "--shuffle-seed",
    "size_limit": "--size-limit",
    "split": "--split",
    "weights": "--weights",
}
ADVICE = (
    Advice(
        "pass a writable folder with free space as `local`",
        "--local",
        "pass a writable folder with free space as `--local`, or set `TMPDIR` to one",
        "choose a writable folder with free space, or set `TMPDIR` to one for temporary files",
    ),
    Advice("; pass URIs as `remote`", "", "", ""),
    Advice("; give each `Stream` a `name`", "--weights", "; pass folders with different names", ""),
    Advice(", or pass `on_bad_sample='replace'`", "", "", ""),
    Advice(
        "give `allow_unsafe_types=True` only for data that you trust",
        "",
        "",
        "this command does not decode it. Read the data in Python if you trust it",
    ),
)


def exit_on_error(app: typer.Typer, verb: str) -> contextlib.AbstractContextManager[None]:
    """Report an error of this package on stderr and exit with its code; other errors pass through.

    Args:
        app: The command.
        verb: The subcommand, whose options the message names.
    """
    return exits.exit_on_error(
        "hocket-stream", _CODES, lambda message: in_options_of(message, options_of(app, verb))
    )


def in_options_of(message: str, options: Collection[str]) -> str:
    """Return a message with the options of a subcommand in place of the arguments that they set."""
    return in_options(message, options, names=OPTIONS, advice=ADVICE)
