"""A ready model for classification."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hocket.trainer.models.base import ComposerModel

if TYPE_CHECKING:
    from torchmetrics import Metric


def soft_cross_entropy(
    outputs: Tensor, targets: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy with targets that are class indices, or class probabilities as MixUp makes them.

    Args:
        outputs: Logits, `(N, C)` or `(N, C, ...)`.
        targets: Indices `(N,)` or `(N, ...)`, integer; or probabilities of the shape of `outputs`, floating
            point.
        ignore_index: Positions with this index do not count; has no meaning for probabilities.
        label_smoothing: The share of the target spread over all classes.

    Returns:
        The mean over the positions, a scalar.

    Raises:
        ValueError: If the targets are of neither shape.
    """
    if targets.shape == outputs.shape and targets.is_floating_point():
        return cross_entropy(outputs, targets.to(outputs.dtype), label_smoothing=label_smoothing)
    if targets.shape == outputs.shape[:1] + outputs.shape[2:] and not targets.is_floating_point():
        return cross_entropy(
            outputs, targets.long(), ignore_index=ignore_index, label_smoothing=label_smoothing
        )
    raise ValueError(
        f"`targets` are `{targets.dtype}` of shape {tuple(targets.shape)} for `outputs` of shape "
        f"{tuple(outputs.shape)}; expected integer class indices without dim 1, or probabilities of its shape"
    )


class ComposerClassifier(ComposerModel):
    """Wraps a module that maps inputs to logits; a batch is the pair (inputs, targets).

    Args:
        module: Maps inputs to logits `(N, C)`.
        num_classes: C; for the accuracy in evaluation, which there is none of without it.
        loss_fn: Takes logits and targets, returns the mean loss.
    """

    def __init__(
        self,
        module: nn.Module,
        num_classes: int | None = None,
        *,
        loss_fn: Callable[[Tensor, Tensor], Tensor] = soft_cross_entropy,
    ) -> None:
        super().__init__()
        self.module = module
        self.num_classes = num_classes
        self._loss_fn = loss_fn

    def forward(self, batch: Any) -> Tensor:
        """The logits of the batch's inputs."""
        inputs, _ = batch
        logits: Tensor = self.module(inputs)
        return logits

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """The mean loss of logits against the batch's targets."""
        _, targets = batch
        return self._loss_fn(outputs, targets)

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """The accuracy, in evaluation and where the number of classes is known."""
        if is_train or self.num_classes is None:
            return {}
        # Here, not above: torchmetrics takes a second to import, and a training may never need it.
        from torchmetrics.classification import MulticlassAccuracy

        return {"MulticlassAccuracy": MulticlassAccuracy(num_classes=self.num_classes, average="micro")}

    def update_metric(self, batch: Any, outputs: Tensor, metric: Metric) -> None:
        """Add the batch's logits and targets to a metric."""
        _, targets = batch
        metric.update(outputs, targets)
