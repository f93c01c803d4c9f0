"""The trainer of Hocket. The files at the root hold what a user names; each folder answers one question.

setup       from the arguments of `Trainer` to the parts of a run
loop        the training loop, and what ends it
engine      the callbacks and algorithms that are called at an event, and their order
step        one update of the model: microbatches, losses, gradients
data        this rank's batches
ranks       the exchange between ranks
checkpoint  the run on disk
evaluation  the model without training
log         values on their way to the loggers
process     this process: devices, random generators, clocks, optional packages
replay      one step again, with each of its tensors measured
callbacks, loggers, metrics, models, loss, optim, profiler    the parts that a user chooses from
testing     the conformance suites of the protocols
"""

from hocket.trainer.algorithm import Algorithm
from hocket.trainer.callback import Callback
from hocket.trainer.checkpoint.checkpoint_saver import CheckpointSaver
from hocket.trainer.checks import check_arguments
from hocket.trainer.data.data_spec import DataSpec
from hocket.trainer.engine.engine import Engine
from hocket.trainer.evaluation.evaluator import Evaluator
from hocket.trainer.event import Event
from hocket.trainer.log.logger import Logger
from hocket.trainer.loggers.logger_destination import LoggerDestination
from hocket.trainer.models import ComposerClassifier, ComposerModel, LossSum
from hocket.trainer.setup.settings import CheckpointingSettings, LoopSettings
from hocket.trainer.state import State
from hocket.trainer.step.gradient_clipping import GradientClippingConfig
from hocket.trainer.step.microbatch_search import MicrobatchSearch
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

# Values that a step makes (`Time`, `Timestamp`, `LossSum`) are left as cheap as they are.
check_arguments([CheckpointSaver, DataSpec, Engine, Evaluator, Logger, MicrobatchSearch])
check_arguments([CheckpointingSettings, GradientClippingConfig, LoopSettings])
