"""Places that take what the training logs."""

from hocket.trainer.loggers.console import ConsoleLogger
from hocket.trainer.loggers.file import FileLogger
from hocket.trainer.loggers.in_memory import InMemoryLogger
from hocket.trainer.loggers.progress_bar import ProgressBarLogger
from hocket.trainer.loggers.tensorboard import TensorboardLogger

__all__ = ["ConsoleLogger", "FileLogger", "InMemoryLogger", "ProgressBarLogger", "TensorboardLogger"]
