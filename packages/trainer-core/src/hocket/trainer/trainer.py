"""`Trainer`: turns arguments into the parts of a run, and runs them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from hocket.trainer.agreement import Agreement
from hocket.trainer.announce import announce
from hocket.trainer.arguments import (
    as_duration,
    as_list,
    be_deterministic,
    check_microbatch_size,
    check_model,
    keep_initial_rates,
    made_up_name,
    number_to_keep,
    one_config,
)
from hocket.trainer.checkpointing import CheckpointSaver, find_source, load
from hocket.trainer.data_spec import as_data_spec
from hocket.trainer.devices import choose_device, world_size
from hocket.trainer.engine import Engine
from hocket.trainer.errors import DurationReachedError, TrainerConfigError
from hocket.trainer.event import Event
from hocket.trainer.feeding import Feed
from hocket.trainer.generators import capture_generators, seed_generators
from hocket.trainer.interval import IsTime
from hocket.trainer.loader_checks import check_loader
from hocket.trainer.logger import Logger, LoggerDestination
from hocket.trainer.loggers.progress_bar import ProgressBarLogger
from hocket.trainer.loop import Run, train
from hocket.trainer.optim import Scheduler
from hocket.trainer.parallelism import SingleProcess
from hocket.trainer.precision import Precision, default_precision
from hocket.trainer.protocols import CheckpointStore, Parallelism
from hocket.trainer.providers import find_provider
from hocket.trainer.run_state import RunState
from hocket.trainer.state import State
from hocket.trainer.time import TimeInput
from hocket.trainer.timestamp import Timestamp


class Trainer:
    """Trains a model: over the data, for a duration, saving and going on from checkpoints.

    In a job of several ranks every rank makes the same trainer, and calls the same methods. What a rank
    raises leaves its process; the others are ended by the launcher, or by `dist_timeout`.

    Args:
        model: A module with `forward(batch)` and `loss(outputs, batch)`, as `ComposerModel` states them.
        train_dataloader: Yields this rank's batches; or a `DataSpec`, or a dict of its arguments.
        max_duration: When training ends: `"2ep"`, `"100ba"`, `"1e9tok"`; a bare number counts epochs.
        optimizers: One or several, which all step each batch; `AdamW` with a learning rate of 0.001 if None.
        schedulers: Callables `(state, ssr) -> multiplier` of the learning rates, such as those of
            `hocket.trainer.optim`.
        algorithms: Training methods.
        callbacks: Called at events.
        loggers: Where numbers go.
        run_name: Made up from the time if None.
        progress_bar: Whether to show one.
        device: `"cpu"`, `"gpu"` or a torch device; a GPU if there is one.
        precision: `"fp32"`, `"amp_bf16"` or `"amp_fp16"`; bf16 on a GPU that has it, else fp32.
        device_train_microbatch_size: Samples that go through the model at once; None for a rank's whole
            batch. The update does not depend on it.
        seed: Rank r's random generators start from `seed + r`; drawn from torch's generator if None.
        deterministic_mode: Have torch use deterministic kernels only.
        save_folder: Where checkpoints go: a path or URI, in which `{run_name}` is filled in.
        save_filename: A checkpoint's name in it, with fields such as `{epoch}` and `{batch}`.
        save_interval: How often; also at the end of training.
        save_async: Whether training goes on while a checkpoint is written.
        save_num_checkpoints_to_keep: How many of the newest checkpoints in `save_folder` stay; older ones go
            once a new one is committed. -1 keeps all.
        load_path: A checkpoint to start from.
        autoresume: Start from the newest committed checkpoint in `save_folder`, where there is one.
        fsdp_config: How to shard, for `hocket-dist`; a dict or its `FSDPConfig`.
        parallelism_config: The same as `{"fsdp": fsdp_config}`.
        parallelism: An object that spreads the model, instead of the installed package's.
        checkpoint_store: An object that keeps checkpoints, instead of the installed package's.
        dist_timeout: Seconds to wait for another rank before it counts as lost, in saves and loads too.

    Raises:
        TrainerConfigError: If arguments do not fit together.
        MissingProviderError: If an argument asks for a package that is not installed.
        DataError: If the data loader serves other ranks than those that train.
        ResumeError: If the run cannot go on from the checkpoint.

    Example:
        >>> with Trainer(model=model, train_dataloader=loader, max_duration="2ep") as trainer:
        ...     trainer.fit()
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        train_dataloader: Any = None,
        max_duration: TimeInput | None = None,
        optimizers: Optimizer | Sequence[Optimizer] | None = None,
        schedulers: Scheduler | Sequence[Scheduler] | None = None,
        algorithms: Any = None,
        callbacks: Any = None,
        loggers: Any = None,
        run_name: str | None = None,
        progress_bar: bool = True,
        device: str | torch.device | None = None,
        precision: str | None = None,
        device_train_microbatch_size: int | None = None,
        seed: int | None = None,
        deterministic_mode: bool = False,
        save_folder: str | os.PathLike[str] | None = None,
        save_filename: str = "ep{epoch}-ba{batch}",
        save_interval: TimeInput | IsTime = "1ep",
        save_async: bool = False,
        save_num_checkpoints_to_keep: int = -1,
        load_path: str | os.PathLike[str] | None = None,
        autoresume: bool = False,
        fsdp_config: Any = None,
        parallelism_config: Mapping[str, Any] | None = None,
        parallelism: Parallelism | None = None,
        checkpoint_store: CheckpointStore | None = None,
        dist_timeout: float = 300.0,
    ) -> None:
        check_model(model)
        check_microbatch_size(device_train_microbatch_size)
        if autoresume and save_folder is None and checkpoint_store is None:
            raise TrainerConfigError("`autoresume` looks in `save_folder`, which is not set; set it")
        self._is_closed = False
        # What is made here is closed here, the last first: by `close`, and when the rest cannot be set up.
        with ExitStack() as self._made:
            chosen = choose_device(getattr(parallelism, "device", None) if device is None else device)
            if deterministic_mode:
                be_deterministic(chosen)
            if parallelism is None:
                parallelism = self._find_parallelism(
                    one_config(fsdp_config, parallelism_config), chosen, dist_timeout
                )
            self._agreement = Agreement(parallelism)
            drawn = int(torch.randint(2**31, ())) if seed is None else seed
            agreed_seed, made_at = self._agreement.from_rank_0(drawn, int(time.time()))
            seed_generators(agreed_seed + parallelism.data_parallel[0])

            self.state = State(
                model=model,
                optimizers=as_list(optimizers) or [AdamW(model.parameters(), lr=1e-3)],
                schedulers=as_list(schedulers),
                callbacks=[one for one in as_list(callbacks) if not isinstance(one, LoggerDestination)],
                algorithms=as_list(algorithms),
                parallelism=parallelism,
                device=chosen,
                precision=precision or default_precision(chosen),
                device_train_microbatch_size=device_train_microbatch_size,
                max_duration=None if max_duration is None else as_duration(max_duration),
                run_name=run_name or made_up_name(made_at),
                seed=agreed_seed,
            )
            self.logger = Logger(self.state, _destinations(loggers, callbacks, progress_bar=progress_bar))
            self._precision = Precision(self.state.precision, chosen)
            self._run_state = RunState(self.state, self._precision)
            self._notices: list[str] = []
            keep_last = number_to_keep(save_num_checkpoints_to_keep)
            store = self._find_store(
                checkpoint_store, save_folder, load_path, timeout_s=dist_timeout, keep_last=keep_last
            )
            self._saver: CheckpointSaver | None = None
            if store is not None and (save_folder is not None or checkpoint_store is not None):
                self._saver = CheckpointSaver(
                    store,
                    self._run_state,
                    save_interval=save_interval,
                    save_filename=save_filename,
                    mode="async" if save_async else "sync",
                )
                self._notices += self._saver.notices
                self.state.callbacks.append(self._saver)
            self.engine = Engine(self.state, self.logger)
            self._made.callback(self.engine.close)
            self.engine.fire(Event.INIT)

            keep_initial_rates(self.state)
            self.state.module = parallelism.lay_out(model, self.state.optimizers)
            self._feed, self._data_source = self._make_feed(train_dataloader)
            self._load(
                store, autoresume=autoresume, load_path=None if load_path is None else os.fspath(load_path)
            )
            self._made = self._made.pop_all()

    def fit(self, duration: TimeInput | None = None) -> None:
        """Train until `max_duration`, or for `duration` from here.

        Args:
            duration: How much more; a bare number counts epochs. Sets `state.max_duration`.

        Raises:
            TrainerConfigError: If there is no data or no duration, or the trainer is closed.
            DurationReachedError: If the training is as long as that already.
        """
        state = self.state
        if self._is_closed:
            raise TrainerConfigError("this trainer is closed; make a new one, with `load_path` to go on")
        if self._feed is None:
            raise TrainerConfigError("there is nothing to train on; pass `train_dataloader`")
        if duration is not None:
            length = as_duration(duration)
            state.max_duration = state.timestamp.get(length.unit) + length
        if state.max_duration is None:
            raise TrainerConfigError(
                "it is not said how long to train; pass `max_duration`, or `fit(duration=…)`"
            )
        state.is_stopped = False
        if state.is_over():
            done = state.timestamp.get(state.max_duration.unit)
            raise DurationReachedError(
                f"the run has trained for `{done}`, and `max_duration` is `{state.max_duration}`; pass a "
                "longer one, or `fit(duration=…)` for how much more"
            )
        run = self._make_run(self._feed)
        announce(state, data_source=self._data_source, notices=self._notices)
        self._notices = []
        state.model.train()
        try:
            train(run)
            self.logger.flush()
        except BaseException as error:
            if not any(note.startswith("raised by `") for note in getattr(error, "__notes__", ())):
                error.add_note(f"raised while training, at {state.timestamp}")
            self._close_after(error)
            raise

    def close(self) -> None:
        """Close callbacks and loggers, wait for a save on its way, and let go of what was made here.

        A second call does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._close_after(error)

    def _close_after(self, error: BaseException) -> None:
        """Close, with `error` on its way out: what goes wrong here must not hide it."""
        try:
            self.close()
        except Exception as second:  # noqa: BLE001 - it is told with the first
            error.add_note(f"and while closing: {type(second).__name__}: {second}")

    def _find_parallelism(self, config: Any, device: torch.device, timeout_s: float) -> Parallelism:
        num_ranks = world_size()
        if config is None and num_ranks == 1:
            return SingleProcess(device)
        asked_by = "`fsdp_config`" if config is not None else f"a job of {num_ranks} ranks"
        provide = find_provider("parallelism", asked_by=asked_by)
        found: Parallelism = provide(config, device=device, timeout_s=timeout_s)
        self._own(found)
        return found

    def _find_store(
        self,
        given: CheckpointStore | None,
        save_folder: str | os.PathLike[str] | None,
        load_path: str | os.PathLike[str] | None,
        **options: Any,
    ) -> CheckpointStore | None:
        if given is not None:
            return given
        if save_folder is not None:
            folder, asked_by = (
                os.fspath(save_folder).replace("{run_name}", self.state.run_name),
                "`save_folder`",
            )
        elif load_path is not None:
            # The folder that the checkpoint is in.
            folder, asked_by = os.fspath(load_path).rstrip("/").rpartition("/")[0] or ".", "`load_path`"
        else:
            return None
        store: CheckpointStore = find_provider("checkpoints", asked_by=asked_by)(folder, **options)
        self._own(store)
        if save_folder is not None:
            # A folder that cannot be reached is told now, not when the first checkpoint is due.
            store.list()
        return store

    def _own(self, part: Any) -> None:
        if hasattr(part, "close"):
            self._made.callback(part.close)

    def _make_feed(self, train_dataloader: Any) -> tuple[Feed | None, str]:
        if train_dataloader is None:
            return None, ""
        state, spec = self.state, as_data_spec(train_dataloader)
        loader: Any = spec.dataloader
        source = check_loader(loader, state.parallelism.data_parallel)
        state.dataloader = loader
        length = len(loader) if hasattr(loader, "__len__") else 0
        # The shortest of all ranks ends an epoch.
        state.dataloader_len = int(min(self._agreement.gather(length))) or None

        def capture() -> dict[str, Any]:
            return capture_generators(state.device)

        feed = Feed(
            spec,
            device=state.device,
            agreement=self._agreement,
            wants_stop=lambda: state.is_stop_requested,
            counts=lambda: state.timestamp.counts,
            capture_generators=None if self._saver is None else capture,
        )
        self._run_state.feed = feed
        self._made.callback(feed.close)
        return feed, source

    def _load(self, store: CheckpointStore | None, *, autoresume: bool, load_path: str | None) -> None:
        source = find_source(store, autoresume=autoresume, load_path=load_path, agreement=self._agreement)
        self.engine.fire(Event.BEFORE_LOAD)
        if source is not None and store is not None:
            self._notices += load(store, source, self._run_state, self.state, self._agreement)
            self._notices += self._run_state.resume_feed()
            if self._saver is not None:
                self._saver.loaded_at(self.state.timestamp.counts.batch)
        self.engine.fire(Event.AFTER_LOAD)

    def _make_run(self, feed: Feed) -> Run:
        is_first = self.state.parallelism.data_parallel[0] == 0
        (clock_s, num_destinations) = self._agreement.sum_of(
            time.perf_counter() if is_first else 0.0, len(self.logger.destinations)
        )
        return Run(
            state=self.state,
            engine=self.engine,
            logger=self.logger,
            feed=feed,
            precision=self._precision,
            must_not_fetch_ahead=_never if self._saver is None else self._saver.must_data_stand_still,
            is_loss_logged=num_destinations > 0,
            clock_s=clock_s,
        )


def _destinations(loggers: Any, callbacks: Any, *, progress_bar: bool) -> list[LoggerDestination]:
    """Where numbers go: what was given, under either name, and a progress bar where one is wanted."""
    given = [*as_list(loggers), *(one for one in as_list(callbacks) if isinstance(one, LoggerDestination))]
    if progress_bar and not any(isinstance(one, ProgressBarLogger) for one in given):
        given.append(ProgressBarLogger())
    return given


def _never(state: State, after: Timestamp) -> bool:  # noqa: ARG001 - nothing is ever due
    return False
