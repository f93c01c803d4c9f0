"""A callback that logs norms of gradients, parameters, moments and updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from hocket.trainer.callback import Callback
from hocket.trainer.checks import check_count
from hocket.trainer.log.logger import Logger
from hocket.trainer.ranks.sharded_tensors import dot_products, global_norm, tensor_norms

if TYPE_CHECKING:
    from hocket.trainer.state import State

_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
_SECOND_MOMENT = "exp_avg_sq"


class OptimizerMonitor(Callback):
    """Logs 2-norms for each parameter and for all together.

    | name | norm of |
    |---|---|
    | `l2_norm/grad/<parameter>`, `l2_norm/grad/global` | gradients of the update, after clipping |
    | `l2_norm/param/<parameter>` | parameters after the update |
    | `l2_norm/update/<parameter>`, `…/global` | the change that the update made |
    | `l2_norm/moment/<parameter>` | the first moment (Adam) or momentum (SGD) |
    | `l2_norm/second_moment_sqrt/<parameter>` | the root of Adam's second moment |
    | `cosine/update_grad/<parameter>`, `cosine/moment_grad/<parameter>` | the cosine of the angle |

    Works with any torch optimizer, and with sharded parameters, whose shards are summed over the ranks.
    Nothing is read from the device. At a batch that is measured, copies of the parameters and gradients are
    held during the update.

    Args:
        log_optimizer_metrics: Log everything; when False, gradients alone.
        batch_log_interval: Batches between two measurements.
    """

    needs_whole_model = True
    reads_outputs = False
    measures_update = True

    def __init__(self, log_optimizer_metrics: bool = True, batch_log_interval: int = 10) -> None:
        check_count("batch_log_interval", batch_log_interval)
        self.log_optimizer_metrics = log_optimizer_metrics
        self.batch_log_interval = batch_log_interval
        self._before: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Measure the gradients, and copy parameters and gradients for `batch_end`."""
        step = state.timestamp.counts.batch + 1
        if step % self.batch_log_interval:
            return
        gradients = {
            name: parameter.grad
            for name, parameter in state.model.named_parameters()
            if parameter.grad is not None
        }
        norms = tensor_norms(gradients)
        logger.log_metrics(
            {**_named("l2_norm/grad", norms), "l2_norm/grad/global": global_norm(norms)}, step=step
        )
        if self.log_optimizer_metrics:
            parameters = dict(state.model.named_parameters())
            self._before = {name: parameters[name].detach().clone() for name in gradients}
            self._gradients = {name: gradient.detach().clone() for name, gradient in gradients.items()}

    def batch_end(self, state: State, logger: Logger) -> None:
        """Measure the parameters, the moments and the update."""
        if not self._before:
            return
        old_values, self._before = self._before, {}
        gradients, self._gradients = self._gradients, {}
        parameters = {
            name: value.detach() for name, value in state.model.named_parameters() if name in old_values
        }
        updates = {name: parameters[name] - old_values[name] for name in parameters}
        moments, second = _moments(state, old_values)
        norms = {
            "grad": tensor_norms(gradients),
            "param": tensor_norms(parameters),
            "update": tensor_norms(updates),
            "moment": tensor_norms(moments),
            "second_moment_sqrt": tensor_norms({name: value.sqrt() for name, value in second.items()}),
        }
        logged: dict[str, Tensor] = {"l2_norm/update/global": global_norm(norms["update"])}
        for kind in ("param", "update", "moment", "second_moment_sqrt"):
            logged |= _named(f"l2_norm/{kind}", norms[kind])
        for kind, tensors in (("update", updates), ("moment", moments)):
            products = dot_products({name: (value, gradients[name]) for name, value in tensors.items()})
            for name, product in products.items():
                scale = (norms[kind][name] * norms["grad"][name]).clamp_min(1e-30)
                logged[f"cosine/{kind}_grad/{name}"] = product / scale
        logger.log_metrics(logged)


def _named(prefix: str, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": norm for name, norm in norms.items()}


def _moments(state: State, names: Mapping[str, object]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the first and second moments that the optimizers keep, by the parameters' names."""
    slots_of = {parameter: slots for one in state.optimizers for parameter, slots in one.state.items()}
    first: dict[str, Tensor] = {}
    second: dict[str, Tensor] = {}
    for name, parameter in state.model.named_parameters():
        slots = slots_of.get(parameter, {}) if name in names else {}
        for slot in _FIRST_MOMENTS:
            if isinstance(slots.get(slot), Tensor):
                first[name] = slots[slot]
        if isinstance(slots.get(_SECOND_MOMENT), Tensor):
            second[name] = slots[_SECOND_MOMENT]
    return first, second
