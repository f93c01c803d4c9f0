"""Callbacks, as `composer.callbacks`."""

from __future__ import annotations

from hocket.compat.composer.absent import absent_from
from hocket.compat.composer.checkpoint_saver import CheckpointSaver
from hocket.trainer.callbacks import (
    ActivationMonitor,
    EarlyStopper,
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
