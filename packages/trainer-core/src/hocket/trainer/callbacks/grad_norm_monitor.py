"""A callback that logs the norm of all gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.trainer.callback import Callback
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.log.logger import Logger
from hocket.trainer.ranks.sharded_tensors import global_norm, tensor_norms

if TYPE_CHECKING:
    from hocket.trainer.state import State


class GradNormMonitor(Callback):
    """Logs the 2-norm of all gradients, as `l2_norm/grad/global`.

    It is the norm of the gradients that the update uses: after clipping, by `gradient_clipping=` or by an
    algorithm. Clipping by norm logs the norm before it as `l2_norm/grad/before_clipping`. The norm is
    correct for sharded parameters too, at the cost of an all-reduce of one number for each parameter. Nothing
    is read from the device.

    Args:
        batch_log_interval: Batches between two measurements.
    """

    reads_outputs = False
    measures_update = True

    def __init__(self, batch_log_interval: int = 1) -> None:
        if batch_log_interval < 1:
            raise TrainerConfigError(
                f"`batch_log_interval` is {batch_log_interval}; expected at least 1 batch"
            )
        self.batch_log_interval = batch_log_interval

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Log the norm, if it is time."""
        step = state.timestamp.counts.batch + 1
        if step % self.batch_log_interval:
            return
        gradients = {
            name: parameter.grad
            for name, parameter in state.model.named_parameters()
            if parameter.grad is not None
        }
        logger.log_metrics({"l2_norm/grad/global": global_norm(tensor_norms(gradients))}, step=step)
