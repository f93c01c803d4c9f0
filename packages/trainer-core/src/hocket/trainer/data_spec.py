"""`DataSpec`: a data loader, and how to count and split what it yields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hocket.trainer.errors import DataError

IGNORED_LABEL = -100
"""The label that torch's losses ignore by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """A data loader with functions for batches that the trainer cannot count or split by itself.

    The functions get a batch as the loader yields it, on the host, except `split_batch`, which gets it on the
    device; none of them should read a device.
    """

    dataloader: Iterable[Any]
    """Yields this rank's batches."""
    get_num_samples_in_batch: Callable[[Any], int] | None = None
    """Samples in a batch; by default the length of the first dimension, the same in all its tensors."""
    get_num_tokens_in_batch: Callable[[Any], int] | None = None
    """Tokens in a batch; by default rows × columns of `input_ids`, or 0."""
    get_loss_weights: Callable[[Any], Sequence[float]] | None = None
    """How much each sample weighs in the loss; by default how many of its `labels` are not ignored where they
    are a sequence for each sample, else 1."""
    split_batch: Callable[[Any, int, int], Any] | None = None
    """`(batch, start, stop) -> samples start … stop - 1`; by default a slice of everything in the batch."""

    def num_samples(self, batch: Any) -> int:
        """Samples in `batch`."""
        return (self.get_num_samples_in_batch or num_samples)(batch)

    def num_tokens(self, batch: Any) -> int:
        """Tokens in `batch`."""
        return (self.get_num_tokens_in_batch or num_tokens)(batch)

    def loss_weights(self, batch: Any) -> Sequence[float] | None:
        """The samples' weights in the loss; None where each weighs 1."""
        return (self.get_loss_weights or loss_weights)(batch)

    def split(self, batch: Any, start: int, stop: int) -> Any:
        """The samples `start` to `stop - 1` of `batch`."""
        return (self.split_batch or slice_batch)(batch, start, stop)


def as_data_spec(given: Any) -> DataSpec:
    """Make a `DataSpec` of a data loader, a dict of its arguments, or itself."""
    if isinstance(given, DataSpec):
        return given
    if isinstance(given, Mapping):
        return DataSpec(**given)
    return DataSpec(dataloader=given)


def num_samples(batch: Any) -> int:
    """Count the samples of a batch: the length that all its tensors and lists share.

    Raises:
        DataError: If there is none, or lengths differ.
    """
    if isinstance(batch, torch.Tensor):
        return batch.shape[0]
    parts = batch.values() if type(batch) is dict else batch if type(batch) in (list, tuple) else ()
    lengths = {len(part) if type(part) is torch.Tensor and part.dim() else -1 for part in parts}
    if len(lengths) == 1 and -1 not in lengths:  # nearly every batch, counted in a microsecond
        return lengths.pop()
    lengths = set(_lengths(batch))
    if len(lengths) != 1:
        what = (
            f"its parts have the lengths {sorted(lengths)}" if lengths else "it holds no tensor and no list"
        )
        raise DataError(
            f"the samples of a batch of type `{type(batch).__name__}` cannot be counted: {what}; pass "
            "`DataSpec(dataloader=…, get_num_samples_in_batch=…)` as `train_dataloader`"
        )
    return lengths.pop()


def _lengths(part: Any) -> Iterable[int]:
    if isinstance(part, torch.Tensor):
        if part.dim() > 0:
            yield part.shape[0]
    elif isinstance(part, Mapping):
        for value in part.values():
            yield from _lengths(value)
    elif isinstance(part, (tuple, list)):
        if any(isinstance(item, (torch.Tensor, Mapping, tuple, list)) for item in part):
            for item in part:
                yield from _lengths(item)
        else:
            yield len(part)


def num_tokens(batch: Any) -> int:
    """Count the tokens of a batch: all positions of its `input_ids`, padding too, or 0 where it has none."""
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        if isinstance(ids, torch.Tensor):
            return ids.numel()
    return 0


def loss_weights(batch: Any) -> Sequence[float] | None:
    """How many `labels` of each sample are not ignored, where they are integers and several for each sample.

    Labels that are on a device already are not read, since that would wait for it: each sample weighs 1.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if (
        not isinstance(labels, torch.Tensor)
        or labels.dim() < 2
        or labels.is_floating_point()
        or labels.device.type != "cpu"
    ):
        return None
    weights: list[float] = (labels != IGNORED_LABEL).flatten(1).sum(1).tolist()
    return weights


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """The samples `start` to `stop - 1` of a batch; what is no tensor, list or mapping goes along whole.

    Tensors are views. A list or tuple of tensors (or of mappings and lists) is sliced inside; one of anything
    else is itself a list with an item for each sample.
    """
    if isinstance(batch, torch.Tensor):
        return batch[start:stop] if batch.dim() > 0 else batch
    if isinstance(batch, Mapping):
        return {name: slice_batch(value, start, stop) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        if not any(isinstance(item, (torch.Tensor, Mapping, tuple, list)) for item in batch):
            return batch[start:stop]
        items = (slice_batch(item, start, stop) for item in batch)
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch
