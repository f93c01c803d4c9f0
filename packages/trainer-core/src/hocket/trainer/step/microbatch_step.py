"""`AutoMicrobatchStep`: a train step that finds the microbatch size before its first batch."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hocket.trainer.errors import MemoryExhaustedError
from hocket.trainer.log.logger import Logger
from hocket.trainer.metrics.metric_state import load_metric_states, metric_states
from hocket.trainer.process.rng import capture_rng, restore_rng
from hocket.trainer.protocols import TrainStep
from hocket.trainer.ranks.step_sync import StepSync
from hocket.trainer.step.microbatch_note import read_note, write_note
from hocket.trainer.step.microbatch_probe import MemoryProbe
from hocket.trainer.step.microbatch_search import MicrobatchSearch, even_share, samples_that_fit
from hocket.trainer.step.step import StepContext

_log = logging.getLogger(__name__)

METRIC = "trainer/device_train_microbatch_size"
_NUM_CONFIRMATIONS = 3


class AutoMicrobatchStep:
    """A train step that chooses `state.device_train_microbatch_size`, then computes as its inner step.

    The size is chosen before the first step, because a rank that runs out of memory within a step leaves the
    other ranks blocked in a collective. Every rank measures one and two samples with real communication and
    predicts the largest size that leaves the headroom free. The smallest prediction of all ranks is confirmed
    by further measurements. A size from a checkpoint or an earlier attempt of the job is used without
    measuring.

    If memory still runs out in one process, the step is discarded and repeated with half the size. On several
    ranks the error ends the rank, and half the size is written for the next attempt of the launcher.

    Args:
        inner: The step that computes gradients and updates.
        context: The parts of the run.
        search: The settings of the search.
        sync: The exchange between the ranks.
        logger: The logger of the size.

    Raises:
        TrainerConfigError: If the device's memory cannot be measured.
    """

    def __init__(
        self,
        inner: TrainStep,
        context: StepContext,
        search: MicrobatchSearch,
        sync: StepSync,
        logger: Logger,
    ) -> None:
        self.inner = inner
        self.remembered: int | None
        """The size from a checkpoint, if there is one."""
        self._context = context
        self._sync = sync
        self._logger = logger
        self.start(search)

    def start(self, search: MicrobatchSearch | None) -> None:
        """Measure again before the next step; with None, use the size in the state.

        Raises:
            TrainerConfigError: If the device's memory cannot be measured.
        """
        self._search = search
        self._meter = None if search is None else search.meter_of(self._context.state.device)
        self.remembered = None
        self._is_chosen = search is None

    @property
    def found(self) -> int | None:
        """The size that was found; None before the search, and if the size is fixed."""
        is_found = self._search is not None and self._is_chosen
        return self._context.state.device_train_microbatch_size if is_found else None

    def compute_gradients(self, batch: Any) -> torch.Tensor:
        """See `TrainStep`.

        Raises:
            MemoryExhaustedError: If one sample alone does not fit.
        """
        if not self._is_chosen:
            self._choose(batch)
            self._is_chosen = True
        if self._search is None:
            return self.inner.compute_gradients(batch)
        if self._sync.num_ranks == 1:
            return self._compute_alone(batch)
        try:
            return self.inner.compute_gradients(batch)
        except torch.OutOfMemoryError as error:
            self._end(error)
            raise

    def update(self) -> None:
        """See `TrainStep`."""
        self.inner.update()

    def _choose(self, batch: Any) -> None:
        samples = self._context.step.most_samples if self._context.step is not None else 0
        note = read_note()
        known_sizes = [size for size in (self.remembered, note) if size is not None]
        found_sizes = [int(size) for size in self._sync.gather(min(known_sizes, default=0)) if size > 0]
        if found_sizes:
            size, reason = min(found_sizes), "an earlier attempt or checkpoint had it"
        else:
            size, reason = self._measure(batch, samples), "measured before the first step"
        self._set(size)
        if self._sync.rank == 0:
            _log.info("`device_train_microbatch_size` is %d of %d samples: %s", size, samples, reason)

    def _set(self, size: int) -> None:
        self._context.state.device_train_microbatch_size = size
        self._logger.log_metrics({METRIC: size}, keep=True)

    def _measure(self, batch: Any, samples: int) -> int:
        """Return the size that fits on every rank. Collective."""
        assert self._search is not None
        assert self._meter is not None
        limit = self._meter.limit_bytes() * (1 - self._search.headroom)
        largest = self._search.largest_batch
        with MemoryProbe(
            self.inner, self._context, batch if largest is None else largest, self._meter
        ) as probe:
            peak_of_one = self._peak(probe, 1)
            if samples < 2:
                return 1
            points = (1, peak_of_one), (2, self._peak(probe, 2))
            size = self._agree(samples_that_fit(points, limit, samples), samples)
            for _ in range(_NUM_CONFIRMATIONS if size > 2 else 0):
                peak = self._peak(probe, size)
                fits = min(size - 1, samples_that_fit(((1, peak_of_one), (size, peak)), limit, samples))
                agreed = self._agree(size if peak <= limit else fits, samples)
                if agreed == size or agreed <= 2:
                    return agreed
                size = agreed
        return size

    def _agree(self, size: int, samples: int) -> int:
        return even_share(int(min(self._sync.gather(size))), samples)

    def _peak(self, probe: MemoryProbe, size: int) -> int:
        """Return the peak bytes of a size; in one process, twice the limit if memory runs out."""
        try:
            return probe.peak_bytes(size)
        except torch.OutOfMemoryError as error:
            if size == 1 or self._sync.num_ranks > 1:
                self._context.state.device_train_microbatch_size = size
                self._end(error)
                raise
        assert self._meter is not None
        return 2 * self._meter.limit_bytes()

    def _compute_alone(self, batch: Any) -> torch.Tensor:
        """Compute the gradients, and retry with half the size whenever memory runs out."""
        while True:
            before = _Before(self._context)
            try:
                return self.inner.compute_gradients(batch)
            except torch.OutOfMemoryError as error:
                if self._halved() is None:
                    self._end(error)
            # After the handler, since the error references the frames of the failed pass, and so its memory.
            before.restore()
            half = self._halved()
            assert half is not None
            _log.warning(
                "batch %d: out of memory; its step is repeated with `device_train_microbatch_size` %d",
                self._context.state.timestamp.counts.batch + 1,
                half,
            )
            self._set(half)

    def _halved(self) -> int | None:
        """Return half the size in use; None if that size is one sample."""
        size = self._context.state.device_train_microbatch_size or 1
        if self._context.step is not None:
            size = min(size, self._context.step.most_samples)
        return None if size <= 1 else size // 2

    def _end(self, error: torch.OutOfMemoryError) -> None:
        """Write a smaller size for the next attempt, and add a note on it to the error, which ends this rank.

        Raises:
            MemoryExhaustedError: If there is no smaller size.
        """
        half = self._halved()
        if half is None:
            # Imported here, since only a run that is out of memory needs the report.
            from hocket.trainer.step.memory_report import memory_report

            raise MemoryExhaustedError(
                "out of memory with one sample at a time, so no microbatch size fits\n"
                + memory_report(self._context.state)
            ) from error
        size = self._context.state.device_train_microbatch_size
        if write_note(half):
            error.add_note(
                f"the next attempt of this job starts with `device_train_microbatch_size` {half} (it was "
                f"{size}); `autoresume=True` continues from the newest checkpoint"
            )
        else:
            error.add_note(
                f"set `device_train_microbatch_size={half}` (it was {size}), or start the job with "
                "`hocket-launch --max-restarts 3`, which restarts it with half the size"
            )


class _Before:
    """The state of a run in one process that a failed pass may change, captured before the pass."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        state = context.state
        self._rng = capture_rng(state.device)
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in state.model.buffers()]
        self._metrics = metric_states(state.train_metrics) if state.train_metrics else None

    def restore(self) -> None:
        """Restore the captured state, and release the memory of the failed pass."""
        context, state = self._context, self._context.state
        state.outputs = state.loss = context.mean = None
        if context.standard is not None:
            context.standard.clear_gradients()
        for parameter in state.model.parameters():
            parameter.grad = None
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        if self._metrics is not None:
            load_metric_states(state.train_metrics, self._metrics)
        restore_rng(self._rng, state.device)
        if state.device.type == "cuda":
            torch.cuda.empty_cache()
