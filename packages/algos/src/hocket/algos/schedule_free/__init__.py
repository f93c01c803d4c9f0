"""Schedule-free optimizers: no learning rate schedule, averaged weights for evaluation."""

from hocket.algos.schedule_free.schedule_free import ScheduleFree

__all__ = ["ScheduleFree"]
