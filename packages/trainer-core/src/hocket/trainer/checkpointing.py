"""Saving checkpoints at intervals, and finding the one to go on from."""

from __future__ import annotations

import re
import string
from typing import TYPE_CHECKING, Any, Literal

from hocket.trainer.agreement import Agreement
from hocket.trainer.callback import Callback
from hocket.trainer.errors import ResumeError, TrainerConfigError
from hocket.trainer.event import Event
from hocket.trainer.interval import IsTime, every
from hocket.trainer.protocols import CheckpointStore, SaveHandle
from hocket.trainer.run_state import RunState
from hocket.trainer.time import TimeInput
from hocket.trainer.timestamp import Timestamp

if TYPE_CHECKING:
    from hocket.trainer.logger import Logger
    from hocket.trainer.state import State

_FIELDS = ("run_name", "iteration", "epoch", "batch", "sample", "token", "batch_in_epoch")
_RANK_PART = re.compile(r"[-_.]?(?:rank)?\{(?:local_|node_)?rank\}")
_EXTENSION = re.compile(r"(?:\.(?:pt|bin|tar|gz|tgz|bz2|lzma|zst|lz4|symlink))+$")


class CheckpointSaver(Callback):
    """Saves the run at intervals and at the end of training.

    At `BATCH_CHECKPOINT`, `EPOCH_CHECKPOINT` or `ITERATION_CHECKPOINT`, as the interval's unit says, and at
    `FIT_END` whatever was trained since the last save. With `mode="async"` a save goes on while training
    does;
    its error is raised at the next batch's end, and `FIT_END` waits for it.

    Args:
        store: Where to.
        run_state: What to save.
        save_interval: An interval of training, epochs when it is a bare number; or `(state, event) -> bool`.
        save_filename: The checkpoint's name, with fields such as `{epoch}` and `{batch}`.
        mode: `"sync"` or `"async"`.

    Attributes:
        notices: Sentences about the arguments, for the user.

    Raises:
        TrainerConfigError: If the file name has unknown fields.
    """

    def __init__(
        self,
        store: CheckpointStore,
        run_state: RunState,
        *,
        save_interval: TimeInput | IsTime = "1ep",
        save_filename: str = "ep{epoch}-ba{batch}",
        mode: Literal["sync", "async"] = "sync",
    ) -> None:
        self.store = store
        self.mode: Literal["sync", "async"] = mode
        self.notices: list[str] = []
        self._run_state = run_state
        self._interval = save_interval
        self._is_due = _interval(save_interval)
        self._will_be_due = _interval(save_interval)
        self._template = self._plain_template(save_filename)
        self._last_batch: int | None = None
        self._handle: SaveHandle | None = None

    def must_data_stand_still(self, state: State, after: Timestamp) -> bool:
        """Whether a checkpoint is due at `after`, the end of the present batch.

        The next batch is then fetched after the checkpoint, which so finds loader and generators as they are
        between two batches. An interval that is a function cannot be foreseen, and always says yes.
        """
        if callable(self._interval):
            return True
        return self._will_be_due(_Foreseen(state, after), Event.BATCH_CHECKPOINT)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if it is time; raise what a save on its way has raised."""
        if self._handle is not None and self._handle.done():
            self._finish()
        self._save_if_due(state, Event.BATCH_CHECKPOINT)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if it is time."""
        self._save_if_due(state, Event.EPOCH_CHECKPOINT)

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if it is time."""
        self._save_if_due(state, Event.ITERATION_CHECKPOINT)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Save what was trained since the last save, and wait until it is committed."""
        if self._last_batch != state.timestamp.counts.batch:
            self.save(state)
        self._finish()

    def close(self, state: State, logger: Logger) -> None:
        """Wait for a save on its way, after a failed run too: what it saves is good."""
        self._finish()

    def loaded_at(self, batch: int) -> None:
        """Take note that the run starts from a checkpoint of that batch, which need not be saved again."""
        self._last_batch = batch

    def save(self, state: State) -> SaveHandle:
        """Save now. Collective. Waits for the save before, and with `mode="sync"` for this one."""
        self._finish()
        counts = state.timestamp.counts
        fields = {field: getattr(counts, field) for field in _FIELDS[1:]}
        self._handle = self.store.save(
            self._run_state.tree(),
            step=counts.batch,
            name=self._template.format(run_name=state.run_name, **fields),
            per_rank=self._run_state.per_rank(),
            mode=self.mode,
        )
        self._last_batch = counts.batch
        handle = self._handle
        if self.mode == "sync":
            self._finish()
        return handle

    def _save_if_due(self, state: State, event: Event) -> None:
        if self._is_due(state, event):
            self.save(state)

    def _finish(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()

    def _plain_template(self, given: str) -> str:
        template = _EXTENSION.sub("", _RANK_PART.sub("", given))
        if template != given:
            self.notices.append(
                f"a checkpoint is one folder for all ranks: `save_filename` `{given}` becomes `{template}`"
            )
        unknown = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
        unknown -= set(_FIELDS)
        if unknown or not template:
            known = ", ".join(f"`{{{field}}}`" for field in _FIELDS)
            raise TrainerConfigError(
                f"`save_filename` `{given}` has the unknown fields {sorted(unknown)}; expected a name "
                f"with some of {known}"
            )
        return template


class _Foreseen:
    """The state as an interval will see it after the present batch."""

    __slots__ = ("dataloader_len", "max_duration", "previous_timestamp", "timestamp")

    def __init__(self, state: State, after: Timestamp) -> None:
        self.timestamp = after
        self.previous_timestamp = state.timestamp
        self.max_duration = state.max_duration
        self.dataloader_len = state.dataloader_len


def _interval(given: TimeInput | IsTime) -> IsTime:
    return every(given, checkpoint_events=True, include_end_of_training=True)


def find_source(
    store: CheckpointStore | None, *, autoresume: bool, load_path: str | None, agreement: Agreement
) -> str | None:
    """What to load: with `autoresume` the newest committed checkpoint in the store, else `load_path`.

    Rank 0's listing decides for all ranks. Collective.

    Raises:
        ResumeError: If a rank does not see the checkpoint that rank 0 sees.
    """
    if not autoresume or store is None:
        return load_path
    committed = [entry for entry in store.list() if entry.status == "committed"]
    newest = max(committed, key=lambda entry: entry.step or 0, default=None)
    # Steps start at 0, so 0 stands for nothing found.
    (agreed,) = agreement.from_rank_0(0 if newest is None else (newest.step or 0) + 1)
    if agreed == 0:
        return load_path
    same = [entry for entry in committed if entry.step == agreed - 1]
    if not same:
        raise ResumeError(
            f"rank 0 found a checkpoint of step {agreed - 1} to go on from, and this rank sees "
            f"{[entry.name for entry in committed]}; the save folder must be the same one for all ranks"
        )
    return same[-1].name


def load(
    store: CheckpointStore, source: str, run_state: RunState, state: State, agreement: Agreement
) -> list[str]:
    """Load the checkpoint into the run. Collective.

    Returns:
        Sentences for the user.

    Raises:
        ResumeError: If ranks loaded different steps.
    """
    loaded: Any = store.load(source, run_state.tree_to_fill())
    said = run_state.take(loaded)
    steps = agreement.gather(state.timestamp.counts.batch)
    if len(set(steps)) > 1:
        told = ", ".join(f"rank {rank}: {int(step)}" for rank, step in enumerate(steps))
        raise ResumeError(f"the ranks loaded checkpoints of different steps ({told}) from `{source}`")
    return [f"going on from `{loaded.name}`, {state.timestamp.batch} of training", *said]
