"""The interface that the trainer expects of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from torchmetrics import Metric


@dataclass(frozen=True, slots=True)
class LossSum:
    """A loss as a sum and the weight to divide it by, so that means over any split of a batch are exact.

    A model whose loss is a mean over a varying number of items (such as tokens that are not padding) returns
    this, and the trainer divides the sum over microbatches and ranks by the sum of the weights.

    Attributes:
        total: The sum of the losses of all items, a scalar with gradients.
        weight: The number of items, such as samples or tokens: a number or a scalar tensor without gradients.
    """

    total: Tensor
    weight: Tensor | float


class ComposerModel(nn.Module, ABC):
    """A model that takes whole batches and computes its own loss.

    The trainer takes any `nn.Module` with these methods; this class declares them and has defaults for the
    optional ones.
    """

    @abstractmethod
    def forward(self, batch: Any) -> Any:
        """Compute the outputs of a batch (or microbatch), as the data loader gives it."""

    @abstractmethod
    def loss(self, outputs: Any, batch: Any) -> Tensor | LossSum:
        """Compute the loss.

        Args:
            outputs: The outputs of `forward`.
            batch: The batch that `forward` was given.

        Returns:
            The mean over the samples, a scalar; or a `LossSum` for a mean over something else.
        """

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """Compute the outputs that metrics are updated with; by default those of `forward`.

        Args:
            batch: The batch, as `forward` takes it.
            outputs: The outputs of `forward` for this batch, if it ran.
        """
        return self(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """Return the metrics by name, for training or for evaluation; none by default."""
        return {}

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        """Add a batch to a metric.

        Args:
            batch: The batch that `eval_forward` was given.
            outputs: The outputs of `eval_forward`.
            metric: A metric of `get_metrics`.
        """
        raise NotImplementedError(
            f"`{type(self).__name__}` has metrics but no `update_metric`; "
            "define `update_metric(batch, outputs, metric)`"
        )
