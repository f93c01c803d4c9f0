"""Callbacks, as `composer.callbacks`."""

from __future__ import annotations

from hocket.compat.composer.absent import absent_from
from hocket.compat.composer.checkpoint_saver import CheckpointSaver
from hocket.trainer import Logger, State, TimeUnit
from hocket.trainer.callbacks import (
    ActivationMonitor,
    EvalOutputLogging,
    ExportForInferenceCallback,
    FreeOutputs,
    Generate,
    ImageVisualizer,
    LoadCheckpoint,
    LRMonitor,
    MemoryMonitor,
    MemorySnapshot,
    NaNMonitor,
    OOMObserver,
    OptimizerMonitor,
    RuntimeEstimator,
    SpeedMonitor,
    SystemMetricsMonitor,
    ThresholdStopper,
)
from hocket.trainer.callbacks import EarlyStopper as _EarlyStopper


class EarlyStopper(_EarlyStopper):
    """`hocket.trainer.callbacks.EarlyStopper`, which checks a training metric after each batch.

    It does so where `patience` is in batches, as Composer's, and reads the metric from the device each time.
    """

    def batch_end(self, state: State, logger: Logger) -> None:
        """Check a training metric."""
        if self.patience.unit is TimeUnit.BATCH:
            super().epoch_end(state, logger)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Check a training metric that is not checked after each batch."""
        if self.patience.unit is not TimeUnit.BATCH:
            super().epoch_end(state, logger)


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
