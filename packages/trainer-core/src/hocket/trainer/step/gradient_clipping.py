"""Gradient clipping as a setting of the trainer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch

from hocket.trainer.callback import Callback
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.log.logger import Logger
from hocket.trainer.protocols import Pipelined
from hocket.trainer.ranks.sharded_tensors import local_part

if TYPE_CHECKING:
    from hocket.trainer.state import State


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientClippingConfig:
    """The settings of gradient clipping.

    Attributes:
        clipping_type: `"norm"` scales all gradients so that their global L2 norm is at most the threshold;
            `"value"` limits each element to plus or minus the threshold.
        clipping_threshold: The threshold.
    """

    clipping_type: Literal["norm", "value"] = "norm"
    clipping_threshold: float = 1.0

    def __post_init__(self) -> None:
        if self.clipping_type not in ("norm", "value"):
            raise TrainerConfigError(
                f"`clipping_type` is `{self.clipping_type}`; expected `norm` or `value` (`adaptive` clipping "
                "is the algorithm `hocket.algos.GradientClipping`)"
            )
        threshold = self.clipping_threshold
        is_number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
        if not is_number or not 0.0 < threshold < math.inf:
            raise TrainerConfigError(f"`clipping_threshold` is {threshold!r}; expected a positive number")

    @classmethod
    def of(cls, given: Any) -> GradientClippingConfig:
        """Make a config from a config, a mapping of its fields, or a number (the largest norm).

        Raises:
            TrainerConfigError: If it is none of these, or has an unknown key.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping):
            known = {field.name for field in fields(cls)}
            if unknown := sorted(map(str, set(given) - known)):
                raise TrainerConfigError(
                    f"`gradient_clipping` has the unknown keys {unknown}; expected some of {sorted(known)}"
                )
            return cls(**given)
        return cls(clipping_threshold=given)


class GradientClipper(Callback):
    """A callback that clips gradients at `AFTER_TRAIN_BATCH`, when they are unscaled and averaged over ranks.

    Clipping by norm logs the norm before it as `l2_norm/grad/before_clipping`, without reading the device.

    Args:
        config: The kind and the threshold.
    """

    reads_outputs = False

    def __init__(self, config: GradientClippingConfig) -> None:
        self.config = config

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Clip the gradients. By norm this is collective where parameters are sharded."""
        threshold = self.config.clipping_threshold
        if self.config.clipping_type == "value":
            clamp_gradients(state.module.named_parameters(), threshold)
            return
        has_gradients = any(one.grad is not None for one in state.module.parameters())
        # The norm is that of all stages, so that one without gradients takes part, too.
        if has_gradients or isinstance(state.parallelism, Pipelined):
            norm = state.parallelism.clip_grad_norm_(state.module.parameters(), threshold)
            logger.log_metrics({"l2_norm/grad/before_clipping": norm}, step=state.timestamp.counts.batch + 1)


def clamp_gradients(parameters: Iterable[tuple[str, torch.Tensor]], threshold: float) -> None:
    """Limit each element of each gradient to plus or minus the threshold, in place.

    Args:
        parameters: Parameters with their names, plain or sharded; those without a gradient are skipped.
        threshold: The largest absolute value.

    Raises:
        TrainerConfigError: If a gradient is complex.
    """
    present = [(name, parameter) for name, parameter in parameters if parameter.grad is not None]
    gradients = [local_part(parameter.grad) for _, parameter in present]
    try:
        _clamp(gradients, threshold)
    except NotImplementedError:  # of other kinds; tried first, since a look at each gradient takes time
        _clamp(_orderable(present), threshold)


def _clamp(gradients: list[torch.Tensor], threshold: float) -> None:
    if gradients:
        torch._foreach_clamp_min_(gradients, -threshold)
        torch._foreach_clamp_max_(gradients, threshold)


def _orderable(present: Iterable[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Return dense gradients, and the values of sparse ones, of which those of one place are added up."""
    gradients: list[torch.Tensor] = []
    for name, parameter in present:
        gradient = local_part(parameter.grad)
        if gradient.is_complex():
            raise TrainerConfigError(
                f"the gradient of `{name}` is complex, and complex numbers have no order, so they cannot be "
                "clipped by value; use `clipping_type='norm'`"
            )
        if gradient.is_sparse:
            parameter.grad = gradient.coalesce()
            gradient = parameter.grad.values()
        gradients.append(gradient)
    return gradients
