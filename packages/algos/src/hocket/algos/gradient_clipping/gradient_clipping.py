"""Gradient clipping by norm, by value, and adaptively for each unit."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hocket.algos.checks import check_choice
from hocket.algos.errors import AlgorithmConfigError
from hocket.algos.gradient_clipping.adaptive import clip_adaptively
from hocket.algos.order import Order
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.event import Event
from hocket.trainer.ranks.sharded_tensors import local_part, whole_tensor
from hocket.trainer.step.gradient_clipping import clamp_gradients

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State

ClippingType = Literal["norm", "value", "adaptive"]


class GradientClipping(Algorithm):
    """Clips gradients once a batch, after all microbatches and unscaling, before the optimizer steps.

    Clipping by norm goes through the trainer's parallelism, so the norm is that of all gradients on all
    ranks. The norm before clipping is logged as `l2_norm/grad/before_clipping`.

    Args:
        clipping_type: `"norm"`, `"value"` or `"adaptive"`, as for `apply_gradient_clipping`.
        clipping_threshold: Above 0; required. See `apply_gradient_clipping`.

    Raises:
        AlgorithmConfigError: The type is unknown or the threshold not above 0.

    Example:
        >>> GradientClipping(clipping_threshold=1.0)
        GradientClipping(clipping_type='norm', clipping_threshold=1.0)
    """

    events: ClassVar[frozenset[Event] | None] = frozenset({Event.AFTER_TRAIN_BATCH})
    order = Order.GRADIENT_CLIPPING

    def __init__(self, clipping_type: ClippingType = "norm", clipping_threshold: float | None = None) -> None:
        self.clipping_type = clipping_type
        self.clipping_threshold = _check(clipping_type, clipping_threshold)

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:
        """Clip the gradients of `state.model`. Collective for clipping by norm of sharded gradients."""
        if self.clipping_type == "norm":
            norm = state.parallelism.clip_grad_norm_(state.model.parameters(), self.clipping_threshold)
            logger.log_metrics({"l2_norm/grad/before_clipping": norm}, step=state.timestamp.counts.batch + 1)
        else:
            apply_gradient_clipping(
                state.model, self.clipping_type, clipping_threshold=self.clipping_threshold
            )

    def __repr__(self) -> str:
        return (
            f"GradientClipping(clipping_type={self.clipping_type!r}, "
            f"clipping_threshold={self.clipping_threshold!r})"
        )


def apply_gradient_clipping(
    model: nn.Module | Iterable[torch.Tensor], clipping_type: ClippingType, *, clipping_threshold: float
) -> torch.Tensor | None:
    """Clip gradients in place; needs no trainer. Parameters may be plain or sharded (FSDP2).

    Collective if parameters are sharded, for clipping by norm and for adaptive clipping of one-dimensional
    parameters.

    Args:
        model: A model, or parameters; those without a gradient are skipped.
        clipping_type: `"norm"` scales all gradients so that their joint 2-norm is at most the threshold.
            `"value"` clamps each number to ± the threshold. `"adaptive"` scales the gradient of each unit
            (row of a matrix, filter of a convolution, whole vector) so that its norm is at most the
            threshold times that of the unit's weights.
        clipping_threshold: Above 0.

    Returns:
        For `"norm"`, the norm before clipping, a plain scalar; else None.

    Raises:
        AlgorithmConfigError: The type is unknown or the threshold not above 0.
        IncompatibleError: Adaptive clipping of parameters that are sharded otherwise than along their first
            dim, or have sparse gradients.
        TrainerConfigError: Clipping by value of complex gradients.

    Source: Brock et al., High-Performance Large-Scale Image Recognition Without Normalization, 2021, equation
    3.
    """
    _check(clipping_type, clipping_threshold)
    parameters = dict(
        model.named_parameters()
        if isinstance(model, nn.Module)
        else ((f"parameters[{index}]", parameter) for index, parameter in enumerate(model))
    )
    if clipping_type == "norm":
        return _clip_by_norm(list(parameters.values()), clipping_threshold)
    if clipping_type == "value":
        clamp_gradients(parameters.items(), clipping_threshold)
        return None
    clip_adaptively(parameters.values(), clipping_threshold)
    return None


def _clip_by_norm(parameters: list[torch.Tensor], threshold: float) -> torch.Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    if len(sharded) in (0, len(gradients)):
        return whole_tensor(nn.utils.clip_grad_norm_(parameters, threshold))
    others = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    # For sharded gradients torch returns this rank's part of the norm, as a DTensor.
    norms = [whole_tensor(nn.utils.get_total_norm(kind)) for kind in (sharded, others)]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    factor = torch.clamp(threshold / (norm + 1e-6), max=1.0)
    torch._foreach_mul_([local_part(gradient.detach()) for gradient in gradients], factor)
    return norm


def _check(clipping_type: str, clipping_threshold: float | None) -> float:
    check_choice("clipping_type", clipping_type, get_args(ClippingType))
    is_number = isinstance(clipping_threshold, int | float) and not isinstance(clipping_threshold, bool)
    if not is_number or not clipping_threshold > 0:  # type: ignore[operator]  # it is a number here
        raise AlgorithmConfigError(
            f"`clipping_threshold` is {clipping_threshold!r}, expected a number above 0"
        )
    return clipping_threshold  # type: ignore[return-value]
