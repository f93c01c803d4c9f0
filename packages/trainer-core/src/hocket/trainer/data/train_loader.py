"""`TrainLoader`: the batches of training, in step on all ranks, and the position in them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from hocket.trainer.data.global_batches import GlobalBatchLoader
from hocket.trainer.data.loader_checks import loader_length
from hocket.trainer.data.loader_position import EpochProgress
from hocket.trainer.data.prefetch import BatchPrefetcher, DeviceBatch
from hocket.trainer.data.worker_seeds import end_workers
from hocket.trainer.errors import DataError, RankFailedError
from hocket.trainer.protocols import EndsEpochs, Stateful
from hocket.trainer.ranks.step_sync import GlobalStep, PendingStep, StepSync
from hocket.trainer.ranks.stop_signal import StopSignal
from hocket.trainer.timestamp import Counts

_log = logging.getLogger(__name__)

# The most batches that a rank drops if its data outlasts that of other ranks and its loader has no length.
_MAX_DISCARDED = 16


class ResumePoint(NamedTuple):
    """The states of the random generators and the loader before a batch was fetched ahead."""

    rng: Mapping[str, Any]
    loader_state: Mapping[str, Any] | None


class TrainLoader:
    """The batches of training: fetched ahead, in step on all ranks, and resumable.

    The exchange of a batch's facts between ranks starts a step before its use, whatever the depth of
    prefetch. A checkpoint is saved when no batch is ahead, so the states of the loader and of the random
    generators are then those between two batches. If saves cannot be predicted (a callable interval),
    `keeps_resume_points` records both states before each fetch instead.

    A `Stateful` loader is resumed by its state. For any other loader, the epoch's batches up to the position
    are fetched again, from the generator states at the start of the epoch, which reproduces a shuffle. If its
    batch size is another one now, its sampler begins after the samples that were trained on.

    Args:
        prefetcher: The prefetcher of the batches.
        sync: The exchange between the ranks.
        stop: The signal that requests the end of training.
        counts: A function that returns the counts of training so far.
        capture_rng: A function that returns the generator states; None in a run without checkpoints.
        keeps_resume_points: Whether to record the states of generators and loader before each fetch.
        check_division: A function that is called once with the first batch, or None without one, before it is
            trained on; None where the ranks need not compare their batches. Collective.
        on_length: A function that is called with the length of an epoch that is not as long as others, and
            with None when an epoch ends.
    """

    def __init__(
        self,
        prefetcher: BatchPrefetcher,
        *,
        sync: StepSync,
        stop: StopSignal,
        counts: Callable[[], Counts],
        capture_rng: Callable[[], dict[str, Any]] | None = None,
        keeps_resume_points: bool = False,
        check_division: Callable[[Any], object] | None = None,
        on_length: Callable[[int | None], object] = lambda _: None,
    ) -> None:
        self.prefetcher = prefetcher
        self.spec = prefetcher.spec
        self.loader: Any = prefetcher.loader
        self.is_stateful = isinstance(self.loader, Stateful)
        self.is_epoch_over = False
        """Whether the last `take` found the end of the epoch."""
        self.epoch_rng: Mapping[str, Any] | None = None
        """The generators' states before the present epoch's first batch; None between epochs."""
        self.progress = EpochProgress(self.loader, sync)
        """The samples of the present epoch that were trained on."""
        self._sync = sync
        self._stop = stop
        self._counts = counts
        self._capture_rng = capture_rng
        self._fetch = prefetcher.fetch_now if prefetcher.is_immediate else prefetcher.next
        self._is_alone = sync.num_ranks == 1 and not keeps_resume_points
        self._is_deep = prefetcher.depth > 1
        # At most one batch is ahead of the batch in use, so two records are enough.
        prefetcher.reuses_records = not self._is_deep
        self._points: deque[ResumePoint] | None = deque() if keeps_resume_points else None
        self._next: DeviceBatch | None = None
        self._pending: GlobalStep | PendingStep | None = None
        self._error: BaseException | None = None
        self._num_to_skip = 0
        self._check_division = check_division
        self._on_length = on_length
        self._taken_at: int | None = None
        self._is_uneven_told = False

    @property
    def is_in_step(self) -> bool:
        """Whether a batch was taken whose step is not counted yet."""
        return self._taken_at == self._counts().batch

    @property
    def has_batch_ahead(self) -> bool:
        """Whether a batch, or the end of the epoch, was fetched and not taken."""
        return self._pending is not None or self.prefetcher.num_ahead > 0

    def take(self, num_batches: int) -> tuple[DeviceBatch, GlobalStep] | None:
        """Return the next batch and the facts about its global batch; None when there is none to train on.

        None means the end of the epoch (`is_epoch_over`), or that the ranks agreed to stop (the signal is
        then final) and the batch is kept. Collective when there are several ranks.

        Args:
            num_batches: Number of batches trained on so far.

        Raises:
            DataError: If the loader yields no batch in a whole epoch.
            RankFailedError: If another rank could not fetch its batch.
        """
        if self._pending is None:
            self._begin()
            if self._check_division is not None:
                check, self._check_division = self._check_division, None
                check(None if self._next is None else self._next.batch)
        assert self._pending is not None
        # In one process the facts are known already; the call would be made in each step.
        step = self._pending if type(self._pending) is GlobalStep else self._pending.wait()
        self.is_epoch_over = False
        if step.is_end or step.should_stop:
            if step.failed_ranks:
                self._raise(step)
            if step.is_end:
                self._end_epoch(step)
                return None
            if self._capture_rng is None:
                # No checkpoint is saved, so the batch may be kept for the next `fit`.
                step.should_stop = False
                self._pending = step
                self._stop.finalize()
                return None
            self._stop.agree()
        batch = self._next
        assert batch is not None
        self._pending = self._next = None
        self._taken_at = num_batches
        if self._points:
            self._points.popleft()
        return batch, step

    def fetch_ahead(self, clock_s: float = 0.0) -> None:
        """Fetch batches up to the prefetcher's depth, and start the exchange for the next one.

        Args:
            clock_s: The time that all ranks count for the step in progress, for `agreed_clock`.
        """
        if self._is_alone and self._pending is None and self.prefetcher.is_started:
            # The usual case in one process: no exchange, errors are raised at once, and no state is recorded.
            self._next = batch = self._fetch()
            self._pending = self._sync.of_one(batch, self._stop.reason is not None)
        elif self._pending is None:
            self._begin(clock_s)
        if self._is_deep:
            self._fetch_further()

    def agreed_clock(self, clock_s: float) -> float:
        """Return rank 0's time for the step in progress, on several ranks. Collective.

        The exchange of the next batch carries the time, and `take` waits for it soon after. Where no batch is
        ahead, as before a save, the ranks exchange the time alone.

        Args:
            clock_s: The time that `fetch_ahead` was given, or would have been given.
        """
        if self._pending is None:
            step = self._sync.begin(None, clock_s=clock_s).wait()
        else:
            self._pending = step = self._pending.wait()
        assert step.clock_s is not None
        return step.clock_s

    def _fetch_further(self) -> None:
        while self.prefetcher.num_ahead < self.prefetcher.depth - 1 and self._next is not None:
            before = self.prefetcher.num_ahead
            try:
                self._prepare_fetch()
                self.prefetcher.fetch()
            except Exception as error:  # noqa: BLE001 - it is raised on every rank, or at once
                self._keep(error)
            if self.prefetcher.num_ahead == before:
                return

    def is_batch_ahead(self) -> bool:
        """Return whether a batch to train on was fetched and not taken. Collective."""
        if self._pending is None:
            return False
        self._pending = step = self._pending.wait()
        return not step.is_end

    def is_at_end(self) -> bool:
        """Return whether a rank has no further batch, which ends the epoch on every rank. Collective."""
        if self._pending is None:
            self._begin()
        assert self._pending is not None
        self._pending = step = self._pending.wait()
        return step.is_end and self.take(self._counts().batch) is None

    def fail(self, error: BaseException) -> None:
        """Raise `error` when the next batch is taken, and a `RankFailedError` on the other ranks."""
        self._error = self._error or error

    def resume_point(self) -> ResumePoint | None:
        """Return the states recorded before the oldest batch that is ahead; None if there are none."""
        return self._points[0] if self._points else None

    def state_dict(self) -> Mapping[str, Any] | None:
        """Return the loader's state as of the last batch taken, or of the epoch's end; None without one."""
        if not self.is_stateful:
            return None
        point = self.resume_point()
        state: Mapping[str, Any] | None = self.loader.state_dict() if point is None else point.loader_state
        return state

    def position(self) -> dict[str, Any]:
        """Return the position in the present epoch for a checkpoint; empty at the start of an epoch."""
        return self.progress.position(self._counts())

    def resume(
        self,
        state: Mapping[str, Any] | None,
        *,
        num_batches: int,
        position: Mapping[str, Any] | None = None,
    ) -> bool:
        """Continue after the `num_batches` batches of the present epoch that were trained on.

        Args:
            state: The return value of `state_dict`; None to fetch and discard instead.
            num_batches: Number of batches of the present epoch that were trained on.
            position: The return value of `position`; None for a checkpoint without one.

        Returns:
            Whether `skip` has to fetch and discard batches.

        Raises:
            ResumeError: If the loader's batches have another size now, and the samples cannot be counted.
        """
        self.close()
        if num_batches:
            self.progress.load(position, self._counts())
        if state is not None and self.is_stateful:
            if isinstance(self.loader, GlobalBatchLoader):
                # Checkpoints of earlier versions have no number of samples.
                state = {"sample": self._counts().sample_in_epoch, **state}
            else:
                self.progress.check_state()
            self.loader.load_state_dict(state)
            self._num_to_skip = -num_batches
            if num_batches and hasattr(self.loader, "data_parallel"):
                self._on_length(loader_length(self.loader))
            return False
        self._num_to_skip = num_batches
        return num_batches > 0

    def skip(self) -> int | None:
        """Move to the position that `resume` was given, after the generators were restored. Collective.

        Returns:
            The number of this rank's samples that the sampler leaves out; None if the batches were fetched
            and discarded.
        """
        num_batches, self._num_to_skip = self._num_to_skip, 0
        if num_batches <= 0:
            return None
        first, length = self.progress.skip(num_batches, start=self._start_epoch)
        if length is not None:
            self._on_length(length)
        return first

    def close(self) -> None:
        """Release the loader's iterator with its workers."""
        self._pending = self._next = self._taken_at = None
        self._num_to_skip = 0
        self.progress.reset()
        if self._points is not None:
            self._points.clear()
        self.prefetcher.stop()
        if isinstance(self.loader, GlobalBatchLoader):
            self.loader.end_workers()
        else:
            end_workers(self.loader)

    def _begin(self, clock_s: float = 0.0) -> None:
        """Make the next batch ready and start the exchange of its facts."""
        batch, prefetcher = None, self.prefetcher
        if self._error is None:
            try:
                if (self._points is not None or not prefetcher.is_started) and not prefetcher.num_ahead:
                    self._prepare_fetch()
                batch = prefetcher.next()
            except Exception as error:  # noqa: BLE001 - it is raised on every rank, or at once
                self._keep(error)
        self._next = batch
        self._pending = self._sync.begin(
            batch,
            wants_stop=self._stop.reason is not None,
            has_failed=self._error is not None,
            clock_s=clock_s,
        )

    def _prepare_fetch(self) -> None:
        """Start the epoch, and record the states before the fetch, if either is needed."""
        if not self.prefetcher.is_started:
            self._start_epoch()
        if self._points is not None and self._capture_rng is not None:
            state = dict(self.loader.state_dict()) if self.is_stateful else None
            self._points.append(ResumePoint(self._capture_rng(), state))

    def _keep(self, error: Exception) -> None:
        """Keep an error until every rank knows of it; in one process raise it."""
        if self._sync.num_ranks == 1:
            raise error
        self._error = error

    def _start_epoch(self, *, skip: int = 0, counts: bool = False, rest: Any = None) -> int:
        """Start the epoch, after `skip` batches: those of the loader, or of `rest`, a loader without them."""
        epoch = self._counts().epoch
        if self._capture_rng is not None and not self.is_stateful:
            self.epoch_rng = self._capture_rng()
        num_restored, self._num_to_skip = -self._num_to_skip, 0
        if num_restored > 0:
            # torch's loaders draw a seed when an iterator is made, here for the second time in the epoch.
            with torch.random.fork_rng([]):
                self.prefetcher.start(epoch)
            self.prefetcher.continue_at(num_restored)
            return 0
        if rest is None:
            return self.prefetcher.start(epoch, skip=skip, counts=counts)
        self.prefetcher.start(epoch, loader=rest)
        self.prefetcher.continue_at(skip)
        return 0

    def _end_epoch(self, step: GlobalStep) -> None:
        ranks = ", ".join(map(str, step.ended_ranks))
        num_batches = self._counts().batch_in_epoch
        if not num_batches:
            whose = f" of rank {ranks}" if len(step.ended_ranks) < self._sync.num_ranks and ranks else ""
            raise DataError(
                f"the data loader{whose} yielded no batch in a whole epoch; expected at least 1 on every "
                "rank (a generator can be iterated once only, and more ranks than samples leave some without)"
            )
        if 0 < len(step.ended_ranks) < self._sync.num_ranks and not self._is_uneven_told:
            self._is_uneven_told = True
            if self._sync.rank == 0:
                _log.warning(
                    "the epoch ends after %d batches on every rank, because rank %s has no more and others "
                    "do; what they have left is dropped. Give every rank as many batches to train on all",
                    num_batches,
                    ranks,
                )
        if self._next is not None:
            # This rank has data left. Reading a sized loader to its end moves it to its next epoch; an
            # endless loader keeps its position.
            self.prefetcher.discard(loader_length(self.loader) or _MAX_DISCARDED)
        is_cut = self._next is None and self.prefetcher.is_cut
        self._pending = self._next = None
        self.prefetcher.stop()
        if is_cut and self.is_stateful and isinstance(self.loader, EndsEpochs):
            self.loader.end_epoch()
        if self._points is not None:
            self._points.clear()
        self.progress.reset()
        self._on_length(None)
        self.epoch_rng = None
        self.is_epoch_over = True

    def _raise(self, step: GlobalStep) -> None:
        self._pending = None
        error, self._error = self._error, None
        if error is not None and self._sync.rank in step.failed_ranks:
            raise error
        ranks = ", ".join(map(str, step.failed_ranks))
        raise RankFailedError(
            f"rank {ranks} failed before batch {self._counts().batch + 1}; its own error says why, and this "
            "rank ends at the same step"
        )
