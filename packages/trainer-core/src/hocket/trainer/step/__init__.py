"""One update of the model: microbatches, losses, gradients."""

from hocket.trainer.checks import check_arguments
from hocket.trainer.step.step import ClosureStep, FunctionStep, StandardStep, StepContext

__all__ = ["ClosureStep", "FunctionStep", "StandardStep", "StepContext"]

check_arguments([ClosureStep, FunctionStep, StandardStep])
