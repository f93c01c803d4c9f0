"""Optimizers, parameter groups, and learning-rate schedules that are functions of training time."""

from hocket.trainer.checks import check_arguments
from hocket.trainer.optim.apply import apply_schedulers, hold_schedulers, prepare_schedulers
from hocket.trainer.optim.batch_size import BatchSizeWarmupScheduler
from hocket.trainer.optim.closures import has_two_steps, needs_closure
from hocket.trainer.optim.decoupled import DecoupledAdamW, DecoupledSGDW
from hocket.trainer.optim.metric_scheduler import MetricScheduler, check_metrics, step_metric_schedulers
from hocket.trainer.optim.muon import Muon, muon_with_adamw
from hocket.trainer.optim.param_groups import embeddings, experts, matrices, norms_and_biases, param_groups
from hocket.trainer.optim.schedulers import (
    ConstantScheduler,
    CosineAnnealingScheduler,
    ForOptimizer,
    LinearScheduler,
    PolynomialScheduler,
    Scheduler,
)
from hocket.trainer.optim.step_schedulers import (
    CosineAnnealingWarmRestartsScheduler,
    ExponentialScheduler,
    MultiStepScheduler,
    StepScheduler,
)
from hocket.trainer.optim.torch_schedulers import load_torch_scheduler_state, torch_scheduler_state
from hocket.trainer.optim.warmup import (
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearWithWarmupScheduler,
    MultiStepWithWarmupScheduler,
    PolynomialWithWarmupScheduler,
)
from hocket.trainer.optim.warmup_stable_decay import WarmupStableDecayScheduler

__all__ = [
    "BatchSizeWarmupScheduler",
    "ConstantScheduler",
    "ConstantWithWarmupScheduler",
    "CosineAnnealingScheduler",
    "CosineAnnealingWarmRestartsScheduler",
    "CosineAnnealingWithWarmupScheduler",
    "DecoupledAdamW",
    "DecoupledSGDW",
    "ExponentialScheduler",
    "ForOptimizer",
    "LinearScheduler",
    "LinearWithWarmupScheduler",
    "MetricScheduler",
    "MultiStepScheduler",
    "MultiStepWithWarmupScheduler",
    "Muon",
    "PolynomialScheduler",
    "PolynomialWithWarmupScheduler",
    "Scheduler",
    "StepScheduler",
    "WarmupStableDecayScheduler",
    "apply_schedulers",
    "check_metrics",
    "embeddings",
    "experts",
    "has_two_steps",
    "hold_schedulers",
    "load_torch_scheduler_state",
    "matrices",
    "muon_with_adamw",
    "needs_closure",
    "norms_and_biases",
    "param_groups",
    "prepare_schedulers",
    "step_metric_schedulers",
    "torch_scheduler_state",
]

check_arguments(globals()[name] for name in __all__)
