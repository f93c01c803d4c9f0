"""The request for a replay, which a trainer finds when it is made within it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hocket.trainer.log.loss_journal import LossJournal
from hocket.trainer.protocols import Entry
from hocket.trainer.replay.tensor_record import StepRecord


class ReplayFinished(BaseException):
    """Ends the script of a replay after its last step, so that nothing behind `fit` runs."""


@dataclass(slots=True, kw_only=True)
class Replay:
    """A replay of a run up to a step, and what it finds.

    A trainer that is made within `replaying` continues the run from the newest whole checkpoint before the
    step. It saves and logs nothing, and `fit` raises `ReplayFinished` after the step.
    """

    step: int
    """The last step to run, as loggers count: from 1 on."""
    run: str | None = None
    """The folder or URI of the run's checkpoints; None for the `save_folder` of the trainer."""
    from_start: bool = False
    """Whether the run starts as the script starts it, and not from a checkpoint."""
    before: int | None = None
    """Checkpoints from this step on are not started from; None for `step`."""
    records_all: bool = False
    """Whether every step is measured, and not the last one alone."""
    surveys: bool = False
    """Whether only to find the steps and losses of the checkpoints, without a step."""
    steps: list[int] = field(default_factory=list)
    """The steps of the whole checkpoints that a survey found."""
    losses: LossJournal = field(default_factory=LossJournal)
    """The losses of the replayed steps."""
    recorded: dict[int, float] = field(default_factory=dict)
    """The losses by step that the first checkpoint from `step` on has; in a survey, all checkpoints."""
    recorded_in: str | None = None
    """The name of that checkpoint; None if there is none."""
    start: Entry | None = None
    """The checkpoint that the replay starts from; None for the start of the script."""
    num_ranks: int = 1
    """Number of data-parallel ranks of the replay."""
    is_other_ranks: bool = False
    """Whether another number of processes saved `start`."""
    saved_ranks: int | None = None
    """Number of data-parallel ranks that saved `start`; None if it does not say so."""
    saved_samples: int | None = None
    """Number of samples of each global batch before `start`; None if the batches were of several sizes."""
    location: str = ""
    """The folder or URI of the checkpoints."""
    records: list[StepRecord] = field(default_factory=list)
    """The measured steps of this rank."""
    last: list[StepRecord] = field(default_factory=list)
    """The measurements of the last step on each rank."""

    @property
    def start_step(self) -> int:
        """The step that the replay starts after."""
        return 0 if self.start is None else self.start.step or 0

    @property
    def is_over(self) -> bool:
        """Whether the last step was run, or the survey made."""
        return bool(self.last) or (self.surveys and bool(self.location))

    @property
    def limit(self) -> int:
        """The step that the start of the replay lies before."""
        return self.step if self.before is None else self.before


@contextmanager
def replaying(replay: Replay) -> Iterator[Replay]:
    """Let the trainers that are made within this context replay a step."""
    global _active
    previous, _active = _active, replay
    try:
        yield replay
    finally:
        _active = previous


def current_replay() -> Replay | None:
    """Return the replay that is asked for; None in an ordinary run."""
    return _active


_active: Replay | None = None
