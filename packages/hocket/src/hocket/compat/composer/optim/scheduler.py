"""Schedules of the learning rate, as `composer.optim.scheduler`."""

from __future__ import annotations

from torch.optim.lr_scheduler import LambdaLR

import hocket.trainer.optim as _optim
from hocket.compat.composer.optim.one_argument import as_schedule
from hocket.compat.composer.signatures import class_in_order
from hocket.trainer import State
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.optim import (
    ConstantScheduler,
    CosineAnnealingScheduler,
    ExponentialScheduler,
    MultiStepScheduler,
    StepScheduler,
)
from hocket.trainer.optim import Scheduler as ComposerScheduler
from hocket.trainer.optim.torch_schedulers import scale_torch_scheduler as scale_pytorch_scheduler

ConstantWithWarmupScheduler = class_in_order(
    _optim.ConstantWithWarmupScheduler, "t_warmup alpha t_max scale_warmup", __name__
)
CosineAnnealingWarmRestartsScheduler = class_in_order(
    _optim.CosineAnnealingWarmRestartsScheduler, "t_0 t_mult alpha_f", __name__
)
CosineAnnealingWithWarmupScheduler = class_in_order(
    _optim.CosineAnnealingWithWarmupScheduler, "t_warmup t_max alpha_f scale_warmup", __name__
)
LinearScheduler = class_in_order(_optim.LinearScheduler, "alpha_i alpha_f t_max", __name__)
LinearWithWarmupScheduler = class_in_order(
    _optim.LinearWithWarmupScheduler, "t_warmup alpha_i alpha_f t_max scale_warmup", __name__
)
MultiStepWithWarmupScheduler = class_in_order(
    _optim.MultiStepWithWarmupScheduler, "t_warmup milestones gamma scale_warmup", __name__
)
PolynomialScheduler = class_in_order(_optim.PolynomialScheduler, "power t_max alpha_f", __name__)
PolynomialWithWarmupScheduler = class_in_order(
    _optim.PolynomialWithWarmupScheduler, "t_warmup power t_max alpha_f scale_warmup", __name__
)


def compile_composer_scheduler(scheduler: ComposerScheduler, state: State, ssr: float = 1.0) -> LambdaLR:
    """Return torch's scheduler that follows a schedule of a state's time; step it after each batch.

    Raises:
        TrainerConfigError: If the state has not exactly one optimizer.
    """
    if len(state.optimizers) != 1:
        raise TrainerConfigError(
            f"`compile_composer_scheduler` is for one optimizer, and the state has {len(state.optimizers)}"
        )
    schedule = as_schedule(scheduler)
    return LambdaLR(state.optimizers[0], lambda _: schedule(state, ssr))


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
