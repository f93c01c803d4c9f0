"""`Trainer`: the parts of a run, made from arguments, and the methods that run them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TextIO

from torch import nn

from hocket.trainer.engine.engine import Engine
from hocket.trainer.engine.trace import Trace
from hocket.trainer.errors import TrainerClosedError
from hocket.trainer.evaluation.prediction import predict
from hocket.trainer.log.logger import Logger
from hocket.trainer.models.export import export_for_inference
from hocket.trainer.setup.assembly import PartClasses, assemble
from hocket.trainer.setup.checkpoint_setup import save_once, save_soon
from hocket.trainer.setup.config import TrainerConfig
from hocket.trainer.setup.fields import takes_fields, with_arguments
from hocket.trainer.setup.fit_setup import FitSettings, prepare_fit, train_run
from hocket.trainer.setup.fit_targets import FitTargets
from hocket.trainer.setup.settings import TrainerSettings
from hocket.trainer.state import State


class Trainer:
    """The training of a model for a duration, with evaluation, and with checkpoints to continue from.

    In a job of several ranks, every rank makes the same trainer and calls the same methods. An error on one
    rank is raised in its process; the launcher or `dist_timeout` ends the other ranks.

    Raises:
        TrainerConfigError: If arguments do not fit together.
        MissingProviderError: If an argument needs a package that is not installed.
        DataError: If the data loader serves other ranks than those that train.
        ResumeError: If the run cannot continue from the checkpoint.

    Example:
        >>> with Trainer(model=model, train_dataloader=loader, max_duration="2ep") as trainer:
        ...     trainer.fit()
    """

    part_classes: ClassVar[PartClasses] = PartClasses()
    """The classes of the state, the engine and the logger; a subclass may extend them."""

    @takes_fields(TrainerSettings)
    def __init__(self, settings: TrainerSettings) -> None:
        self._is_closed = False
        self._targets = FitTargets()
        # All parts that are made here are closed in reverse order, by `close` or if the setup fails.
        with ExitStack() as self._made:
            self._config = TrainerConfig.of(settings)
            self._run = assemble(self._config, self._made, self._targets.register, self.part_classes)
            self._made = self._made.pop_all()

    @property
    def state(self) -> State:
        """The state of the run."""
        return self._run.state

    @property
    def logger(self) -> Logger:
        """The logger of the run."""
        return self._run.logger

    @property
    def engine(self) -> Engine:
        """The engine of the run, which fires events."""
        return self._run.engine

    def __repr__(self) -> str:
        if not hasattr(self, "_run"):
            return "<Trainer: its setup has failed or has not ended>"
        state = self.state
        end = "" if state.max_duration is None else f" of {state.max_duration}"
        closed = ", closed" if self._is_closed else ""
        return f"<Trainer of {type(state.model).__name__}: at {state.timestamp.batch}{end}{closed}>"

    @takes_fields(FitSettings)
    def fit(self, settings: FitSettings) -> None:
        """Train until `max_duration`, or for `duration` from here.

        Under `autoresume`, each call continues the same call of the run that is resumed, the first call its
        first call, and so on. The duration counts from the beginning of the call that is continued, and a
        call that had finished returns at once.

        SIGTERM, SIGUSR1 or SIGHUP on any rank ends the training on all ranks at the next step boundary: the
        trainer saves if there is a `save_folder`, and `fit` raises `SystemExit` with 128 + the signal. So
        does the first Ctrl-C in a script, and that exception is a `KeyboardInterrupt`, too; the second ends
        the script at once.

        Raises:
            TrainerConfigError: If there is no data or no duration.
            TrainerClosedError: If the trainer is closed.
            DurationReachedError: If the training has already reached its duration, without `autoresume`.
        """
        self._check_open()
        self._config = settings.change(self._config)
        loader = prepare_fit(self._run, self._config, settings, self._targets, self._made)
        if loader is None:
            return
        try:
            train_run(self._run, self._config, loader)
        except BaseException as error:
            self._close_after(error)
            raise

    def trace(self, *, live: bool | TextIO = False) -> Trace:
        """Record the calls at each event from here on, with their changes and durations.

        Args:
            live: Whether to print a line for each change as it happens, on the standard error stream or to
                an open text file.

        Returns:
            The record, whose text is a table; `stop()` ends it.
        """
        stream = None if live is False else sys.stderr if live is True else live
        return Trace(self.engine, self.state, live=stream)

    def eval(self, eval_dataloader: Any = None, subset_num_batches: int = -1) -> None:
        """Evaluate the model as it is; the results are in `state.eval_metrics` and in the log.

        Collective with several ranks. An evaluation does not affect the training that follows.

        Args:
            eval_dataloader: As for the trainer; None for the trainer's evaluators.
            subset_num_batches: Number of batches of each rank; -1 for all, or as each evaluator states.

        Raises:
            TrainerConfigError: If there is nothing to evaluate on.
            TrainerClosedError: If the trainer is closed.
            DataError: If a loader yields nothing.
        """
        self._check_open()
        self._run.evaluation.run_standalone(eval_dataloader, subset_num_batches)
        self.logger.flush()

    def predict(
        self, dataloader: Any, subset_num_batches: int = -1, *, return_outputs: bool = True
    ) -> list[Any]:
        """Return the model's outputs over a loader, on the CPU, one item for each batch of this rank.

        Collective with several ranks. See `hocket.trainer.evaluation.prediction.predict`.

        Args:
            dataloader: A loader of this rank's batches, as `model.forward` takes them; or a `DataSpec`.
            subset_num_batches: Number of batches; -1 for all.
            return_outputs: Whether to return the outputs; if False, the list is empty, and callbacks can read
                `state.outputs` at `PREDICT_BATCH_END`.

        Raises:
            TrainerClosedError: If the trainer is closed.
            DataError: If the loader yields nothing.
        """
        self._check_open()
        return predict(
            self.state,
            self.engine,
            self._run.precision,
            dataloader,
            subset_num_batches=subset_num_batches,
            return_outputs=return_outputs,
            auto_shard=self._config.loop.auto_shard,
        )

    def save_checkpoint(
        self, name: str | os.PathLike[str] = "ep{epoch}-ba{batch}", *, weights_only: bool = False
    ) -> None:
        """Save a checkpoint, and wait until it is committed. Collective.

        Args:
            name: The checkpoint's path or URI, or its name in `save_folder`, with fields as in
                `save_filename`.
            weights_only: Whether to save the model and the time alone.

        Raises:
            TrainerConfigError: If a batch was fetched ahead, as in a callback during `fit`;
                `save_checkpoint_to_save_folder` then saves at the next boundary.
            TrainerClosedError: If the trainer is closed.
        """
        self._check_open()
        save_once(self._run, self._config, name, weights_only=weights_only)

    def save_checkpoint_to_save_folder(self) -> None:
        """Save a checkpoint in `save_folder`, now or, during `fit`, at the next boundary. Collective.

        Raises:
            TrainerConfigError: If there is no `save_folder`.
            TrainerClosedError: If the trainer is closed.
        """
        self._check_open()
        save_soon(self._run, self._config)

    def export_for_inference(
        self,
        save_path: str | os.PathLike[str],
        *,
        save_format: str = "torch_export",
        sample_input: Any = None,
        transforms: Callable[[nn.Module], nn.Module] | None = None,
        dynamic_batch: bool = True,
    ) -> Path:
        """Write the model as a program that runs without its source; see `hocket.trainer.models.export`.

        Args:
            save_path: The file, such as `"model.pt2"` or `"model.onnx"`.
            save_format: `"torch_export"` or `"onnx"`.
            sample_input: A batch as `forward` takes it; the last batch of training by default.
            transforms: A function that changes a copy of the model before it is exported.
            dynamic_batch: Whether the first dim of every tensor in the batch may vary.

        Returns:
            The path of the file.

        Raises:
            TrainerConfigError: If the format is unknown, there is no batch, or the model is sharded.
        """
        return export_for_inference(
            self.state.model,
            save_path,
            sample_input=self.state.batch if sample_input is None else sample_input,
            save_format=save_format,
            transforms=transforms,
            dynamic_batch=dynamic_batch,
        )

    @property
    def saved_checkpoints(self) -> list[str]:
        """The names of the committed checkpoints in `save_folder`, the newest last."""
        checkpointer = self._run.checkpointer
        entries = () if checkpointer is None else checkpointer.store.list()
        return [entry.name for entry in entries if entry.status == "committed"]

    def close(self) -> None:
        """Close callbacks and loggers, wait for a save in progress, and release all parts of the run.

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

    def _check_open(self) -> None:
        if self._is_closed:
            raise TrainerClosedError("this trainer is closed; make a new one, with `load_path` to go on")

    def _close_after(self, error: BaseException) -> None:
        """Close while `error` propagates; a second error is added to it as a note and does not hide it."""
        try:
            self.close()
        except Exception as second:  # noqa: BLE001 - it is reported with the first
            error.add_note(f"and while closing: {type(second).__name__}: {second}")


Trainer.__doc__ = with_arguments(Trainer.__doc__, TrainerSettings)
Trainer.fit.__doc__ = with_arguments(Trainer.fit.__doc__, FitSettings)
