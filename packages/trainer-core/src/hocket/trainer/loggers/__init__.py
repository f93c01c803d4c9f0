"""Loggers: destinations of the metrics, settings, tables and images of a run."""

from hocket.trainer.checks import check_arguments
from hocket.trainer.loggers.absent import (
    CometMLLogger,
    MosaicMLLogger,
    NeptuneLogger,
    RemoteUploaderDownloader,
    SlackLogger,
)
from hocket.trainer.loggers.console import ConsoleLogger
from hocket.trainer.loggers.file import FileLogger
from hocket.trainer.loggers.in_memory import InMemoryLogger
from hocket.trainer.loggers.mlflow import MLFlowLogger
from hocket.trainer.loggers.progress_bar import ProgressBarLogger
from hocket.trainer.loggers.tensorboard import TensorboardLogger
from hocket.trainer.loggers.trackio import TrackioLogger
from hocket.trainer.loggers.wandb import WandBLogger

__all__ = [
    "CometMLLogger",
    "ConsoleLogger",
    "FileLogger",
    "InMemoryLogger",
    "MLFlowLogger",
    "MosaicMLLogger",
    "NeptuneLogger",
    "ProgressBarLogger",
    "RemoteUploaderDownloader",
    "SlackLogger",
    "TensorboardLogger",
    "TrackioLogger",
    "WandBLogger",
]

check_arguments(globals()[name] for name in __all__)
