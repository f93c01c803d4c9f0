"""Callbacks have Composer's names, arguments and defaults, and pass the suite for callbacks."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from hocket.trainer import callbacks, loggers
from hocket.trainer.testing import check_callback

# From Composer's documentation, without arguments that Hocket adds.
ARGUMENTS = {
    "ActivationMonitor": {"interval": "25ba", "ignore_module_types": None, "only_log_wandb": True},
    "EarlyStopper": {"comp": None, "min_delta": 0.0, "patience": 1},
    "ThresholdStopper": {"comp": None, "stop_on_batch": False},
    "FreeOutputs": {},
    "Generate": {"batch_size": None},
    "ImageVisualizer": {"interval": "100ba", "mode": "input", "num_images": 8, "channels_last": False},
    "LoadCheckpoint": {"load_weights_only": False, "strict": True, "ignore_keys": None},
    "LRMonitor": {},
    "MemoryMonitor": {"memory_keys": None, "dist_aggregate_batch_interval": None},
    "MemorySnapshot": {"skip_batches": 1, "interval": "3ba", "max_entries": 100_000, "overwrite": False},
    "OOMObserver": {
        "max_entries": 100_000,
        "folder": "{run_name}/torch_traces",
        "filename": "rank{rank}_oom",
        "overwrite": False,
    },
    "NaNMonitor": {},
    "OptimizerMonitor": {"log_optimizer_metrics": True, "batch_log_interval": 10},
    "RuntimeEstimator": {"skip_batches": 1, "time_unit": "hours"},
    "SpeedMonitor": {"window_size": 100, "gpu_flops_available": None, "time_unit": "hours"},
    "SystemMetricsMonitor": {"log_all_data": False},
}
# Arguments of callbacks that require some.
GIVEN = {
    "EarlyStopper": ("Score", "eval"),
    "Generate": (["x"],),
    "LoadCheckpoint": ("folder/name",),
    "MaxTimeStopper": ("1h",),
    "ThresholdStopper": ("Score", "eval", 0.5),
}


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_arguments_and_defaults_equal_composers(name):
    parameters = inspect.signature(getattr(callbacks, name)).parameters
    found = {key: parameters[key].default for key in ARGUMENTS[name]}
    assert found == ARGUMENTS[name]


# The state of `GoodputMonitor` includes the current time, so that two states always differ.
@pytest.mark.parametrize("name", sorted({*callbacks.__all__} - {"GoodputMonitor"}))
def test_every_callback_passes_the_suite(name):
    check_callback(lambda: getattr(callbacks, name)(*GIVEN.get(name, ())))


def test_every_callback_and_logger_is_on_the_page():
    page = (Path(__file__).parents[1] / "docs" / "callbacks.md").read_text("utf-8")
    assert [name for name in (*callbacks.__all__, *loggers.__all__) if f"`{name}" not in page] == []
