"""A callback that logs the wall-clock time of a run by use, over restarts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hocket.trainer.callback import PeriodicCallback
from hocket.trainer.interval import IsTime
from hocket.trainer.log.logger import Logger
from hocket.trainer.time import TimeInput

if TYPE_CHECKING:
    from hocket.trainer.state import State

_KINDS = ("train", "data", "save", "eval", "restart", "start")


class GoodputMonitor(PeriodicCallback):
    """Logs the share of the wall-clock time since the first start of a run that went into training.

    | name | seconds of rank 0 |
    |---|---|
    | `goodput/train_seconds` | in steps, without fetching data |
    | `goodput/data_seconds` | fetching batches |
    | `goodput/save_seconds` | in checkpoints while training |
    | `goodput/eval_seconds` | in evaluation |
    | `goodput/start_seconds` | from the creation of the callback to the start of the first `fit` |
    | `goodput/restart_seconds` | from a save to the resume from it: repeated work, downtime, loading |
    | `goodput/other_seconds` | everything else |
    | `goodput/ratio` | the share of `train` in the total |

    The sums are kept in checkpoints, and a resumed run adds to them. Host clocks alone are used: on a GPU, a
    batch that is fetched while the device computes counts as data although the device did not wait.

    Args:
        interval: Time between two logs; the sums are also logged at the end of training.
    """

    reads_outputs = False
    metric_units = MappingProxyType({"goodput/*_seconds": "seconds"})

    saves_rank_zero_state = True

    def __init__(self, interval: TimeInput | IsTime = "50ba") -> None:
        super().__init__(interval, at_end=True)
        self._spent = dict.fromkeys(_KINDS, 0.0)
        self._made_at = time.time()
        self._first_start: float | None = None
        self._saved_at: float | None = None
        self._mark: tuple[str, float] | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Account for the time before this fit."""
        now = time.time()
        if self._saved_at is not None:
            self._spent["restart"] += max(0.0, now - self._saved_at)
            self._saved_at = None
        elif self._first_start is None:
            self._spent["start"] += now - self._made_at
        if self._first_start is None:
            self._first_start = self._made_at

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Start the clock of data."""
        self._switch("data")

    def before_forward(self, state: State, logger: Logger) -> None:
        """Start the clock of training."""
        self._switch("train")

    def after_backward(self, state: State, logger: Logger) -> None:
        """Start the clock of data: the next batch is fetched now, unless a further microbatch follows."""
        self._switch("data")

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Start the clock of training: the update follows."""
        self._switch("train")

    def batch_end(self, state: State, logger: Logger) -> None:
        """Stop the clock, and log if it is time."""
        self._switch(None)
        super().batch_end(state, logger)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Stop the clock, and log if it is time."""
        self._switch(None)
        super().epoch_end(state, logger)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Start the clock of saving, which runs until the next event."""
        self._switch("save")

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Start the clock of saving."""
        self._switch("save")

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """Start the clock of saving."""
        self._switch("save")

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Start the clock of evaluation."""
        self._switch("eval")

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Stop the clock."""
        self._switch(None)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Stop the clock."""
        self._switch(None)

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent since the first start, by kind; they add up to the whole time."""
        start = self._made_at if self._first_start is None else self._first_start
        other = time.time() - start - sum(self._spent.values())
        return {**self._spent, "other": max(0.0, other)}

    def ratio(self) -> float:
        """Return the share of the time that went into training steps."""
        seconds = self.seconds()
        return seconds["train"] / max(sum(seconds.values()), 1e-9)

    def _switch(self, kind: str | None) -> None:
        now = time.perf_counter()
        if self._mark is not None:
            previous_kind, start_s = self._mark
            self._spent[previous_kind] += now - start_s
        self._mark = None if kind is None else (kind, now)

    def act(self, state: State, logger: Logger) -> None:
        """Log the sums."""
        metrics = {f"goodput/{kind}_seconds": number for kind, number in self.seconds().items()}
        logger.log_metrics({**metrics, "goodput/ratio": self.ratio()})

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, and the time at which they were taken."""
        return {"spent": dict(self._spent), "first_start": self._first_start, "saved_at": time.time()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the sums of a checkpoint."""
        self._spent |= {kind: float(state["spent"].get(kind, 0.0)) for kind in _KINDS}
        self._first_start = state["first_start"]
        self._saved_at = float(state["saved_at"])
