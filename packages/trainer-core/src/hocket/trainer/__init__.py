"""The training loop of Hocket: events, engine, state, time, callbacks, loggers."""

from hocket.trainer.algorithm import Algorithm
from hocket.trainer.callback import Callback
from hocket.trainer.checkpoint_saver import CheckpointSaver
from hocket.trainer.data_spec import DataSpec
from hocket.trainer.engine import Engine
from hocket.trainer.evaluator import Evaluator
from hocket.trainer.event import Event
from hocket.trainer.logger import Logger
from hocket.trainer.logger_destination import LoggerDestination
from hocket.trainer.microbatch_search import MicrobatchSearch
from hocket.trainer.models import ComposerClassifier, ComposerModel, LossSum
from hocket.trainer.state import State
from hocket.trainer.time import Time, TimeUnit
from hocket.trainer.timestamp import Timestamp
from hocket.trainer.trainer import Trainer

__all__ = [
    "Algorithm",
    "Callback",
    "CheckpointSaver",
    "ComposerClassifier",
    "ComposerModel",
    "DataSpec",
    "Engine",
    "Evaluator",
    "Event",
    "Logger",
    "LoggerDestination",
    "LossSum",
    "MicrobatchSearch",
    "State",
    "Time",
    "TimeUnit",
    "Timestamp",
    "Trainer",
]
