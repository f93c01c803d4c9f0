"""Counting and slicing batches: samples, tokens, loss weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import methodcaller
from typing import Any

import torch

from hocket.trainer.errors import DataError

IGNORED_LABEL = -100
"""The label that torch's losses ignore by default."""


_TENSORS = {torch.Tensor}
_rows: Callable[[Any], int] = methodcaller("size", 0)  # the `len` of a tensor takes ten times as long


def num_samples(batch: Any) -> int:
    """Count the samples of a batch: the length that all its tensors and lists share.

    A list counts as `slice_batch` slices it.

    Raises:
        DataError: If the batch has no tensor or list, or their lengths differ.
    """
    kind = type(batch)
    parts = batch if kind is list or kind is tuple else batch.values() if kind is dict else ()
    # Nearly every batch is a few tensors of one length. `map` counts them without a loop of the interpreter.
    if set(map(type, parts)) == _TENSORS:
        try:
            sizes: set[int] = set(map(_rows, parts))
        except IndexError:  # a tensor without dims
            sizes = set()
        if len(sizes) == 1:
            return sizes.pop()
    if isinstance(batch, torch.Tensor):
        return batch.shape[0]
    lengths = set(_lengths(batch))
    if len(lengths) != 1:
        problem = (
            f"its parts have the lengths {_describe_lengths(batch)}"
            if lengths
            else "it holds no tensor and no list"
        )
        raise DataError(
            f"the samples of a batch of type `{type(batch).__name__}` cannot be counted: {problem}; pass "
            "`DataSpec(dataloader=…, get_num_samples_in_batch=…)` as `train_dataloader`"
        )
    return lengths.pop()


def _describe_lengths(batch: Any) -> str:
    """Return the lengths within a batch; those of a mapping with their keys."""
    if not isinstance(batch, Mapping):
        return str(sorted(set(_lengths(batch))))
    entries = ((name, sorted(set(_lengths({name: value})))) for name, value in batch.items())
    return ", ".join(
        f"`{name}` ({', '.join(map(str, lengths)) or 'no samples'})" for name, lengths in entries
    )


def _lengths(part: Any) -> Iterable[int]:
    if isinstance(part, torch.Tensor):
        if part.dim() > 0:
            yield part.shape[0]
    elif isinstance(part, Mapping):
        for value in part.values():
            if _is_one_item_per_sample(value):
                yield len(value)
            else:
                yield from _lengths(value)
    elif isinstance(part, (tuple, list)):
        lengths = [length for item in part for length in _lengths(item)]
        yield from lengths or [len(part)]


def _is_one_item_per_sample(value: Any) -> bool:
    """Return whether a value of a mapping is a list or tuple without tensors in it."""
    return isinstance(value, (tuple, list)) and not hasattr(value, "_fields") and not _has_tensor(value)


def _has_tensor(part: Any) -> bool:
    if isinstance(part, (tuple, list, Mapping)):
        return any(map(_has_tensor, part.values() if isinstance(part, Mapping) else part))
    return isinstance(part, torch.Tensor)


def num_tokens(batch: Any) -> int:
    """Count the tokens of a batch: all positions of its `input_ids`, padding included; 0 without them."""
    ids = _entry(batch, "input_ids")
    return 0 if ids is None else ids.numel()


def _entry(batch: Any, name: str) -> torch.Tensor | None:
    # `isinstance(…, Mapping)` on a list takes longer than all the rest.
    if type(batch) is list or type(batch) is tuple or not isinstance(batch, Mapping):
        return None
    entry = batch.get(name)
    return entry if isinstance(entry, torch.Tensor) else None


def loss_weights(batch: Any) -> Sequence[float] | torch.Tensor | None:
    """Count the labels of each sample that are not ignored, if `labels` has several integers per sample.

    Labels that are already on a device are counted there, without reading them back.

    Returns:
        Host numbers; a float tensor `(samples,)` on the labels' device; or None where each sample weighs 1.
    """
    labels = _entry(batch, "labels")
    if labels is None or labels.dim() < 2 or labels.is_floating_point():
        return None
    weights = (labels != IGNORED_LABEL).flatten(1).sum(1)
    if labels.device.type != "cpu":
        return weights.float()
    numbers: list[float] = weights.tolist()
    return numbers


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Return the samples `start` to `stop - 1` of a batch.

    Tensors are views. A list or tuple has one item per sample, and is sliced itself, if its items hold no
    tensor and no list, or if it is a value of a mapping and holds no tensor. The items of any other list or
    tuple are parts of the batch, and each is sliced. Other objects are passed on whole.
    """
    if isinstance(batch, torch.Tensor):
        return batch[start:stop] if batch.dim() > 0 else batch
    if isinstance(batch, Mapping):
        return {
            name: value[start:stop] if _is_one_item_per_sample(value) else slice_batch(value, start, stop)
            for name, value in batch.items()
        }
    if isinstance(batch, (tuple, list)):
        if not any(True for item in batch for _ in _lengths(item)):
            return batch[start:stop]
        items = (slice_batch(item, start, stop) for item in batch)
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch
