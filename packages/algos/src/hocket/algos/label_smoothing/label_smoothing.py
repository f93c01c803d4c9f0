"""Label smoothing: targets that are a little less sure."""

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from hocket.algos.batches import ItemKey, get_item, with_item
from hocket.algos.errors import AlgorithmConfigError, IncompatibleError
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.event import Event

if TYPE_CHECKING:
    from hocket.trainer.logger import Logger
    from hocket.trainer.state import State


class LabelSmoothing(Algorithm):
    """Smooths the targets for the loss, and puts the batch back as it was right after, for metrics.

    Args:
        smoothing: The share of the target that is spread over all classes, 0 to 1.
        target_key: Where the batch has its targets: an index, a key, an attribute's name, or a pair of
        functions
            (getter, setter).

    Raises:
        AlgorithmConfigError: The smoothing is not within 0 to 1.

    Example:
        >>> LabelSmoothing(0.1, target_key="labels")
        LabelSmoothing(smoothing=0.1, target_key='labels')
    """

    events: ClassVar[frozenset[Event] | None] = frozenset({Event.BEFORE_LOSS, Event.AFTER_LOSS})

    def __init__(self, smoothing: float = 0.1, target_key: ItemKey = 1) -> None:
        _check(smoothing)
        self.smoothing = smoothing
        self.target_key = target_key
        self._original: Any = None

    def match(self, event: Event, state: "State") -> bool:  # the protocol's
        """Whether the loss is about to be computed, or just was."""
        return event in (Event.BEFORE_LOSS, Event.AFTER_LOSS)

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:  # the protocol's
        """Smooth the targets of `state.batch`, or put the batch back."""
        if event == Event.AFTER_LOSS:
            state.batch, self._original = self._original, None
            return
        if not isinstance(state.outputs, torch.Tensor):
            raise IncompatibleError(
                "`LabelSmoothing` needs logits as the model's outputs, a tensor of shape (B, C, ...), but "
                f"they are a {type(state.outputs).__name__}. Return the logits from `forward`, or call "
                "`smooth_labels` in `loss`."
            )
        self._original = state.batch
        target = get_item(state.batch, self.target_key)
        smoothed = smooth_labels(state.outputs.detach(), target, smoothing=self.smoothing)
        state.batch = with_item(state.batch, self.target_key, smoothed)

    def __repr__(self) -> str:
        return f"LabelSmoothing(smoothing={self.smoothing!r}, target_key={self.target_key!r})"


def smooth_labels(logits: torch.Tensor, target: torch.Tensor, *, smoothing: float = 0.1) -> torch.Tensor:
    """Mix targets with the uniform distribution, `(1 - smoothing) * target + smoothing / C`.

    Needs no trainer. Targets below 0, such as the ignored -100, become rows of noughts, which add nothing to
    a cross entropy; its mean still counts them.

    Args:
        logits: `(B, C, ...)` float; shape, dtype and device are taken from it.
        target: `(B, ...)` integer classes, or `(B, C, ...)` probabilities.
        smoothing: 0 to 1.

    Returns:
        `(B, C, ...)` in the dtype of the logits.

    Raises:
        AlgorithmConfigError: The smoothing is not within 0 to 1.
        IncompatibleError: The shapes do not fit.

    Source: Szegedy et al., Rethinking the Inception Architecture for Computer Vision, 2015, section 7.
    """
    _check(smoothing)
    if logits.ndim < 2:
        raise IncompatibleError(f"`logits` has shape {tuple(logits.shape)}, expected (B, C, ...).")
    num_classes = logits.shape[1]
    if target.shape == logits.shape:
        return target.to(logits.dtype) * (1 - smoothing) + smoothing / num_classes
    if target.is_floating_point() or target.shape != (logits.shape[0], *logits.shape[2:]):
        raise IncompatibleError(
            f"`target` is {target.dtype} of shape {tuple(target.shape)}, expected integer classes of shape "
            f"{(logits.shape[0], *logits.shape[2:])} or probabilities of shape {tuple(logits.shape)}."
        )
    counted = (target >= 0).unsqueeze(1)
    one_hot = nn.functional.one_hot(target.long().clamp(min=0), num_classes).movedim(-1, 1)
    mixed = one_hot.to(logits.dtype) * (1 - smoothing) + smoothing / num_classes
    return mixed * counted


def _check(smoothing: float) -> None:
    if not 0 <= smoothing <= 1:
        raise AlgorithmConfigError(f"`smoothing` is {smoothing!r}, expected 0 to 1.")
