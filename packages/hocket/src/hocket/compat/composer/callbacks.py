"""Callbacks, as `composer.callbacks`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import hocket.trainer.callbacks as _callbacks
from hocket.compat.composer.absent import absent_from
from hocket.compat.composer.checkpoint_saver import CheckpointSaver
from hocket.compat.composer.ignore_keys import IgnoreKeys, as_lenient
from hocket.compat.composer.load_paths import find_checkpoint
from hocket.compat.composer.utils.inference import ExportFormat, Transform, export_with_logger
from hocket.trainer import Callback, Event, Logger, State, TimeUnit
from hocket.trainer.callbacks import (
    ActivationMonitor,
    EvalOutputLogging,
    FreeOutputs,
    Generate,
    LRMonitor,
    MemoryMonitor,
    MemorySnapshot,
    NaNMonitor,
    OOMObserver,
    OptimizerMonitor,
    RuntimeEstimator,
    SpeedMonitor,
    ThresholdStopper,
)
from hocket.trainer.models.export import check_format
from hocket.trainer.process.extras import import_extra


class EarlyStopper(_callbacks.EarlyStopper):
    """`hocket.trainer.callbacks.EarlyStopper`, which checks a training metric after each batch.

    It does so if `patience` is in batches, as in Composer. Each check reads the metric from the device.
    """

    def batch_end(self, state: State, logger: Logger) -> None:
        """Check a training metric."""
        if self.patience.unit is TimeUnit.BATCH:
            super().epoch_end(state, logger)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Check a training metric that is not checked after each batch."""
        if self.patience.unit is not TimeUnit.BATCH:
            super().epoch_end(state, logger)


class ExportForInferenceCallback(Callback):
    """A callback with Composer's arguments that writes the model as a program on rank 0 when training ends.

    Args:
        save_format: `"onnx"` or `"torch_export"`.
        save_path: A path, a URI, or a name in `save_object_store`; `{run_name}` is replaced.
        save_object_store: The store to write to; None for the path or URI, or the loggers that store files.
        sample_input: A batch as `forward` takes it; the last batch of training by default.
        transforms: Functions that change a copy of the model first.
        input_names: As in `utils.export_for_inference`.
        output_names: As there.

    Raises:
        TrainerConfigError: If the format is unknown, or there are names for another format than ONNX; or at
            the end of training, as by `utils.export_for_inference`.
        MissingExtraError: If the package that writes the format is not installed.
    """

    def __init__(
        self,
        save_format: str | ExportFormat,
        save_path: str,
        save_object_store: Any = None,
        sample_input: Any = None,
        transforms: Transform | Sequence[Transform] | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
    ) -> None:
        check_format(str(getattr(save_format, "value", save_format)), input_names, output_names)
        self.save_format, self.save_path = save_format, save_path
        self.save_object_store = save_object_store
        self.sample_input, self.transforms = sample_input, transforms
        self.input_names, self.output_names = input_names, output_names

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write the file."""
        if state.parallelism.global_rank == 0:
            export_with_logger(
                state.model,
                self.save_format,
                self.save_path.format(run_name=state.run_name),
                logger,
                self.save_object_store,
                state.batch if self.sample_input is None else self.sample_input,
                self.transforms,
                self.input_names,
                self.output_names,
            )


class ImageVisualizer(_callbacks.ImageVisualizer):
    """`hocket.trainer.callbacks.ImageVisualizer`, which logs tables, `Images/Train` and `Images/Eval`."""

    uses_table = True

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        """Log the first batch of an evaluation."""
        if state.eval_timestamp.counts.batch == 0:
            self._log(state, logger, "Images/Eval")


class LoadCheckpoint(_callbacks.LoadCheckpoint):
    """`hocket.trainer.callbacks.LoadCheckpoint` with Composer's arguments and forms of checkpoint paths.

    Args:
        load_path: As `Trainer(load_path=…)`.
        load_weights_only: Load the model alone.
        strict_model_weights: Refuse parameters that only the model or only the checkpoint has.
        ignore_keys: Parts that are not loaded.
        event: The event at which the checkpoint is loaded.
        strict: Another name of `strict_model_weights`.
        checkpoint_store: The store to read from; by default that of the path.
    """

    def __init__(
        self,
        load_path: str | os.PathLike[str],
        load_weights_only: bool = False,
        strict_model_weights: bool = True,
        ignore_keys: IgnoreKeys = None,
        event: Event | str = Event.BEFORE_LOAD,
        *,
        strict: bool = True,
        checkpoint_store: Any = None,
    ) -> None:
        is_strict = strict_model_weights and strict
        keys: Any = as_lenient(ignore_keys, "ignore_keys")
        super().__init__(load_path, load_weights_only, is_strict, keys, event, checkpoint_store)

    def _load_at(self, event: Event, state: State) -> None:
        if event is self.event and self.checkpoint_store is None:
            # Looked up at the event, because an earlier run may save the checkpoint only after `__init__`.
            self.load_path = find_checkpoint(self.load_path) or self.load_path
        super()._load_at(event, state)


class SystemMetricsMonitor(_callbacks.SystemMetricsMonitor):
    """`hocket.trainer.callbacks.SystemMetricsMonitor`, which also logs the host's numbers.

    The numbers of rank 0's host are logged before each batch under Composer's names: `cpu_percentage`, and
    `cpu_memory_…`, `disk_memory_…` and `network_…` with psutil's names of the fields. The numbers of GPUs are
    under `system/gpu_…`.
    """

    def __init__(self, log_all_data: bool = False) -> None:
        super().__init__(log_all_data)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Log the host's numbers."""
        self._log_host(logger)

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        """Log the host's numbers."""
        self._log_host(logger)

    def predict_batch_start(self, state: State, logger: Logger) -> None:
        """Log the host's numbers."""
        self._log_host(logger)

    def _log_host(self, logger: Logger) -> None:
        psutil: Any = import_extra("psutil", "system", needed_by="SystemMetricsMonitor")
        metrics = {"cpu_percentage": psutil.cpu_percent()}
        for name, numbers in (
            ("cpu_memory", psutil.virtual_memory()),
            ("disk_memory", psutil.disk_usage(os.sep)),
            ("network", psutil.net_io_counters()),
        ):
            if numbers is not None:  # a container may show no network
                metrics |= {f"{name}_{part}": number for part, number in numbers._asdict().items()}
        logger.log_metrics(metrics)


__all__ = [
    "ActivationMonitor",
    "CheckpointSaver",
    "EarlyStopper",
    "EvalOutputLogging",
    "ExportForInferenceCallback",
    "FreeOutputs",
    "Generate",
    "ImageVisualizer",
    "LRMonitor",
    "LoadCheckpoint",
    "MemoryMonitor",
    "MemorySnapshot",
    "NaNMonitor",
    "OOMObserver",
    "OptimizerMonitor",
    "RuntimeEstimator",
    "SpeedMonitor",
    "SystemMetricsMonitor",
    "ThresholdStopper",
]

__getattr__ = absent_from("composer.callbacks")
