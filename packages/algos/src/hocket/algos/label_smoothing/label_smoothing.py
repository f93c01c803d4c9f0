"""Label smoothing: targets that are mixed with the uniform distribution."""

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hocket.algos.batches import ItemKey, get_item, with_item
from hocket.algos.errors import AlgorithmConfigError
from hocket.algos.order import Order
from hocket.algos.targets import as_logits, as_probabilities
from hocket.algos.traits import Trait
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.event import Event

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State


class LabelSmoothing(Algorithm):
    """Smooths the targets for the loss, and restores the batch right after it, for metrics.

    Args:
        smoothing: The share of the target that is spread over all classes, 0 to 1.
        target_key: Key of the targets in the batch: an index, a key, an attribute's name, or a pair of
            functions (getter, setter).

    Raises:
        AlgorithmConfigError: The smoothing is not within 0 to 1.

    Example:
        >>> LabelSmoothing(0.1, target_key="labels")
        LabelSmoothing(smoothing=0.1, target_key='labels')
    """

    events: ClassVar[frozenset[Event] | None] = frozenset({Event.BEFORE_LOSS, Event.AFTER_LOSS})
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.SMOOTHS_LABELS, Trait.NEEDS_OUTPUTS})
    order = Order.LABEL_SMOOTHING

    def __init__(self, smoothing: float = 0.1, target_key: ItemKey = 1) -> None:
        _check(smoothing)
        self.smoothing = smoothing
        self.target_key = target_key
        self._original: Any = None

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:
        """Smooth the targets of `state.batch`, or restore the batch."""
        if event == Event.AFTER_LOSS:
            state.batch, self._original = self._original, None
            return
        logits = as_logits("LabelSmoothing", state.outputs).detach()
        self._original = state.batch
        target = get_item(state.batch, self.target_key)
        smoothed = smooth_labels(logits, target, smoothing=self.smoothing)
        state.batch = with_item(state.batch, self.target_key, smoothed)

    def __repr__(self) -> str:
        return f"LabelSmoothing(smoothing={self.smoothing!r}, target_key={self.target_key!r})"


def smooth_labels(logits: torch.Tensor, target: torch.Tensor, *, smoothing: float = 0.1) -> torch.Tensor:
    """Mix targets with the uniform distribution, `(1 - smoothing) * target + smoothing / C`.

    Needs no trainer. Targets below 0, such as the ignored -100, become rows of zeros, which add nothing to
    a cross entropy; its mean still counts them.

    Args:
        logits: `(B, C, ...)` float; shape and device are taken from it.
        target: `(B, ...)` integer classes, or `(B, C, ...)` probabilities.
        smoothing: 0 to 1.

    Returns:
        `(B, C, ...)` in fp32, or in fp64 for logits in fp64.

    Raises:
        AlgorithmConfigError: The smoothing is not within 0 to 1.
        IncompatibleError: The shapes do not fit.

    Source: Szegedy et al., Rethinking the Inception Architecture for Computer Vision, 2015, section 7.
    """
    _check(smoothing)
    probabilities = as_probabilities(target, logits)
    mixed = probabilities * (1 - smoothing) + smoothing / logits.shape[1]
    if target.shape == logits.shape:
        return mixed
    return mixed * (target >= 0).unsqueeze(1)


def _check(smoothing: float) -> None:
    if not 0 <= smoothing <= 1:
        raise AlgorithmConfigError(f"`smoothing` is {smoothing!r}, expected 0 to 1")
