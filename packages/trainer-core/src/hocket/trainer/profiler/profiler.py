"""`Profiler`, a callback that records chosen batches of a training."""

from __future__ import annotations

import logging
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hocket.trainer.callback import Callback
from hocket.trainer.checks import check_number
from hocket.trainer.event import Event
from hocket.trainer.log.logger import Logger
from hocket.trainer.process.world import find_place, global_rank, num_ranks
from hocket.trainer.profiler.figures import compute_figures
from hocket.trainer.profiler.json_trace import Trace, TraceHandler, read_json
from hocket.trainer.profiler.memory import write_memory_timeline
from hocket.trainer.profiler.recorder import RECORDED, Marker, Recorder
from hocket.trainer.profiler.report import ProfileReport, read_profile
from hocket.trainer.profiler.schedule import ProfilerAction, as_schedule, cyclic_schedule
from hocket.trainer.profiler.system import SystemSampler, has_psutil
from hocket.trainer.profiler.torch_profiler import TorchProfiler, TorchProfilerConfig, check_torch_handler
from hocket.trainer.ranks.rank_gather import gather_objects

if TYPE_CHECKING:
    from hocket.trainer.engine.engine import Engine, Listener
    from hocket.trainer.state import State

T = TypeVar("T")
_CLOCK_SAMPLES = 5

log = logging.getLogger(__name__)

# Shorter calls of listeners would only fill the trace.
_SHORTEST_CALL_NS = 5_000


class Profiler(Callback):
    """Records the batches that a schedule chooses, writes traces, and reports on them in words.

    A profile has the parts of each step, waits for data, every algorithm, callback and logger, markers of the
    user's code, counters of the host, and the records of torch's profiler. Pass the profiler as
    `Trainer(profiler=…)`. Batches that are skipped cost a few comparisons; without a profiler there is no
    cost.

    Args:
        schedule: The choice of batches: `cyclic_schedule(…)`, a function of the state that returns a
            `ProfilerAction`, or `torch.profiler.schedule(…)`. By default batches 2 to 5.
        trace_handlers: Writers of traces: `JSONTraceHandler(…)`, or functions of torch's profiler such as
            `torch.profiler.tensorboard_trace_handler(…)`.
        sys_prof_cpu: Sample the use of processors; if None, only when psutil is installed.
        sys_prof_memory: Sample the host's memory.
        sys_prof_disk: Sample disks.
        sys_prof_net: Sample the network.
        sys_prof_stats_thread_interval_seconds: Seconds between two samples.
        torch_prof: Settings of torch's profiler, each as `torch_prof_<setting>=`; see `TorchProfilerConfig`.
            torch's profiler runs unless `record_shapes`, `profile_memory`, `with_stack` and `with_flops` are
            all off.

    Raises:
        TrainerConfigError: If an argument cannot be used.
        MissingExtraError: If counters of the host are requested and psutil is not installed.

    Example:
        >>> profiler = Profiler(cyclic_schedule(wait=5, active=3), [JSONTraceHandler()])
        >>> trainer = Trainer(model=model, train_dataloader=loader, max_duration="20ba", profiler=profiler)
        >>> trainer.fit()
        >>> print(profiler.report())
    """

    reads_outputs = False

    def __init__(
        self,
        schedule: Any = None,
        trace_handlers: Any = (),
        *,
        sys_prof_cpu: bool | None = None,
        sys_prof_memory: bool = False,
        sys_prof_disk: bool = False,
        sys_prof_net: bool = False,
        sys_prof_stats_thread_interval_seconds: float = 0.5,
        **torch_prof: Any,
    ) -> None:
        self.schedule = as_schedule(cyclic_schedule() if schedule is None else schedule)
        handlers = list(trace_handlers) if isinstance(trace_handlers, Sequence) else [trace_handlers]
        self._handlers = [handler for handler in handlers if isinstance(handler, TraceHandler)]
        self._torch_handlers: list[Callable[[Any], object]] = []
        for handler in handlers:
            if not isinstance(handler, TraceHandler):
                self._torch_handlers.append(check_torch_handler(handler))
        self.torch_config, turned_on = TorchProfilerConfig.from_arguments(torch_prof).with_memory_needs()
        """Settings of torch's profiler, read when training starts."""
        if turned_on:
            log.info("the memory timeline needs %s, which are on now", ", ".join(turned_on))
        self.recorder = Recorder()
        self.first_batch = 0
        """The batch count at which this process started to train; schedules count from it."""
        self.reports: list[ProfileReport] = []
        """The report of each window, the latest last."""
        check_number(
            "sys_prof_stats_thread_interval_seconds", sys_prof_stats_thread_interval_seconds, least=0.001
        )
        self._starts: dict[str, int] = {}
        self._step_start: int | None = None
        self._torch: TorchProfiler | None = None
        self._sampler = self._make_sampler(
            sys_prof_cpu, sys_prof_memory, sys_prof_disk, sys_prof_net, sys_prof_stats_thread_interval_seconds
        )
        self._clock_offset_ns = 0
        self._is_running = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings and the reports: torch's profiler and a thread cannot go into another process.

        Raises:
            TypeError: A trainer has the profiler in use.
        """
        if self._is_running:
            raise TypeError(
                "`Profiler` has profiled a training and cannot be copied or pickled; copy or pickle it before"
            )
        return vars(self)

    def marker(
        self,
        name: str,
        actions: Sequence[ProfilerAction] = RECORDED,
        *,
        record_instant_on_start: bool = False,
        record_instant_on_finish: bool = False,
        categories: Sequence[str] = (),
    ) -> Marker:
        """Return a marker for a piece of the user's own code: `with profiler.marker("augment"): …`."""
        return Marker(
            self.recorder,
            name,
            actions=actions,
            categories=categories,
            record_instant_on_start=record_instant_on_start,
            record_instant_on_finish=record_instant_on_finish,
        )

    def report(self) -> ProfileReport:
        """Return the report of the latest window; `print` shows its text."""
        return self.reports[-1] if self.reports else read_profile(())

    def attach(self, state: State, engine: Engine) -> None:
        """Time the engine's listeners, and set this profiler in the state. The trainer calls this method."""
        state.profiler = self
        engine.instrument = self.time_listener
        engine.prepare()

    def time_next(self, iterator: Iterator[Any], default: Any) -> Any:
        """Return the next batch; record how long training waited for it."""
        if not self.recorder.is_active:
            return next(iterator, default)
        start = self.recorder.now_ns()
        batch = next(iterator, default)
        self.recorder.span("wait for the data loader", "data", start)
        return batch

    def time_listener(self, event: Event, kind: str, listener: Listener) -> Listener:
        """Return a listener that records the duration of its calls."""
        if getattr(listener.call, "__self__", None) is self:
            return listener
        name = f"{listener.name}.{event.value}"

        def call(state: State, logger: Logger) -> object:
            recorder = self.recorder
            if not recorder.is_active:
                return listener.call(state, logger)
            start = recorder.now_ns()
            result = listener.call(state, logger)
            if recorder.now_ns() - start >= _SHORTEST_CALL_NS:
                recorder.span(name, kind, start)
            return result

        return listener._replace(call=call)

    # Events that may change the batch (`AFTER_DATALOADER` to `BEFORE_TRAIN_BATCH`) have no methods here: with
    # a listener at one of them, the training loop would count each batch again.

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start with the schedule's action for the first batch."""
        self._start(state)

    def before_forward(self, state: State, logger: Logger) -> None:
        """Start the forward pass."""
        self._start_phase("forward")

    def after_forward(self, state: State, logger: Logger) -> None:
        """End the forward pass."""
        self._end_phase("forward")

    def before_loss(self, state: State, logger: Logger) -> None:
        """Start the loss."""
        self._start_phase("loss")

    def after_loss(self, state: State, logger: Logger) -> None:
        """End the loss."""
        self._end_phase("loss")

    def before_backward(self, state: State, logger: Logger) -> None:
        """Start the backward pass."""
        self._start_phase("backward")

    def after_backward(self, state: State, logger: Logger) -> None:
        """End the backward pass."""
        self._end_phase("backward")

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Start the optimizer's step."""
        self._start_phase("optimizer")

    def batch_end(self, state: State, logger: Logger) -> None:
        """End the optimizer's step and the batch, and follow the schedule."""
        self._end_phase("optimizer")
        self._end_step(state)

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Start the evaluation."""
        self._start_phase("evaluation")

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """End the evaluation."""
        self._end_phase("evaluation")

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write a window that the end of training cut short."""
        self._stop(state, is_collective=True)

    def close(self, state: State, logger: Logger) -> None:
        """Write the remaining records of this rank, and stop the threads."""
        self._stop(state, is_collective=False)
        if self._sampler is not None:
            self._sampler.close()

    def _start(self, state: State) -> None:
        self.first_batch = state.timestamp.counts.batch
        self._clock_offset_ns = clock_offset_ns()
        self.recorder.action = self.schedule(state)
        if self.torch_config.is_on:
            self._torch = TorchProfiler(
                self.torch_config,
                action=lambda: self.recorder.action,
                names=lambda: self._names(state),
                handlers=self._torch_handlers,
            )
            self._torch.start()
        if self._sampler is not None and not self._is_running:
            self._sampler.start()
        self._is_running = True
        self._step_start = self.recorder.now_ns()

    def _start_phase(self, name: str) -> None:
        if self.recorder.is_active:
            self._starts[name] = self.recorder.now_ns()

    def _end_phase(self, name: str) -> None:
        if (start := self._starts.pop(name, None)) is not None:
            self.recorder.span(name, "phase", start)

    def _end_step(self, state: State) -> None:
        recorder = self.recorder
        previous_action = recorder.action
        if recorder.is_active and self._step_start is not None:
            recorder.span("step", "step", self._step_start, batch=state.timestamp.counts.batch - 1)
        recorder.action = self.schedule(state)
        if self._torch is not None:
            self._torch.step()
        if previous_action is ProfilerAction.ACTIVE_AND_SAVE:
            self._save(state, is_collective=True)
        self._step_start = recorder.now_ns()

    def _stop(self, state: State, *, is_collective: bool) -> None:
        is_active, self.recorder.action = self.recorder.is_active, ProfilerAction.SKIP
        torch_profiler, self._torch = self._torch, None
        if torch_profiler is not None:
            torch_profiler.stop()
        if is_active and self.recorder.events:
            self._torch = torch_profiler
            self._save(state, is_collective=is_collective)
            self._torch = None

    def _save(self, state: State, *, is_collective: bool) -> None:
        """Write the traces of this window, and add its report."""
        events, names = self.recorder.take(), self._names(state)
        torch_trace = None if self._torch is None else self._torch.take()
        content = None if torch_trace is None else read_json(torch_trace)
        figures = compute_figures(events, content, rank=names["rank"])
        trace = Trace(
            events, names["rank"], names["local_rank"], self._clock_offset_ns, names, torch_trace=torch_trace
        )
        paths = [handler.save(trace) for handler in self._handlers]
        if self._torch is not None and content is not None:
            if (memory := self._torch.memory_path()) is not None:
                title = f"{names['run_name']}, rank {names['rank']}, batch {names['batch']}: memory"
                write_memory_timeline(memory, figures.memory, title)
            self._torch.forget_old()
        # A timeline is large, and each rank reads its own alone.
        own_entry = (replace(figures, memory=()), paths)
        ranks = gather(own_entry) if is_collective else [own_entry]
        if names["rank"] == 0 or not is_collective:
            for index, handler in enumerate(self._handlers):
                of_ranks = [of_rank[index] for _, of_rank in ranks]
                handler.merge([path for path in of_ranks if path is not None and path.exists()], names)
        others = [one for one, _ in ranks if one.rank != figures.rank]
        self.reports.append(read_profile([figures, *others]))
        if names["rank"] == 0:
            log.info("profile of the steps up to batch %d:\n%s", names["batch"], self.reports[-1])

    def _names(self, state: State) -> dict[str, Any]:
        counts, place = state.timestamp.counts, find_place()
        return {
            "run_name": state.run_name,
            "rank": global_rank(),
            "local_rank": (place.local_rank if place else None) or 0,
            "world_size": num_ranks(),
            "epoch": counts.epoch,
            "batch": counts.batch,
            "batch_in_epoch": counts.batch_in_epoch,
        }

    def _make_sampler(
        self, cpu: bool | None, memory: bool, disk: bool, net: bool, interval_s: float
    ) -> SystemSampler | None:
        if cpu is None:
            cpu = has_psutil()
        if not (cpu or memory or disk or net):
            return None
        return SystemSampler(self.recorder, cpu=cpu, memory=memory, disk=disk, net=net, interval_s=interval_s)


def is_distributed() -> bool:
    """Return whether there are several ranks with a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and num_ranks() > 1


def gather(value: T) -> list[T]:
    """Return the value of each rank, in order. Collective and blocking; without other ranks, `[value]`."""
    return gather_objects(value) if is_distributed() else [value]


def clock_offset_ns() -> int:
    """Return this host's clock minus rank 0's, in nanoseconds. Collective and blocking.

    The offset is 0 on rank 0's own host. On another host it is the median difference of the times at which
    barriers end, exact to the time that a barrier takes.
    """
    if not is_distributed():
        return 0
    samples = []
    for _ in range(_CLOCK_SAMPLES):
        torch.distributed.barrier()
        samples.append(time.time_ns())
    hosts_and_times = gather((socket.gethostname(), samples))
    first_host, first = hosts_and_times[0]
    if socket.gethostname() == first_host:
        return 0
    return int(statistics.median(own - other for own, other in zip(samples, first, strict=True)))
