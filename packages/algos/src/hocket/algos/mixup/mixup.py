"""MixUp: convex combinations of samples and their targets."""

from typing import TYPE_CHECKING

import torch

from hocket.algos.batches import ItemKey
from hocket.algos.checks import check_fraction, check_number
from hocket.algos.draws import draw_beta, draw_permutation
from hocket.algos.input_mixing import InputMixing, mix_probabilities
from hocket.algos.order import Order

if TYPE_CHECKING:
    from hocket.trainer.state import State


class MixUp(InputMixing):
    """Trains on convex combinations of pairs of samples of a microbatch.

    Args:
        alpha: Parameter of the Beta distribution that the mixing coefficient is drawn from; at least 0.
            Larger values mix more; 0 leaves the samples as they are.
        interpolate_loss: Interpolate the losses of both targets instead of the targets; for a loss that does
            not take probabilities. Costs a second loss.
        input_key: Key of the inputs in the batch: an index, a key, an attribute's name, or a pair of
            functions (getter, setter).
        target_key: Key of the targets.

    Raises:
        AlgorithmConfigError: `alpha` is below 0.

    Example:
        >>> MixUp(alpha=0.2)
        MixUp(alpha=0.2, interpolate_loss=False)

    Source: Zhang et al., mixup: Beyond Empirical Risk Minimization, 2017, section 2.
    """

    order = Order.MIX_UP

    def __init__(
        self,
        alpha: float = 0.2,
        interpolate_loss: bool = False,
        input_key: ItemKey = 0,
        target_key: ItemKey = 1,
    ) -> None:
        super().__init__(alpha, interpolate_loss, input_key, target_key)
        self._mixing = 0.0
        self._indices = torch.empty(0, dtype=torch.long)

    def mix_inputs(self, inputs: torch.Tensor) -> torch.Tensor:
        """Mix each sample with a drawn partner, all with one drawn coefficient."""
        self._mixing = _draw_mixing(self.alpha)
        self._indices = draw_permutation(inputs.shape[0], inputs.device)
        return torch.lerp(inputs, inputs[self._indices], self._mixing)

    def mix_targets(self, target: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Mix targets with the coefficient of the inputs."""
        return mix_probabilities(target, logits, self._indices, self._mixing)

    def mix_losses(self, loss: torch.Tensor, target: torch.Tensor, state: "State") -> torch.Tensor:
        """Mix the losses of both targets with the coefficient of the inputs."""
        return (1 - self._mixing) * loss + self._mixing * self.loss_with(target[self._indices], state)

    def __repr__(self) -> str:
        return f"MixUp(alpha={self.alpha!r}, interpolate_loss={self.interpolate_loss!r})"


def mixup_batch(
    input: torch.Tensor,  # noqa: A002 - Composer's name
    target: torch.Tensor,
    mixing: float | None = None,
    alpha: float = 0.2,
    indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Mix each sample with another one: `(1 - mixing) * input + mixing * input[indices]`.

    Needs no trainer. The loss to train with is the same combination of the losses for `target` and for the
    permuted target.

    Args:
        input: `(B, ...)` float.
        target: `(B, ...)`.
        mixing: 0 to 1; by default drawn from Beta(alpha, alpha) and folded to at most 0.5.
        alpha: At least 0; with 0, `mixing` is 0.
        indices: `(B,)` long, the partner of each sample; by default a drawn permutation.

    Returns:
        The mixed input, the permuted target, and the mixing coefficient.

    Raises:
        AlgorithmConfigError: `alpha` or `mixing` is out of range.

    Source: Zhang et al., mixup: Beyond Empirical Risk Minimization, 2017, section 2.
    """
    check_number("alpha", alpha, least=0)
    if mixing is None:
        mixing = _draw_mixing(alpha)
    check_fraction("mixing", mixing)
    if indices is None:
        indices = draw_permutation(input.shape[0], input.device)
    return torch.lerp(input, input[indices], mixing), target[indices], mixing


def _draw_mixing(alpha: float) -> float:
    # Folded: a partner's share of 0.8 is the partner mixed with a share of 0.2.
    drawn = draw_beta(alpha)
    return min(drawn, 1.0 - drawn)
