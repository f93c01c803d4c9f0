"""The model without training: evaluation and prediction."""

from hocket.trainer.checks import check_arguments
from hocket.trainer.evaluation.evaluation import EvaluationLoop
from hocket.trainer.evaluation.evaluator import Evaluator

__all__ = ["EvaluationLoop", "Evaluator"]

check_arguments([EvaluationLoop])
