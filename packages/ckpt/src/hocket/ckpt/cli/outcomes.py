"""Mapping of exceptions to one-line messages and exit codes."""

import contextlib
from collections.abc import Collection, Iterator

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
from hocket.native.cli import exits
from hocket.native.cli.options import Advice, in_options, options_of
from hocket.native.errors import StoreConfigError, StoreExistsError, StoreNotFoundError

__all__ = ["exit_on_error", "in_options_of"]

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


#: The options of the subcommands by the argument that each one sets; messages of the package name arguments.
OPTIONS = {
    "after": "--after",
    "base": "--base",
    "compression": "--compression",
    "copied": "--copied",
    "decay": "--decay",
    "drop": "--drop",
    "dtype": "--dtype",
    "every": "--every",
    "exclude": "--exclude",
    "include": "--include",
    "max_shard_bytes": "--max-shard-size",
    "memory_bytes": "--memory",
    "method": "--method",
    "name_prefix": "--name-prefix",
    "ranks": "--ranks",
    "rename": "--rename",
    "step": "--step",
    "t": "--t",
    "to": "--to",
    "user": "--user",
    "weights": "--weight",
}
ADVICE = (
    Advice(
        "Pass `allow_expand=True` (`--allow-expand`) to write or read all of them, or leave the tensor out "
        "(`--exclude`)",
        "--allow-expand",
        "Pass `--allow-expand` to write all of them, or leave the tensor out by `--exclude`",
        "Convert the checkpoint first, by `hocket-ckpt convert` with `--allow-expand` or `--exclude`",
    ),
    Advice(
        ", or pass `unfenced=True` to `CheckpointStore`, `HocketWriter`, `convert` or `reshard` "
        "(`--unfenced` to a command) if",
        "--unfenced",
        ", or pass `--unfenced` if",
        ", or write to a disk and copy it there by `hocket-ckpt reshard --unfenced` if",
    ),
)


@contextlib.contextmanager
def exit_on_error(app: typer.Typer, verb: str) -> Iterator[None]:
    """Turn an exception of this package into a line on stderr and its exit code; others propagate.

    Args:
        app: The command.
        verb: The subcommand, whose options the message names.
    """
    with (
        exits.exit_on_error("hocket-ckpt", _CODES, lambda text: in_options_of(text, options_of(app, verb))),
        retry_notice(),
    ):
        yield


def in_options_of(message: str, options: Collection[str]) -> str:
    """Return a message with the options of a subcommand in place of the arguments that they set."""
    return in_options(message, options, names=OPTIONS, advice=ADVICE)
