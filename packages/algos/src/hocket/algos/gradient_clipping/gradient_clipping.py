"""Gradient clipping by norm, by value, and adaptively for each unit."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hocket.algos.errors import AlgorithmConfigError
from hocket.algos.gradient_clipping.adaptive import clip_adaptively
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.event import Event

if TYPE_CHECKING:
    from hocket.trainer.logger import Logger
    from hocket.trainer.state import State

ClippingType = Literal["norm", "value", "adaptive"]


class GradientClipping(Algorithm):
    """Clips gradients once a batch, when they are whole and unscaled, before the optimizer steps.

    Clipping by norm goes through the trainer's parallelism, so the norm is that of all gradients on all
    ranks.

    Args:
        clipping_type: `"norm"`, `"value"` or `"adaptive"`, as for `apply_gradient_clipping`.
        clipping_threshold: Above 0; see there.

    Raises:
        AlgorithmConfigError: The type is unknown or the threshold not above 0.

    Example:
        >>> GradientClipping("norm", clipping_threshold=1.0)
        GradientClipping(clipping_type='norm', clipping_threshold=1.0)
    """

    events: ClassVar[frozenset[Event] | None] = frozenset({Event.AFTER_TRAIN_BATCH})

    def __init__(self, clipping_type: ClippingType, clipping_threshold: float) -> None:
        _check(clipping_type, clipping_threshold)
        self.clipping_type = clipping_type
        self.clipping_threshold = clipping_threshold

    def match(self, event: Event, state: "State") -> bool:  # the protocol's
        """Whether gradients are whole now."""
        return event == Event.AFTER_TRAIN_BATCH

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:  # the protocol's
        """Clip the gradients of `state.model`. Collective where it clips by norm and they are sharded."""
        if self.clipping_type == "norm":
            state.parallelism.clip_grad_norm_(state.model.parameters(), self.clipping_threshold)
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

    Collective where parameters are sharded and it clips by norm, or adaptively with one-dimensional ones.

    Args:
        model: A model, or parameters; those without a gradient are passed over.
        clipping_type: `"norm"` scales all gradients so that their joint 2-norm is at most the threshold.
        `"value"`
            clamps each number to ± the threshold. `"adaptive"` scales the gradient of each unit (row of a
            matrix, filter of a convolution, whole vector) so that its norm is at most the threshold times
            that of the unit's weights.
        clipping_threshold: Above 0.

    Returns:
        For `"norm"`, the norm before clipping, a plain scalar; else None.

    Raises:
        AlgorithmConfigError: The type is unknown or the threshold not above 0.
        IncompatibleError: Adaptive clipping of parameters that are sharded otherwise than along their first
        dim.

    Source: Brock et al., High-Performance Large-Scale Image Recognition Without Normalization, 2021, equation
    3.
    """
    _check(clipping_type, clipping_threshold)
    parameters = list(model.parameters() if isinstance(model, nn.Module) else model)
    if clipping_type == "norm":
        norm = nn.utils.clip_grad_norm_(parameters, clipping_threshold)
        # For sharded gradients torch returns this rank's part of the norm, in the guise of a DTensor.
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    if clipping_type == "value":
        for parameter in parameters:
            gradient: Any = parameter.grad
            if gradient is not None:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                local.clamp_(-clipping_threshold, clipping_threshold)
        return None
    clip_adaptively(parameters, clipping_threshold)
    return None


def _check(clipping_type: str, clipping_threshold: float) -> None:
    kinds = get_args(ClippingType)
    if clipping_type not in kinds:
        raise AlgorithmConfigError(
            f"`clipping_type` is {clipping_type!r}, expected one of {', '.join(map(repr, kinds))}."
        )
    is_number = isinstance(clipping_threshold, int | float) and not isinstance(clipping_threshold, bool)
    if not is_number or not clipping_threshold > 0:
        raise AlgorithmConfigError(
            f"`clipping_threshold` is {clipping_threshold!r}, expected a number above 0."
        )
