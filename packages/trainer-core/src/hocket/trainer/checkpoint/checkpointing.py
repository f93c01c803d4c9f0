"""Saving checkpoints at intervals, when asked, and at the end."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from hocket.trainer.checkpoint.checkpoint_source import newest_of
from hocket.trainer.checkpoint.checkpoint_state import CheckpointState
from hocket.trainer.checkpoint.model_state import RESHAPED
from hocket.trainer.checkpoint.registry import REQUIRED, required_algorithms
from hocket.trainer.checkpoint.save_times import SaveTimes
from hocket.trainer.checkpoint.tree_filter import check_ignore_keys, without
from hocket.trainer.errors import FolderInUseError, TimeUnitError, TrainerConfigError
from hocket.trainer.event import Event
from hocket.trainer.interval import IsTime, every
from hocket.trainer.log.notices import print_notices
from hocket.trainer.metrics.metric_direction import metric_values
from hocket.trainer.protocols import CheckpointStore, SaveHandle
from hocket.trainer.ranks.step_sync import StepSync
from hocket.trainer.time import Time, TimeInput, TimeUnit, ensure_time
from hocket.trainer.timestamp import Counts, Timestamp, count_in, index_of, timestamp_of

if TYPE_CHECKING:
    from hocket.trainer.state import State

_FIELDS = ("run_name", "iteration", "epoch", "batch", "sample", "token", "batch_in_epoch")
_RANK_PART = re.compile(r"[-_.]?(?:rank)?\{(?:local_|node_)?rank\}")
_EXTENSION = re.compile(r"(?:\.(?:pt|bin|tar|gz|tgz|bz2|lzma|zst|lz4|symlink))+$")


class Checkpointer:
    """The part of the loop that saves the run at intervals and at the end of training.

    It saves after `BATCH_CHECKPOINT`, `EPOCH_CHECKPOINT` or `ITERATION_CHECKPOINT`, depending on the unit of
    the interval, and after `FIT_END` if anything was trained since the last save. With `mode="async"`,
    training goes on during a save. The error of such a save is raised at the end of the next batch, and the
    end of `fit` waits for the save.

    Args:
        store: The checkpoints of this run.
        run_state: The state to save.
        state: The state of the run.
        save_interval: An interval of training, in epochs when it is a bare number; or a function
            `(state, event) -> bool`.
        save_filename: The checkpoint's name, with fields such as `{epoch}` and `{batch}`; a name that comes
            twice in a row gets the suffix `-ba{batch}`, unless it may be overwritten.
        mode: `"sync"` or `"async"`.
        weights_only: Save only the model and the time; such a checkpoint is loaded with `load_weights_only`.
        ignore_keys: Parts to leave out, as `tree_filter.without` takes them.
        has_metrics: Add the last values of the metrics to the checkpoint's `user`, each under its name in the
            log, such as `metrics/eval/Accuracy`.
        overwrite: Replace a checkpoint of the same name; False refuses a folder with later checkpoints.
        others: The further series of checkpoints of the run, which are saved after this one.

    Attributes:
        notices: Sentences about the arguments, for the user.

    Raises:
        TrainerConfigError: If the file name has unknown fields.
    """

    def __init__(
        self,
        store: CheckpointStore,
        run_state: CheckpointState,
        state: State,
        *,
        save_interval: TimeInput | IsTime = "1ep",
        save_filename: str = "ep{epoch}-ba{batch}",
        mode: Literal["sync", "async"] = "sync",
        weights_only: bool = False,
        ignore_keys: Any = None,
        has_metrics: bool = False,
        overwrite: bool = False,
        others: Sequence[Checkpointer] = (),
    ) -> None:
        self.store = store
        self.mode: Literal["sync", "async"] = mode
        self.notices: list[str] = []
        self._run_state = run_state
        self._state = state
        self._interval = None if callable(save_interval) else ensure_time(save_interval, TimeUnit.EPOCH)
        self._is_due = _interval(save_interval)
        self._will_be_due = _interval(save_interval)
        self._template = self._plain_template(save_filename)
        self._weights_only = weights_only
        check_ignore_keys(ignore_keys)
        self._ignore_keys = ignore_keys
        self._has_metrics = has_metrics
        self._overwrite = overwrite
        self._others = others
        for other in others:
            other.before_save = lambda: self.before_save()
            self.notices += other.notices
        self.before_save: Callable[[], object] = _nothing
        """Called before each save; an exception that it raises prevents the save."""
        self._is_pending = False
        # The index in `Counts` of the number to compare, and the bounds of the interval in progress.
        self._present: tuple[int, float, float] = (0, 0.0, 0.0)
        self._last_batch: int | None = None
        self._last_from_template = ""
        self._is_late = False
        self._handle: SaveHandle | None = None
        self._times = SaveTimes(str(getattr(store, "uri", "")))

    @property
    def locations(self) -> list[str]:
        """The locations of this series of checkpoints and of the others, in words."""
        location = getattr(self.store, "uri", f"in a `{type(self.store).__name__}`")
        own = f"{location} (weights alone)" if self._weights_only else str(location)
        return [own, *(one for other in self._others for one in other.locations)]

    @property
    def is_foreseeable(self) -> bool:
        """Whether the time of the next save is known ahead; False for an interval that is a function."""
        return self._interval is not None and all(other.is_foreseeable for other in self._others)

    def next_due(self, timestamp: Timestamp) -> Time | None:
        """Return the time of the first save after `timestamp`, in the interval's unit; None if unforeseeable.

        Raises:
            TimeUnitError: If the interval is in `dur` and the training's duration is not known.
        """
        interval = self._interval
        if interval is None:
            return None
        length = interval
        if interval.unit is TimeUnit.DURATION:
            if self._state.max_duration is None:
                raise TimeUnitError("a save interval in `dur` needs `max_duration`; set it")
            share = interval.value
            duration = self._state.max_duration
            done = count_in(timestamp.counts, duration.unit) / duration.value
            return duration * min(1.0, (int(done / share + 1e-9) + 1) * share)
        done_now = count_in(timestamp.counts, length.unit)
        return Time((done_now // int(length.value) + 1) * int(length.value), length.unit)

    def is_due_at(self, after: Counts) -> bool:
        """Whether a save is due at `after`, the end of the present batch.

        If so, the next batch is fetched after the save, so that loader and random generators are saved as
        they are between two batches. An interval that is a function cannot be foreseen; the loader then keeps
        resume points instead.
        """
        if self._is_pending or (self._others and any(other.is_due_at(after) for other in self._others)):
            return True
        if self._interval is None or self._is_quiet(self._state.counts, after):
            return False
        return self._will_be_due(_Foreseen(self._state, after), Event.BATCH_CHECKPOINT)

    def _is_quiet(self, before: Counts, now: Counts) -> bool:
        """Return whether a batch certainly ends without a save, by a comparison of plain numbers.

        Nearly every batch does. The bounds of the interval that contains `before` are kept until it has
        passed.
        """
        interval = self._interval
        if interval is None or interval.unit is TimeUnit.DURATION:
            return False
        index, start, stop = self._present
        if not start <= before[index] < stop:
            if interval.unit in (TimeUnit.EPOCH, TimeUnit.ITERATION):
                self._present = index, start, stop = 0, 0.0, math.inf
            else:
                index, length = index_of(interval.unit), int(interval.value)
                start = before[index] // length * length
                stop = start + length
                self._present = index, start, stop
        end_index, end = self._state.end()
        return now[index] < stop and now[end_index] < end

    def check_folder(self, sync: StepSync) -> None:
        """Refuse a folder with checkpoints later than the run's position, unless they may be replaced.

        Collective.

        Raises:
            FolderInUseError: If it has later checkpoints.
        """
        for other in self._others:
            other.check_folder(sync)
        if self._overwrite:
            return
        batch = self._state.timestamp.counts.batch
        later = [one for one in self.store.list() if one.status == "committed" and (one.step or 0) > batch]
        (last_batch,) = sync.from_rank_0(max((one.step or 0 for one in later), default=0))
        if last_batch:
            location = getattr(self.store, "uri", "the checkpoint store")
            raise FolderInUseError(
                f"`{location}` has checkpoints up to batch {last_batch}, and this training starts at batch "
                f"{batch}; use `autoresume=True` to go on from the last one, another `save_folder`, or "
                "`save_overwrite=True` to replace them; `hocket-ckpt rm` removes one that is damaged"
            )

    def request_save(self) -> None:
        """Request a save at the next step boundary at which no batch has been fetched ahead."""
        self._is_pending = True

    def save_if_due(self, event: Event) -> None:
        """Save if a save is due; raise the error of an asynchronous save. Collective when it saves."""
        if self._handle is not None and self._handle.done():
            self._finish()
        state = self._state
        if (
            event is Event.BATCH_CHECKPOINT
            and not self._is_pending
            and self._is_quiet(state.previous_counts, state.counts)
        ):
            pass
        elif self._is_due(state, event) or (self._is_pending and self._run_state.can_save()):
            if self._weights_only or self._run_state.can_save():
                self.save()
            else:
                self._postpone()
        for other in self._others:
            other.save_if_due(event)

    def _postpone(self) -> None:
        """Save at the next boundary: a batch is ahead, because a callback changed `max_duration`. Collective.

        A run that this has ended trains on that batch first, as after a request to stop.
        """
        self.request_save()
        state, loader = self._state, self._run_state.loader
        if state.is_over() and not state.stop.is_final and loader is not None and loader.is_batch_ahead():
            state.max_duration = Time(state.counts.batch + 1, TimeUnit.BATCH)

    def save_in_time(self, sync: StepSync, deadline: float) -> None:
        """Same as `save_at_end`, but begin no save that cannot end before the process is killed. Collective.

        Args:
            sync: The exchange between the ranks.
            deadline: The time by `time.monotonic` at which this process is killed.
        """
        batch = self._state.timestamp.counts.batch
        if self._last_batch != batch:
            self._finish()
            if reason := self._times.too_late_for_save(sync, deadline):
                saved, self._last_batch, self._is_late = self._last_batch or 0, batch, True
                copied = max([other.copy_in_time(sync, deadline) or 0 for other in self._others], default=0)
                told = f"batch {batch} is not saved: {reason}. The last checkpoint is {self._times.last_name}"
                if copied > saved:
                    told += f", and the machines that stay go on from the copy in memory of batch {copied}"
                print_notices(self._state, [f"{told}; `hocket-launch --grace` sets the time for a save"])
            else:
                self.save()
        for other in self._others:
            other.save_in_time(sync, deadline)
        self._finish()

    def copy_in_time(self, sync: StepSync, deadline: float) -> int | None:
        """Make a copy in memory if this series does and it can end before the process is killed. Collective.

        Args:
            sync: The exchange between the ranks.
            deadline: The time by `time.monotonic` at which this process is killed.

        Returns:
            The batch of the newest copy; None without one that outlives this machine.
        """
        del sync, deadline
        return None

    def save_at_end(self) -> None:
        """Save what was trained since the last save, and wait until it is committed. Collective."""
        if self._last_batch != self._state.timestamp.counts.batch:
            self.save()
        for other in self._others:
            other.save_at_end()
        self._finish()
        if not self._is_late:
            for other in self._others:
                other.release()

    def release(self) -> None:
        """Remove checkpoints that are needed only until the run has saved its end; here, none are."""

    def close(self) -> None:
        """Wait for saves in progress, also after a failed run, because the state that they save is valid."""
        try:
            self._finish()
        finally:
            for other in self._others:
                other.close()

    def start_from_loaded(self) -> None:
        """Record that the state was loaded: it is not saved again, and its checkpoint's name is in use."""
        counts = self._state.timestamp.counts
        self._last_batch, self._last_from_template = counts.batch, self._name_at(counts)
        for other in self._others:
            other.start_from_loaded()

    def start_from_copy(self, sync: StepSync) -> None:
        """Record that the state was loaded from a copy that may be later than this series. Collective.

        What was trained since the newest checkpoint of the series is saved at the end at the latest.
        """
        newest = newest_of(self.store, sync)
        if newest is not None:
            self._last_batch = newest.step
            suffix = "" if "{batch}" in self._template else f"-ba{newest.step}"
            self._last_from_template = newest.name.removesuffix(suffix)
        for other in self._others:
            other.start_from_copy(sync)

    def forget_last(self) -> None:
        """Discard the batch of the last save; called when the time starts again at 0."""
        self._last_batch = None
        for other in self._others:
            other.forget_last()

    def save(self) -> SaveHandle:
        """Save now, after waiting for the previous save; with `mode="sync"`, wait for it, too. Collective.

        Raises:
            IncompleteCheckpointError: If training changes something that the checkpoint would not hold.
        """
        self.before_save()
        self._finish()
        self._is_pending = False
        counts = self._state.timestamp.counts
        name = self._next_name(counts)
        weights_only = self._weights_only
        self._times.begin(counts.batch)
        tree = self._run_state.weights_tree() if weights_only else self._run_state.tree()
        user = {} if weights_only else self._run_state.rank_zero()
        user[REQUIRED] = required_algorithms(self._state)
        if reshaped := self._run_state.reshaped_buffers():
            user[RESHAPED] = reshaped
        if self._has_metrics:
            user |= metric_values(self._state)
        tree = without(
            tree,
            self._ignore_keys,
            absent=self._run_state.guard.check(tree, self._ignore_keys),
            elsewhere=self._run_state.elsewhere,
        )
        self._handle = self.store.save(
            self._run_state.own_part(tree),
            step=counts.batch,
            name=name,
            per_rank=None if weights_only else self._run_state.per_rank(),
            user=user,
            mode=self.mode,
            **({"overwrite": True} if self._overwrite else {}),
            **self._run_state.store_options,
        )
        self._last_batch = counts.batch
        handle = self._handle
        if self.mode == "sync":
            self._finish()
        return handle

    def _next_name(self, counts: Counts) -> str:
        """Return the name of the next checkpoint, with `-ba{batch}` if the last one had the same name.

        With a template such as `ep{epoch}`, a run that ends within an epoch that has a checkpoint would
        otherwise fail at its end and lose the steps since that checkpoint.
        """
        name = self._name_at(counts)
        if self._overwrite or name != self._last_from_template:
            self._last_from_template = name
            return name
        return f"{name}-ba{counts.batch}"

    def _name_at(self, counts: Counts) -> str:
        fields = {field: getattr(counts, field) for field in _FIELDS[1:]}
        return self._template.format(run_name=self._state.run_name, **fields)

    def _finish(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()
            self._times.commit(handle)

    def _plain_template(self, given: str) -> str:
        template = _EXTENSION.sub("", _RANK_PART.sub("", given)).rstrip("/")
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
        if "/" in template:
            raise TrainerConfigError(
                f"`save_filename` `{given}` has a `/`; expected the name of one folder: put the rest into "
                "`save_folder`"
            )
        return template


def _nothing() -> None:
    """Stand for a hook that is not set."""


class _Foreseen:
    """The attributes of the state that an interval reads, as they will be after the present batch."""

    __slots__ = ("dataloader_len", "max_duration", "previous_timestamp", "timestamp")

    def __init__(self, state: State, after: Counts) -> None:
        self.timestamp = timestamp_of(after)
        self.previous_timestamp = state.timestamp
        self.max_duration = state.max_duration
        self.dataloader_len = state.dataloader_len


def _interval(given: TimeInput | IsTime) -> IsTime:
    return every(given, checkpoint_events=True, include_end_of_training=True)
