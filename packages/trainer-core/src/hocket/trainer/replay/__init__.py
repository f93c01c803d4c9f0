"""The replay of a step: a run is continued from a checkpoint before it, and each tensor of it is measured."""

from hocket.trainer.replay.request import Replay, ReplayFinished, current_replay, replaying
from hocket.trainer.replay.tensor_record import StepRecord, TensorRecord

__all__ = ["Replay", "ReplayFinished", "StepRecord", "TensorRecord", "current_replay", "replaying"]
