"""Mapping of exceptions to one-line messages and exit codes, and a notice while a store does not answer."""

import contextlib
import sys
import threading
from collections.abc import Collection, Iterator

import typer

from hocket.ckpt.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointIncompatibleError,
    CheckpointNotFoundError,
    CheckpointUnfencedError,
    CheckpointUnsafeError,
)
from hocket.native import _native
from hocket.native.cli import exits
from hocket.native.cli.options import Advice, in_options, options_of
from hocket.native.errors import StoreConfigError, StoreExistsError, StoreNotFoundError

__all__ = ["exit_on_error", "in_options_of", "retry_notice"]

_LOOK_S = 0.5
_EVERY_S = 5.0

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


@contextlib.contextmanager
def retry_notice(*, look_s: float = _LOOK_S, every_s: float = _EVERY_S) -> Iterator[None]:
    """Print a line at the first retry of a request to a store, and then at most one every `every_s`.

    Retries continue for up to half a minute, in which the command would otherwise print nothing.
    """
    done = threading.Event()
    thread = threading.Thread(target=_watch, args=(done, look_s, every_s), name="hocket-retries", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the system grants no more threads, and the command may do without this one
        yield
        return
    try:
        yield
    finally:
        done.set()
        thread.join()


def _watch(done: threading.Event, look_s: float, every_s: float) -> None:
    initial = reported = _native.counters()["retries"]
    wait_s = look_s
    while not done.wait(wait_s):
        retries = _native.counters()["retries"]
        wait_s = look_s
        if retries > reported:
            reported = retries
            tries = f"{retries - initial} {'retry' if retries - initial == 1 else 'retries'} so far"
            print(f"hocket-ckpt: requests to the store fail; {tries}", file=sys.stderr, flush=True)
            wait_s = every_s
