"""Schedules of the learning rate, as `composer.optim.scheduler`."""

from __future__ import annotations

from torch.optim.lr_scheduler import LambdaLR

from hocket.trainer import State
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.optim import (
    ConstantScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWarmRestartsScheduler,
    CosineAnnealingWithWarmupScheduler,
    ExponentialScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
    MultiStepWithWarmupScheduler,
    PolynomialScheduler,
    PolynomialWithWarmupScheduler,
    StepScheduler,
)
from hocket.trainer.optim import Scheduler as ComposerScheduler
from hocket.trainer.optim.torch_schedulers import scale_torch_scheduler as scale_pytorch_scheduler


def compile_composer_scheduler(scheduler: ComposerScheduler, state: State, ssr: float = 1.0) -> LambdaLR:
    """Return torch's scheduler that follows a schedule of a state's time; step it after each batch.

    Raises:
        TrainerConfigError: If the state has not exactly one optimizer.
    """
    if len(state.optimizers) != 1:
        raise TrainerConfigError(
            f"`compile_composer_scheduler` is for one optimizer, and the state has {len(state.optimizers)}"
        )
    return LambdaLR(state.optimizers[0], lambda _: scheduler(state, ssr))


__all__ = [
    "ComposerScheduler",
    "ConstantScheduler",
    "ConstantWithWarmupScheduler",
    "CosineAnnealingScheduler",
    "CosineAnnealingWarmRestartsScheduler",
    "CosineAnnealingWithWarmupScheduler",
    "ExponentialScheduler",
    "LinearScheduler",
    "LinearWithWarmupScheduler",
    "MultiStepScheduler",
    "MultiStepWithWarmupScheduler",
    "PolynomialScheduler",
    "PolynomialWithWarmupScheduler",
    "StepScheduler",
    "compile_composer_scheduler",
    "scale_pytorch_scheduler",
]
