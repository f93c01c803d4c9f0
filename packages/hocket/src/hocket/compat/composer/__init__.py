"""Composer's public names over Hocket's packages: change the import, or run a script unchanged.

`python -m hocket.compat.composer script.py` runs a script that imports `composer`; so does `install()`, once
at the program's start. `from hocket.compat.composer import Trainer` works without either. A name without a
counterpart can be imported, and raises on use, saying what replaces it.
"""

from hocket.compat.composer import (
    algorithms,
    callbacks,
    core,
    devices,
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
from hocket.compat.composer.install import install
from hocket.compat.composer.models import ComposerModel
from hocket.compat.composer.state import State
from hocket.compat.composer.trainer import Trainer
from hocket.trainer import (
    Algorithm,
    Callback,
    Evaluator,
    Event,
    Time,
    Timestamp,
    TimeUnit,
)

#: The release of Composer that has these names.
__version__ = "0.32.1"

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
    "core",
    "devices",
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
