"""`LossRule`: the denominator of a loss as a weight of each sample, and the search for counted labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.trainer.data.batch_access import get_item
from hocket.trainer.data.batch_tree import Path, leaves
from hocket.trainer.errors import DataError
from hocket.trainer.loss.ignored_label import can_hold, is_counted


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRule:
    """The number that a loss over a batch is divided by, as the sum of a weight of each sample.

    Without labels and elements every sample weighs the same.
    """

    path: Path | None = None
    """Keys and indices of the part of a batch that is counted; None if every sample weighs the same."""
    ignore_index: int | None = None
    """The label that does not count; None if the part's elements count, whatever their values."""
    is_shifted: bool = False
    """Whether the first column of the labels is not predicted, as in models of the next token."""
    class_weights: Tensor | None = None
    """The weight of each class, `(C,)`; None if each label weighs 1."""
    per_element: float = 1.0
    """The weight of an element, where elements count."""
    is_sum: bool = False
    """Whether the loss is a sum over the batch, which is not divided at all."""

    @property
    def key(self) -> tuple[Any, ...]:
        """The values in which two equal rules agree."""
        weights = None if self.class_weights is None else tuple(self.class_weights.tolist())
        return (self.path, self.ignore_index, self.is_shifted, weights, self.per_element, self.is_sum)

    def weigh(self, batch: Any) -> Sequence[float] | Tensor | None:
        """Return the weight of each sample; None where each weighs 1.

        Labels on a device are counted there: the weights are a float tensor `(samples,)` then.

        Args:
            batch: A batch whose samples are the rows of its parts.

        Raises:
            DataError: If the batch lacks the part that is counted.
        """
        if self.path is None:
            return None
        part = batch
        for key in self.path:
            part = get_item(part, key)
        if not isinstance(part, Tensor) or part.dim() == 0:
            raise DataError(
                f"`{key}` is a `{type(part).__name__}`, and was a tensor with a row for each sample"
            )
        if self.ignore_index is None:
            each = part[0].numel() * self.per_element if part.dim() > 1 else self.per_element
            return None if each == 1.0 else [each] * part.shape[0]
        labels: Tensor = part[:, 1:] if self.is_shifted else part
        counted = is_counted(labels, self.ignore_index)
        if self.class_weights is None:
            weights = counted.flatten(1).sum(1) if labels.dim() > 1 else counted
        else:
            of_classes = self.class_weights.to(labels.device)
            weights = of_classes[labels.long().clamp(0, of_classes.shape[0] - 1)] * counted
            weights = weights.flatten(1).sum(1) if labels.dim() > 1 else weights
        if labels.device.type != "cpu":
            return weights.float()
        numbers = [float(number) for number in weights.tolist()]
        return None if labels.dim() == 1 and min(numbers) == 1.0 == max(numbers) else numbers


def find_labels(batch: Any, target: Tensor, ignore_index: int, num_samples: int) -> tuple[Path, bool] | None:
    """Find the part of a batch that a loss counts.

    The loss may have got it flattened, converted, shifted by one position or behind ignored positions. Reads
    the device.

    Args:
        batch: The batch, of `num_samples` samples.
        target: The labels that the loss was given.
        ignore_index: The label that does not count.
        num_samples: The rows of the part.

    Returns:
        The path of the part, and whether its first column is left out; None if there is no such part.
    """
    wanted = target.detach().reshape(-1)
    parts = [
        (path, part.detach().to(wanted.device))
        for path, part in reversed(list(leaves(batch)))
        if isinstance(part, Tensor)
        and part.dim() > 0
        and part.shape[0] == num_samples
        and not part.is_complex()
    ]
    # Inputs may have the same values. Labels have names of their own, or come last.
    parts = sorted(parts, key=lambda part: not _is_name_of_labels(part[0]))
    for path, part in parts:
        if part.data_ptr() == wanted.data_ptr() and part.shape.numel() == wanted.numel():
            return path, False
    for path, part in parts:
        if _is_equal(part, wanted):
            return path, False
        if part.dim() > 1 and (
            _is_equal(part[:, 1:], wanted) or _is_equal(_shifted(part, ignore_index), wanted)
        ):
            return path, True
    # The same labels in another order or with more ignored ones, as those of virtual tokens.
    counted, _ = wanted[is_counted(wanted, ignore_index)].sort()
    for path, part in parts:
        for is_shifted in (False, True) if part.dim() > 1 else (False,):
            labels = (part[:, 1:] if is_shifted else part).reshape(-1)
            if _is_equal(labels[is_counted(labels, ignore_index)].sort()[0], counted):
                return path, is_shifted
    return None


def _shifted(labels: Tensor, ignore_index: int) -> Tensor:
    """Return labels moved to the left by one, with an ignored one at the end."""
    labels = labels if can_hold(labels.dtype, ignore_index) else labels.long()
    return torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], ignore_index)), 1)


def _is_name_of_labels(path: Path) -> bool:
    return any(name in str(key).lower() for key in path[-1:] for name in ("label", "target"))


def _is_equal(part: Tensor, wanted: Tensor) -> bool:
    return part.numel() == wanted.numel() > 0 and bool((part.reshape(-1) == wanted).all())
