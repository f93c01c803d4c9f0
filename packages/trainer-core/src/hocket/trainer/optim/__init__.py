"""Learning-rate schedules that are functions of the training's time."""

from hocket.trainer.optim.apply import apply_schedulers
from hocket.trainer.optim.schedulers import (
    ConstantScheduler,
    CosineAnnealingScheduler,
    LinearScheduler,
    Scheduler,
)
from hocket.trainer.optim.warmup import (
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearWithWarmupScheduler,
)

__all__ = [
    "ConstantScheduler",
    "ConstantWithWarmupScheduler",
    "CosineAnnealingScheduler",
    "CosineAnnealingWithWarmupScheduler",
    "LinearScheduler",
    "LinearWithWarmupScheduler",
    "Scheduler",
    "apply_schedulers",
]
