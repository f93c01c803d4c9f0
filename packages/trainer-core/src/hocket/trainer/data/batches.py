"""Counting and slicing batches: samples, tokens, loss weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from operator import methodcaller
from typing import Any

import torch

from hocket.trainer.data.batch_tree import field_values, leaves, rebuilt
from hocket.trainer.errors import DataError
from hocket.trainer.loss.ignored_label import is_counted

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
    problem = _problem_of_samples(batch)
    lengths = set(_lengths(batch))
    if len(lengths) == 1 and problem is None:
        return lengths.pop()
    if problem is None:
        problem = (
            f"its parts have the lengths {_describe_lengths(batch)}"
            if lengths
            else "it holds no tensor and no list"
        )
    raise DataError(
        f"the samples of a batch of type `{type(batch).__name__}` cannot be counted: {problem}; pass "
        "`DataSpec(dataloader=…, get_num_samples_in_batch=…)` as `train_dataloader`, with `split_batch=…` if "
        "not every part has a row for each sample and there are microbatches"
    )


def _problem_of_samples(batch: Any) -> str | None:
    """Return why the rows of a list's items are no samples: because the items themselves may be samples."""
    if type(batch) not in (list, tuple) or len(batch) < 2 or not all(map(_is_record, batch)):
        return None
    # The first and the second member of pairs, as contrastive losses take them.
    is_pair = len(batch) == 2 and not any(map(_has_scalar, batch))
    kinds = {(type(one), tuple(one) if isinstance(one, Mapping) else len(one)) for one in batch}
    if len(kinds) > 1 or not _has_tensor(batch) or len(batch) in set(_lengths(batch)):
        return None
    return (
        None
        if is_pair
        else f"its {len(batch)} items of one kind may be samples, or parts that hold all samples"
    )


def _is_record(item: Any) -> bool:
    return isinstance(item, (Mapping, tuple, list))


def _has_scalar(item: Any) -> bool:
    values = item.values() if isinstance(item, Mapping) else item
    return any(not _is_record(one) and not getattr(one, "shape", None) for one in values)


def _describe_lengths(batch: Any) -> str:
    """Return the lengths within a batch; those of a mapping with their keys."""
    if not isinstance(batch, Mapping):
        return str(sorted(set(_lengths(batch))))
    entries = ((name, sorted(set(_lengths({name: value})))) for name, value in batch.items())
    return ", ".join(
        f"`{name}` ({', '.join(map(str, lengths)) or 'no samples'})" for name, lengths in entries
    )


def _lengths(part: Any) -> Iterable[int]:
    if getattr(part, "shape", None) is not None:
        if len(part.shape):
            yield part.shape[0]
    elif (values := field_values(part)) is not None:
        yield from _lengths(values)
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
    return any(getattr(leaf, "shape", None) is not None for _, leaf in leaves(part, into_objects=False))


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
    weights = is_counted(labels, IGNORED_LABEL).flatten(1).sum(1)
    if labels.device.type != "cpu":
        return weights.float()
    numbers: list[float] = weights.tolist()
    return numbers


def slice_batch(batch: Any, start: int, stop: int, *, num_samples: int | None = None) -> Any:
    """Return the samples `start` to `stop - 1` of a batch.

    Tensors and arrays are sliced as views; those without dims, numbers, texts and None belong to all samples.
    A list or tuple with an item for each sample is sliced itself, and so is a list without tensors that is
    the value of a mapping. The items of any other list or tuple, the values of a mapping and the fields of a
    dataclass are parts of the batch, and each is sliced.

    Args:
        batch: The batch.
        start: The first sample.
        stop: The sample after the last one.
        num_samples: The samples of the batch; by default `num_samples(batch)`.

    Raises:
        DataError: If a part does not have a row for each sample, or may be split in two ways.
    """
    total = _num_samples(batch) if num_samples is None else num_samples
    if (start, stop) == (0, total):
        return batch
    return _BatchSlicer(start, stop, total).cut(batch, "")


class _BatchSlicer:
    """Takes some samples of a batch of `total` samples."""

    def __init__(self, start: int, stop: int, total: int) -> None:
        self._rows = slice(start, stop)
        self._total = total

    def cut(self, part: Any, path: str, *, are_items_samples: bool = False, is_named: bool = False) -> Any:
        """Return the samples of a part.

        Args:
            part: The part.
            path: Its place in the batch, for messages.
            are_items_samples: Whether a list beside it has an item for each sample.
            is_named: Whether it is the value of a mapping or a field of a dataclass.
        """
        if isinstance(part, Mapping):
            parts = {key: self._cut_value(value, f"{path}[{key!r}]") for key, value in part.items()}
            return rebuilt(part, parts)
        if isinstance(part, (tuple, list)):
            # A list inside the batch may be a column of tensors of any length, which all have that of the
            # batch by chance. Two without a name are rather the views of a contrastive loss.
            is_column = is_named or (bool(path) and self._total > 2)
            if self._are_samples(part, path, are_items_samples=are_items_samples, is_column=is_column):
                return part[self._rows]
            beside = any(self._are_plainly_samples(one) for one in part)
            return rebuilt(
                part, [self.cut(one, f"{path}[{i}]", are_items_samples=beside) for i, one in enumerate(part)]
            )
        if isinstance(part, torch.Tensor) and part.is_nested:
            raise _refusal(f"{_named(path)}, a nested tensor, cannot be sliced")
        if getattr(part, "shape", None) is not None:
            return self._cut_rows(part, path)
        if (values := field_values(part)) is not None:
            return replace(
                part, **{name: self._cut_value(one, f"{path}.{name}") for name, one in values.items()}
            )
        is_series = isinstance(part, (Sequence, Iterator)) and not isinstance(part, (str, bytes, bytearray))
        if is_series or hasattr(part, "to") or _has_tensor(getattr(part, "__dict__", {})):
            raise _refusal(f"{_named(path)}, a `{type(part).__name__}`, cannot be split")
        return part

    def _cut_value(self, value: Any, path: str) -> Any:
        """Return the samples of a value with a name, of which a list without tensors has an item for each."""
        if not _is_one_item_per_sample(value):
            return self.cut(value, path, is_named=True)
        if len(value) != self._total:
            raise _refusal(f"{_named(path)} has {len(value)} items, and the batch has {self._total} samples")
        return value[self._rows]

    def _cut_rows(self, part: Any, path: str) -> Any:
        if not len(part.shape):
            return part
        if part.shape[0] != self._total:
            raise _refusal(
                f"{_named(path)} has the shape {list(part.shape)}, and the batch has {self._total} samples"
            )
        try:
            return part[self._rows]
        except (RuntimeError, NotImplementedError, TypeError) as error:
            kind = getattr(part, "layout", type(part).__name__)
            raise _refusal(f"{_named(path)}, of the layout `{kind}`, cannot be sliced") from error

    def _are_samples(self, items: Any, path: str, *, are_items_samples: bool, is_column: bool) -> bool:
        """Return whether a list has an item for each sample; if not, its items are parts of the batch."""
        if hasattr(items, "_fields"):
            return False
        has_one_each, are_parts = len(items) == self._total, self._are_parts(items)
        if has_one_each and are_parts:
            has_records = any(isinstance(one, Mapping) or is_dataclass(one) for one in items)
            if has_records or (is_column and not are_items_samples):
                raise _refusal(
                    f"{_named(path)} has {len(items)} items, each of them with {self._total} rows, and the "
                    f"batch has {self._total} samples: either may be the samples"
                )
            return are_items_samples
        if not has_one_each and not are_parts:
            lengths = sorted({length for one in items for length in _lengths(one)}) or [len(items)]
            raise _refusal(
                f"{_named(path)} has {len(items)} items, with rows of the lengths {lengths}, and the batch "
                f"has {self._total} samples"
            )
        return has_one_each

    def _are_plainly_samples(self, items: Any) -> bool:
        is_list = isinstance(items, (tuple, list)) and not hasattr(items, "_fields")
        return is_list and len(items) == self._total and not self._are_parts(items)

    def _are_parts(self, items: Iterable[Any]) -> bool:
        """Return whether each of the items has a row for each sample, or belongs to all samples."""
        fits = {self._fits(one) for one in items}
        return True in fits and False not in fits

    def _fits(self, part: Any) -> bool | None:
        """Return whether a part has a row or an item for each sample; None if it belongs to all samples."""
        if getattr(part, "shape", None) is not None:
            return part.shape[0] == self._total if len(part.shape) else None
        if (values := field_values(part)) is not None:
            part = values
        if isinstance(part, Mapping):
            return self._are_parts(part.values()) or (None if not list(_lengths(part)) else False)
        if isinstance(part, (tuple, list)):
            return (len(part) == self._total and not hasattr(part, "_fields")) or self._are_parts(part)
        return None


def _named(path: str) -> str:
    return f"`batch{path}`" if path else "the batch"


def _refusal(problem: str) -> DataError:
    return DataError(
        f"the samples of a batch cannot be divided: {problem}; pass `DataSpec(dataloader=…, split_batch=…)`, "
        "where `split_batch(batch, start, stop)` returns these samples, or leave microbatches out"
    )


_num_samples = num_samples
