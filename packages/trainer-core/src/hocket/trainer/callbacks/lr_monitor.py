"""A callback that logs learning rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket.trainer.callback import Callback
from hocket.trainer.logger import Logger

if TYPE_CHECKING:
    from hocket.trainer.state import State


class LRMonitor(Callback):
    """Logs the learning rate of each parameter group each batch, as `lr-<Optimizer>/group<i>`.

    Of several optimizers of one class, the second is `lr-<Optimizer>-1`, and so on. A learning rate that is a
    tensor is logged without waiting for the device.
    """

    reads_outputs = False

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the rates of the step just made."""
        rates: dict[str, Any] = {}
        seen: dict[str, int] = {}
        for optimizer in state.optimizers:
            name = type(optimizer).__name__
            count = seen[name] = seen.get(name, 0) + 1
            suffix = f"-{count - 1}" if count > 1 else ""
            for index, group in enumerate(optimizer.param_groups):
                rates[f"lr-{name}{suffix}/group{index}"] = group["lr"]
        logger.log_metrics(rates)
