"""The callbacks and algorithms that are called at an event, and their order."""

from hocket.trainer.engine.engine import Engine
from hocket.trainer.engine.passes import AlgorithmPass, make_passes
from hocket.trainer.engine.trace import Trace

__all__ = ["AlgorithmPass", "Engine", "Trace", "make_passes"]
