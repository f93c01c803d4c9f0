"""The summary of the run, printed when `fit` starts, and the phases of a restart after a failure."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hocket.trainer.callback import Callback
from hocket.trainer.data.loader_checks import describe_order, describe_split
from hocket.trainer.log.notices import print_notices
from hocket.trainer.models.parameter_count import describe_model
from hocket.trainer.process.world import global_rank
from hocket.trainer.state import State

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger

_MOST_RATES = 4
FAILURE = "HOCKET_FAILURE"
"""The launcher's times, a JSON object `{"found": …, "ended": …, "started": …}` in seconds since 1970."""


def print_summary(
    state: State,
    *,
    data_source: str,
    notices: Iterable[str],
    is_searched: bool = False,
    has_default_optimizer: bool = False,
    saves: str = "nothing",
) -> None:
    """Print a summary of the run's setup on the standard error stream, on rank 0 alone.

    Args:
        state: The state of the run.
        data_source: The source of the data's rank and world size, in words.
        notices: Sentences to add.
        is_searched: Whether a search finds the microbatch size before the first step.
        has_default_optimizer: Whether the optimizer is the trainer's own choice.
        saves: The locations of the checkpoints that the run saves, in words.
    """
    if global_rank() != 0 or state.parallelism.data_parallel[0] != 0:
        return
    # Imported here, since rich takes a tenth of a second to import.
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    describe: Any = getattr(state.parallelism, "describe", None)
    layout = type(state.parallelism).__name__ if describe is None else describe()
    rows = {
        "model": describe_model(state.model, state.optimizers),
        "device": f"{state.device}, {state.precision}",
        "layout": layout,
        "ranks": _draw_ranks(state),
        "batch": describe_split(
            state.dataloader,
            state.parallelism.data_parallel,
            state.device_train_microbatch_size,
            is_searched=is_searched,
        ),
        "data": f"{data_source}; {describe_order(state.dataloader)}",
        "optimizer": "; ".join(map(_describe_optimizer, state.optimizers))
        + (", the default" if has_default_optimizer else ""),
        "schedule": ", ".join(map(_name, state.schedulers)) or "none: the learning rate stays",
        "methods": ", ".join(map(_name, state.algorithms)),
        "length": _describe_length(state),
        "saves": saves,
    }
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")  # a long path is told whole
    for name, text in rows.items():
        if not text:
            continue
        table.add_row(f"[bold]{name}[/]", escape(text))
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError, ValueError):  # what is only shown does not decide a run
        # Without emoji: a run may be called `:warning:`.
        console = Console(file=sys.stderr, highlight=False, emoji=False)
        console.print(f"[bold]hocket[/] run [bold]{escape(state.run_name)}[/]")
        console.print(table)
        for notice in notices:
            console.print(f"note: {notice}", markup=False)


def _draw_ranks(state: State) -> str:
    draw: Any = getattr(state.parallelism, "draw_ranks", None)
    return "" if draw is None else str(draw())


def _describe_optimizer(optimizer: Any) -> str:
    # A scheduler may have set the rate of the first step, which warmup begins at 0.
    rates = [group.get("initial_lr", group.get("lr")) for group in getattr(optimizer, "param_groups", ())]
    told = list(dict.fromkeys(f"{float(rate):g}" for rate in rates if rate is not None))
    if len(told) > _MOST_RATES:
        told = [f"from {min(told, key=float)} to {max(told, key=float)} in {len(rates)} groups"]
    return f"{type(optimizer).__name__}" + (f", learning rate {', '.join(told)}" if told else "")


def _describe_length(state: State) -> str:
    length = "not stated" if state.max_duration is None else state.max_duration.describe()
    return f"{length}, from {state.timestamp.describe()}" if state.timestamp.counts.batch else length


def _name(part: Any) -> str:
    return str(getattr(part, "__name__", type(part).__name__))


class RecoveryTimes(Callback):
    """A callback that prints the phases once, after the first step of a restarted rank 0.

    Args:
        launcher_times: Seconds since 1970 by phase; "found" is the first.
    """

    def __init__(self, launcher_times: Mapping[str, float]) -> None:
        self._times = dict(launcher_times)
        self._is_printed = False

    def init(self, state: State, logger: Logger) -> None:
        """Record that all ranks have joined."""
        self._times["joined"] = time.time()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Record that the checkpoint is loaded."""
        self._times.setdefault("loaded", time.time())

    def batch_end(self, state: State, logger: Logger) -> None:
        """Print the phases after the first step."""
        if self._is_printed:
            return
        self._is_printed = True
        found_at = self._times.pop("found")
        phases = {**self._times, "first step": time.time()}
        text = ", ".join(f"{name} {at - found_at:.1f}" for name, at in phases.items())
        print_notices(state, [f"seconds since the launcher found a failed rank: {text}"])


def recovery_times() -> RecoveryTimes | None:
    """Return the callback if the launcher has started this rank after a failure."""
    text = os.environ.pop(FAILURE, None)
    return None if text is None else RecoveryTimes(json.loads(text))
