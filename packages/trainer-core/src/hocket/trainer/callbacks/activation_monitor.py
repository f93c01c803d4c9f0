"""A callback that logs statistics of activations."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hocket.trainer.callback import Callback
from hocket.trainer.callbacks.time_units import batches_between
from hocket.trainer.data.batch_tree import tensors
from hocket.trainer.log.logger import Logger
from hocket.trainer.loggers.wandb import WandBLogger
from hocket.trainer.ranks.sharded_tensors import local_part
from hocket.trainer.time import TimeInput

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from hocket.trainer.state import State

_log = logging.getLogger(__name__)


class ActivationMonitor(Callback):
    """Logs norm, mean, kurtosis and maximum of the inputs and outputs of every module.

    Names are `activations/l2_norm/<module>_input.0`, and `average`, `kurtosis` and `max` likewise, with
    `_output.0` for outputs. Kurtosis is logged for tensors of at least 2 elements. Hooks are in place only
    during the batches that are measured, and only the first microbatch of such a batch is measured.
    Everything is computed on the device and nothing is read from it.

    Args:
        interval: Batches between two measurements, such as `"25ba"`.
        ignore_module_types: Parts of class names of modules to leave out.
        only_log_wandb: Send the numbers to `WandBLogger` alone, since there are many.

    Raises:
        TrainerConfigError: If `interval` is not in batches.
    """

    needs_whole_model = True
    reads_outputs = False

    def __init__(
        self,
        interval: TimeInput = "25ba",
        ignore_module_types: Sequence[str] | None = None,
        only_log_wandb: bool = True,
    ) -> None:
        self.interval = batches_between(interval)
        self.ignore_module_types = tuple(ignore_module_types or ())
        self.only_log_wandb = only_log_wandb
        self._handles: list[RemovableHandle] = []
        self._found: dict[str, Tensor] = {}

    def fit_start(self, state: State, logger: Logger) -> None:
        """Warn if nothing will be logged."""
        if self.only_log_wandb and logger.destinations and not _wandb(logger):
            _log.warning(
                "`ActivationMonitor` logs to `WandBLogger` alone, and there is none; pass "
                "`only_log_wandb=False` to log them everywhere"
            )

    def before_forward(self, state: State, logger: Logger) -> None:
        """Put the hooks in place at the first microbatch, if this batch is measured."""
        if self._found or (state.timestamp.counts.batch + 1) % self.interval:
            return
        if not logger.destinations or (self.only_log_wandb and not _wandb(logger)):
            return
        for name, module in state.model.named_modules():
            if not any(part in type(module).__name__ for part in self.ignore_module_types):
                self._handles.append(module.register_forward_hook(partial(self._measure, name)))

    def after_forward(self, state: State, logger: Logger) -> None:
        """Remove the hooks after the first microbatch."""
        self._remove()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the measured statistics."""
        if self._found:
            metrics, self._found = self._found, {}
            logger.log_metrics(metrics, to=_wandb(logger) if self.only_log_wandb else None)

    def close(self, state: State, logger: Logger) -> None:
        """Remove the hooks, also after an error."""
        self._remove()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _measure(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        for kind, values in (("input", inputs), ("output", outputs)):
            for index, value in enumerate(tensors(values)):
                for statistic, number in _statistics(value).items():
                    self._found[f"activations/{statistic}/{name}_{kind}.{index}"] = number


def _wandb(logger: Logger) -> list[Any]:
    return [destination for destination in logger.destinations if isinstance(destination, WandBLogger)]


@torch.no_grad()
def _statistics(value: Tensor) -> dict[str, Tensor]:
    value = local_part(value).detach()
    if value.dtype == torch.bool or value.numel() == 0:
        return {}
    statistics = {"max": value.max() if not value.is_complex() else value.abs().max()}
    if not value.is_floating_point():
        return statistics
    value = value.float()
    mean = value.mean()
    statistics |= {"l2_norm": torch.linalg.vector_norm(value), "average": mean}
    if value.numel() > 1:
        centred = value - mean
        statistics["kurtosis"] = centred.pow(4).mean() / centred.square().mean().square().clamp_min(1e-30)
    return statistics
