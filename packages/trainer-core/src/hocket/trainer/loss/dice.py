"""The Dice loss of segmentation."""

from __future__ import annotations

from torch import Tensor, nn

from hocket.trainer.checks import check_number
from hocket.trainer.loss.cross_entropy import Reduction, as_dense, is_dense


class DiceLoss(nn.Module):
    """1 minus the soft Dice coefficient, by default averaged over samples and classes.

    Source: Milletari et al., V-Net, 2016, section 3; the squared denominator is its equation 2.

    Args:
        sigmoid: Turn logits into independent probabilities first.
        softmax: Turn logits into probabilities over the classes first.
        squared_pred: Square predictions and targets in the denominator.
        jaccard: Use the Jaccard index (intersection over union) instead.
        batch: Sum over the samples before dividing, so that small objects count by their pixels. The loss of
            a batch is then not a mean over samples, and depends on how the batch is split.
        ignore_absent_classes: Leave out classes that a target does not have.
        smooth: Added to numerator and denominator, so that an empty class does not divide by zero.
        reduction: `"mean"` over samples and classes (those that are present, if absent ones are left out),
            `"sum"`, or `"none"`.

    Raises:
        ValueError: If both `sigmoid` and `softmax` are set, or the reduction is unknown.
    """

    def __init__(
        self,
        *,
        sigmoid: bool = False,
        softmax: bool = False,
        squared_pred: bool = False,
        jaccard: bool = False,
        batch: bool = False,
        ignore_absent_classes: bool = False,
        smooth: float = 1e-5,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        if sigmoid and softmax:
            raise ValueError("`sigmoid` and `softmax` are both set; set the one that fits the logits")
        self.sigmoid = sigmoid
        self.softmax = softmax
        self.squared_pred = squared_pred
        self.jaccard = jaccard
        self.batch = batch
        self.ignore_absent_classes = ignore_absent_classes
        check_number("smooth", smooth, least=0, error=ValueError)
        self.smooth = smooth
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"`reduction` is {reduction!r}; expected `mean`, `sum` or `none`")
        self.reduction = reduction

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss: a scalar, or without reduction `(N, C)`, or `(C,)` of a whole batch.

        Args:
            outputs: Predictions or logits, `(N, C, ...)`.
            targets: Class indices `(N, ...)`, integer, where a position with a negative index does not count;
                or values from 0 to 1 of the shape of `outputs`.
        """
        dense = as_dense(outputs, targets)
        if self.sigmoid:
            outputs = outputs.sigmoid()
        elif self.softmax:
            outputs = outputs.softmax(dim=1)
        if not is_dense(outputs, targets):
            outputs = outputs * (targets >= 0).unsqueeze(1)
        dims = [0, *range(2, outputs.dim())] if self.batch else list(range(2, outputs.dim()))

        def total(values: Tensor) -> Tensor:
            return values.sum(dims) if dims else values

        intersection = total(outputs * dense)
        squared = self.squared_pred
        sizes = total(outputs.square() if squared else outputs) + total(dense.square() if squared else dense)
        if self.jaccard:
            share = (intersection + self.smooth) / (sizes - intersection + self.smooth)
        else:
            share = (2 * intersection + self.smooth) / (sizes + self.smooth)
        losses = 1 - share
        num_losses: Tensor | int = share.numel()
        if self.ignore_absent_classes:
            is_present = (total(dense) > 0).to(share.dtype)
            losses, num_losses = losses * is_present, is_present.sum().clamp(min=1)
        if self.reduction == "none":
            return losses
        return losses.sum() if self.reduction == "sum" else losses.sum() / num_losses
