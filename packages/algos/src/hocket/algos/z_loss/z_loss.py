"""z-loss: keeps the normalizer of the softmax near 1."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hocket.algos.batches import ItemKey, get_item
from hocket.algos.checks import check_number
from hocket.algos.errors import IncompatibleError
from hocket.algos.order import Order
from hocket.algos.traits import Trait
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.event import Event

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State


class ZLoss(Algorithm):
    """Adds `coefficient * mean(log(Z)²)` to the loss, where Z is the sum of the exponentials of the logits.

    Args:
        coefficient: Weight of the term, at least 0.
        target_key: Key of the targets in the batch, of which those below 0 do not count; None counts every
            position.
        class_dim: Dim of the logits that holds the classes: -1 for language models, 1 for images.
        shift: Whether logits at a position predict the next one's label, so that the first label is not used.
            None for True if `class_dim` is the last dim, as in language models, else False.

    Raises:
        AlgorithmConfigError: `coefficient` is below 0.

    Example:
        >>> ZLoss(1e-4, target_key="labels")
        ZLoss(coefficient=0.0001, target_key='labels', class_dim=-1, shift=None)

    Source: Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, section 5.
    """

    events: ClassVar[frozenset[Event] | None] = frozenset({Event.AFTER_LOSS})
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.NEEDS_OUTPUTS})
    order = Order.Z_LOSS

    def __init__(
        self,
        coefficient: float = 1e-4,
        target_key: ItemKey | None = None,
        class_dim: int = -1,
        shift: bool | None = None,
    ) -> None:
        check_number("coefficient", coefficient, least=0)
        self.coefficient = coefficient
        self.target_key = target_key
        self.class_dim = class_dim
        self.shift = shift

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:
        """Add the term to `state.loss`, a tensor, a sum with its weight, or a dict with a `total`."""
        logits = _logits_of(state.outputs)
        mask = None
        if self.target_key is not None:
            mask = get_item(state.batch, self.target_key) >= 0
            is_last = self.class_dim in (-1, logits.ndim - 1)
            should_shift = is_last if self.shift is None else self.shift
            if should_shift and mask.ndim > 1:
                mask = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
        term = z_loss(logits, mask, coefficient=self.coefficient, class_dim=self.class_dim)
        state.loss = _added(state.loss, term)

    def conflict_with(self, other: Any) -> str | None:
        """Refuse a second z-loss."""
        return (
            "the term would be added twice; give one with the sum of both"
            if isinstance(other, ZLoss)
            else None
        )

    def __repr__(self) -> str:
        return (
            f"ZLoss(coefficient={self.coefficient!r}, target_key={self.target_key!r}, "
            f"class_dim={self.class_dim!r}, shift={self.shift!r})"
        )


def z_loss(
    logits: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    coefficient: float = 1e-4,
    class_dim: int = -1,
) -> torch.Tensor:
    """Return `coefficient * mean(logsumexp(logits)²)`, a scalar in fp32; needs no trainer.

    Args:
        logits: Float, with the classes in `class_dim`.
        mask: Bool, the logits' shape without `class_dim`: the positions to count. None counts all.
        coefficient: At least 0.
        class_dim: Dim of the classes.

    Raises:
        AlgorithmConfigError: `coefficient` is below 0.
        IncompatibleError: The mask has another shape.

    Source: Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, section 5.
    """
    check_number("coefficient", coefficient, least=0)
    squares = torch.logsumexp(logits.float(), dim=class_dim).square()
    if mask is None:
        return coefficient * squares.mean()
    if mask.shape != squares.shape:
        raise IncompatibleError(
            f"`mask` has shape {tuple(mask.shape)}, expected {tuple(squares.shape)}: that of the logits "
            f"without dim {class_dim}"
        )
    counted = mask.sum().clamp(min=1)
    return coefficient * squares.masked_fill(~mask, 0.0).sum() / counted


def _logits_of(outputs: Any) -> torch.Tensor:
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    if not isinstance(logits, torch.Tensor):
        raise IncompatibleError(
            "`ZLoss` needs logits: a tensor as the model's outputs, or outputs with `logits`; they are a "
            f"{type(outputs).__name__}. Call `z_loss` in the model's `loss`"
        )
    return logits


def _added(loss: Any, term: torch.Tensor) -> Any:
    if isinstance(loss, torch.Tensor):
        return loss + term
    if hasattr(loss, "total") and hasattr(loss, "weight"):
        return type(loss)(loss.total + term * loss.weight, loss.weight)
    if isinstance(loss, dict):
        total = loss["total"] if "total" in loss else sum(loss.values())
        return {**loss, "z_loss": term.detach(), "total": total + term}
    raise IncompatibleError(f"`ZLoss` cannot be added to a loss of type {type(loss).__name__}")
