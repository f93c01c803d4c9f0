"""Callbacks that watch, report on and stop a training."""

from hocket.trainer.callbacks.activation_monitor import ActivationMonitor
from hocket.trainer.callbacks.compile_monitor import CompileMonitor
from hocket.trainer.callbacks.early_stopper import EarlyStopper
from hocket.trainer.callbacks.eval_output_logging import EvalOutputLogging
from hocket.trainer.callbacks.export_for_inference import ExportForInferenceCallback
from hocket.trainer.callbacks.free_outputs import FreeOutputs
from hocket.trainer.callbacks.generate import Generate
from hocket.trainer.callbacks.goodput_monitor import GoodputMonitor
from hocket.trainer.callbacks.grad_norm_monitor import GradNormMonitor
from hocket.trainer.callbacks.image_visualizer import ImageVisualizer
from hocket.trainer.callbacks.load_checkpoint import LoadCheckpoint
from hocket.trainer.callbacks.lr_monitor import LRMonitor
from hocket.trainer.callbacks.max_time_stopper import MaxTimeStopper
from hocket.trainer.callbacks.memory_monitor import MemoryMonitor
from hocket.trainer.callbacks.memory_snapshot import MemorySnapshot
from hocket.trainer.callbacks.nan_monitor import NaNMonitor
from hocket.trainer.callbacks.oom_observer import OOMObserver
from hocket.trainer.callbacks.optimizer_monitor import OptimizerMonitor
from hocket.trainer.callbacks.replica_check import ReplicaCheck
from hocket.trainer.callbacks.run_report import RunReport
from hocket.trainer.callbacks.runtime_estimator import RuntimeEstimator
from hocket.trainer.callbacks.speed_monitor import SpeedMonitor
from hocket.trainer.callbacks.spike_watcher import SpikeWatcher
from hocket.trainer.callbacks.straggler_report import StragglerReport
from hocket.trainer.callbacks.system_metrics_monitor import SystemMetricsMonitor
from hocket.trainer.callbacks.threshold_stopper import ThresholdStopper
from hocket.trainer.checks import check_arguments

__all__ = [
    "ActivationMonitor",
    "CompileMonitor",
    "EarlyStopper",
    "EvalOutputLogging",
    "ExportForInferenceCallback",
    "FreeOutputs",
    "Generate",
    "GoodputMonitor",
    "GradNormMonitor",
    "ImageVisualizer",
    "LRMonitor",
    "LoadCheckpoint",
    "MaxTimeStopper",
    "MemoryMonitor",
    "MemorySnapshot",
    "NaNMonitor",
    "OOMObserver",
    "OptimizerMonitor",
    "ReplicaCheck",
    "RunReport",
    "RuntimeEstimator",
    "SpeedMonitor",
    "SpikeWatcher",
    "StragglerReport",
    "SystemMetricsMonitor",
    "ThresholdStopper",
]

# `Generate` takes what the `generate` method of the model takes.
check_arguments(globals()[name] for name in __all__ if name != "Generate")
