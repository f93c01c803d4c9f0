"""Optimizers and schedules, as `composer.optim`."""

from __future__ import annotations

from hocket.compat.composer.optim import scheduler
from hocket.compat.composer.optim.scheduler import *  # noqa: F403
from hocket.trainer.optim import DecoupledAdamW, DecoupledSGDW

__all__ = [*scheduler.__all__, "DecoupledAdamW", "DecoupledSGDW"]
