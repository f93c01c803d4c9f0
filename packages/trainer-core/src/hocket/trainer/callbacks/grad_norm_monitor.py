"""A callback that logs the norm of all gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.trainer.callback import Callback
from hocket.trainer.callbacks.time_units import batches_between
from hocket.trainer.log.logger import Logger
from hocket.trainer.ranks.sharded_tensors import global_norm, tensor_norms
from hocket.trainer.time import TimeInput

if TYPE_CHECKING:
    from hocket.trainer.state import State


class GradNormMonitor(Callback):
    """Logs the 2-norm of all gradients, as `l2_norm/grad/global`.

    It is the norm of the gradients that the update uses: after clipping, by `gradient_clipping=` or by an
    algorithm. Clipping by norm logs the norm before it as `l2_norm/grad/before_clipping`. The norm is
    correct for sharded parameters too, at the cost of an all-reduce of one number for each parameter. Nothing
    is read from the device.

    Args:
        interval: Batches between two measurements, such as `"10ba"`.

    Raises:
        TrainerConfigError: If `interval` is not in batches.
    """

    needs_whole_model = True
    reads_outputs = False
    measures_update = True

    def __init__(self, interval: TimeInput = 1) -> None:
        self.interval = batches_between(interval)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Log the norm, if it is time."""
        step = state.timestamp.counts.batch + 1
        if step % self.interval:
            return
        gradients = {
            name: parameter.grad
            for name, parameter in state.model.named_parameters()
            if parameter.grad is not None
        }
        logger.log_metrics({"l2_norm/grad/global": global_norm(tensor_norms(gradients))}, step=step)
