"""Composer's public names over Hocket's packages, for scripts that change the import or run unchanged.

`python -m hocket.compat.composer script.py` runs a script that imports `composer`; alternatively, a program
calls `install()` once at its start. `from hocket.compat.composer import Trainer` works without either. A name
without a counterpart can be imported; its use raises an error that names the replacement.

Names and modules are imported on first use: torchmetrics alone takes seconds to import.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from hocket.compat.composer.install import install

if TYPE_CHECKING:
    from hocket.compat.composer import (
        algorithms,
        callbacks,
        checkpoint,
        core,
        devices,
        distributed,
        functional,
        loggers,
        loss,
        metrics,
        models,
        optim,
        profiler,
        utils,
    )
    from hocket.compat.composer.data_spec import DataSpec
    from hocket.compat.composer.engine import Engine, Logger
    from hocket.compat.composer.evaluator import Evaluator
    from hocket.compat.composer.models import ComposerModel
    from hocket.compat.composer.state import State
    from hocket.compat.composer.trainer import Trainer
    from hocket.trainer import Algorithm, Callback, Event, Time, Timestamp, TimeUnit

#: The release of Composer that has these names.
__version__ = "0.32.1"

_MODULES = frozenset({
    "algorithms", "callbacks", "checkpoint", "core", "devices", "distributed", "functional", "loggers",
    "loss", "metrics", "models", "optim", "profiler", "trainer", "utils",
})  # fmt: skip

_HOME_OF = {
    "ComposerModel": "hocket.compat.composer.models",
    "DataSpec": "hocket.compat.composer.data_spec",
    "Engine": "hocket.compat.composer.engine",
    "Evaluator": "hocket.compat.composer.evaluator",
    "Logger": "hocket.compat.composer.engine",
    "State": "hocket.compat.composer.state",
    "Trainer": "hocket.compat.composer.trainer",
    **dict.fromkeys(("Algorithm", "Callback", "Event", "Time", "TimeUnit", "Timestamp"), "hocket.trainer"),
}

__all__ = [
    "Algorithm",
    "Callback",
    "ComposerModel",
    "DataSpec",
    "Engine",
    "Evaluator",
    "Event",
    "Logger",
    "State",
    "Time",
    "TimeUnit",
    "Timestamp",
    "Trainer",
    "algorithms",
    "callbacks",
    "checkpoint",
    "core",
    "devices",
    "distributed",
    "functional",
    "install",
    "loggers",
    "loss",
    "metrics",
    "models",
    "optim",
    "profiler",
    "utils",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        # An import as `composer.…` also registers the submodules, such as `composer.core.time`.
        is_composer = sys.modules.get("composer") is sys.modules[__name__]
        return importlib.import_module(f"composer.{name}" if is_composer else f"{__name__}.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`", name=name)
    found = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
