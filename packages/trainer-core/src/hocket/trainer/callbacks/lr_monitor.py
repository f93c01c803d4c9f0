"""A callback that logs learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from hocket.trainer.callback import Callback
from hocket.trainer.log.logger import Logger

if TYPE_CHECKING:
    from hocket.trainer.state import State


class LRMonitor(Callback):
    """Logs the learning rate of each parameter group each batch, as `lr-<Optimizer>/group<i>`.

    With several optimizers of one class, the second is `lr-<Optimizer>-1`, and so on. A learning rate that is
    a tensor is logged without waiting for the device.
    """

    reads_outputs = False

    def __init__(self) -> None:
        self._names: list[tuple[Optimizer, list[str]]] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the rates of the step just made."""
        optimizers = state.optimizers
        if len(self._names) != len(optimizers):
            self._names = _name_groups(optimizers)
        rates: dict[str, Any] = {}
        # By index: a `zip` with `strict=` takes longer than all the rest of this method.
        for index, optimizer in enumerate(optimizers):
            named, names = self._names[index]
            groups = optimizer.param_groups
            if optimizer is not named or len(names) != len(groups):
                self._names = []
                self.batch_end(state, logger)
                return
            for number, group in enumerate(groups):
                rates[names[number]] = group["lr"]
        logger.log_metrics(rates)


def _name_groups(optimizers: Sequence[Optimizer]) -> list[tuple[Optimizer, list[str]]]:
    """Return each optimizer with the names of its groups."""
    named = []
    seen: dict[str, int] = {}
    for optimizer in optimizers:
        name = type(optimizer).__name__
        count = seen[name] = seen.get(name, 0) + 1
        suffix = f"-{count - 1}" if count > 1 else ""
        indices = range(len(optimizer.param_groups))
        named.append((optimizer, [f"lr-{name}{suffix}/group{index}" for index in indices]))
    return named
