"""Comparison of two checkpoints of any formats, tensor by tensor."""

import fnmatch
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hocket.ckpt.document.boxes import pieces, whole
from hocket.ckpt.document.dtypes import ITEM_BYTES
from hocket.ckpt.document.planning import Box
from hocket.ckpt.document.records import TensorRecord, ValueRecord
from hocket.ckpt.document.tree import join, renamed
from hocket.ckpt.document.values import encode_value
from hocket.ckpt.errors import CheckpointIncompatibleError, CheckpointNotFoundError
from hocket.ckpt.globs import check_globs, taken, unmatched, unmatched_prefix
from hocket.ckpt.read.opener import open as open_checkpoint
from hocket.ckpt.read.reader import Checkpoint
from hocket.ckpt.uris import local_path

__all__ = ["Difference", "TensorDifference", "diff"]

_MEMORY_BYTES = 256 << 20
_COPIES = 12
"""Peak bytes in memory per byte of a piece: both pieces, their widened copies, and the differences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """A tensor that differs between two checkpoints."""

    name: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    num_items: int = 0
    """Number of differing items; 0 if the shapes differ, or if only the dtype does."""
    largest_absolute: float = 0.0
    """Largest |a - b|; infinite if exactly one item is not finite, or if infinities have opposite signs."""
    largest_relative: float = 0.0
    """Largest |a - b| / max(|a|, |b|)."""

    @property
    def kind(self) -> Literal["shape", "dtype", "values"]:
        """The first of shape, dtype and values that differs."""
        if self.shapes[0] != self.shapes[1]:
            return "shape"
        return "dtype" if self.dtypes[0] != self.dtypes[1] else "values"


@dataclass(kw_only=True, slots=True)
class Difference:
    """The differences between two checkpoints."""

    a: str
    b: str
    formats: tuple[str, str]
    only_a: list[str] = field(default_factory=list)
    """Names of tensors and values that only `a` has."""
    only_b: list[str] = field(default_factory=list)
    tensors: list[TensorDifference] = field(default_factory=list)
    values: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Names of differing values; between Hocket checkpoints also `(step)`, `(user)` and `(per rank)`."""
    num_equal: int = 0
    """Number of tensors that are equal bit for bit, or as numbers."""
    num_bytes: int = 0
    """Bytes of `a` that were compared."""

    @property
    def is_empty(self) -> bool:
        """Whether there are no differences."""
        return not (self.only_a or self.only_b or self.tensors or self.values)


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    memory_bytes: int = _MEMORY_BYTES,
    on_progress: Callable[[int, int], None] | None = None,
) -> Difference:
    """Compare two checkpoints: names, shapes, dtypes, every item, and the values that are not tensors.

    Step, `user` and per-rank values are compared if both are Hocket checkpoints; other formats do not have
    them. Items are compared as numbers, so that a tensor that was cast without loss differs only in dtype.
    Two NaNs are equal. Tensors are read in pieces.

    Args:
        a: A checkpoint, as for `open`.
        b: A checkpoint, as for `open`.
        include: Globs of names to compare; if empty, all names.
        exclude: Globs of names to leave out.
        rename: Prefixes of names of `a` to replace first, as for `convert`; globs match the new names.
        memory_bytes: Memory limit for tensor data.
        on_progress: Called with the bytes of `a` compared so far, and their total.

    Raises:
        CheckpointIncompatibleError: Two names become equal by `rename`.
        CheckpointNotFoundError: A glob of `include` matches nothing in `a` and `b`, or no name of `a` begins
            with a prefix of `rename`.
        CheckpointError: A checkpoint cannot be opened or read; see `open` and `Checkpoint.read`.
        ValueError: An argument is a single string where a list is meant.
    """
    check_globs(include=include, exclude=exclude)
    a, b = local_path(a), local_path(b)
    first, second = open_checkpoint(a, follow=False), open_checkpoint(b, follow=False)
    difference = Difference(a=a, b=b, formats=(first.format, second.format))
    selection = _Selection(first, second, include=include, exclude=exclude, rename=rename or {})
    names = _compare_keys(selection, difference)
    total = sum(first.record(selection.own_name(name)).num_bytes for name in names)
    first.locate(map(selection.own_name, names))
    second.locate(names)
    limit = max(1 << 16, memory_bytes // _COPIES)
    tallies = {name: _Tally() for name in names}
    for batch in _batches(selection, names, limit):
        own = [(selection.own_name(name), box) for name, box in batch]
        for (name, _), left, right in zip(batch, first.read(own), second.read(batch), strict=True):
            tallies[name].add(left, right)
            difference.num_bytes += left.nbytes
        if on_progress is not None:
            on_progress(difference.num_bytes, total)
    for name, tally in tallies.items():
        _judge(first.record(selection.own_name(name)), second.record(name), name, tally, difference)
    return difference


class _Selection:
    """The leaves of two checkpoints that are compared, those of the first under their new names."""

    def __init__(
        self,
        first: Checkpoint,
        second: Checkpoint,
        *,
        include: Sequence[str],
        exclude: Sequence[str],
        rename: Mapping[str, str],
    ) -> None:
        self.first, self.second = first, second
        a, b = first.contents, second.contents
        self._own_names = _own_names(first, rename)
        known = {*self._own_names, *b.tensors, *b.values, *a.attached, *b.attached}
        for glob in include:
            if not fnmatch.filter(known, glob):
                raise CheckpointNotFoundError(f"`{first.uri}`, `{second.uri}`: {unmatched(glob, known)}")
        compared = set(taken(known, include=include, exclude=exclude))
        own = {new: old for new, old in self._own_names.items() if new in compared}
        self.tensors_a = {new: a.tensors[old] for new, old in own.items() if old in a.tensors}
        self.values_a = {new: a.values[old] for new, old in own.items() if old in a.values}
        self.tensors_b = {name: record for name, record in b.tensors.items() if name in compared}
        self.values_b = {name: record for name, record in b.values.items() if name in compared}
        self.attached = [name for name in a.attached if name in b.attached and name in compared]

    def own_name(self, name: str) -> str:
        """Return the name that a leaf of the first checkpoint has there."""
        return self._own_names[name]


def _own_names(checkpoint: Checkpoint, rename: Mapping[str, str]) -> dict[str, str]:
    """Return the names of a checkpoint's leaves by their new names."""
    contents = checkpoint.contents
    leaves: dict[str, TensorRecord | ValueRecord] = {**contents.tensors, **contents.values}
    if (problem := unmatched_prefix(rename, leaves)) is not None:
        raise CheckpointNotFoundError(f"`{checkpoint.uri}`: {problem}")
    names: dict[str, str] = {}
    for name, record in leaves.items():
        new = join(renamed(record.path, rename)) if rename else name
        if new in names:
            raise CheckpointIncompatibleError(
                f"`{checkpoint.uri}`: `{names[new]}` and `{name}` both become `{new}`. "
                "Choose another new name"
            )
        names[new] = name
    return names


def _batches(selection: _Selection, names: Iterable[str], limit: int) -> Iterator[list[tuple[str, Box]]]:
    """Yield batches of boxes of the tensors with equal shapes; small boxes share a batch to save reads."""
    batch: list[tuple[str, Box]] = []
    size = 0
    for name in names:
        a, b = selection.first.record(selection.own_name(name)), selection.second.record(name)
        if a.shape != b.shape:
            continue
        item_bytes = max(8, ITEM_BYTES[a.dtype], ITEM_BYTES[b.dtype])
        for box in pieces(whole(a.shape), item_bytes, limit):
            num_bytes = item_bytes * math.prod(box.size)
            if batch and size + num_bytes > limit:
                yield batch
                batch, size = [], 0
            batch.append((name, box))
            size += num_bytes
    if batch:
        yield batch


def _compare_keys(selection: _Selection, difference: Difference) -> list[str]:
    """Record names that only one side has and values that differ; return the names of common tensors."""
    tensors_a, tensors_b = selection.tensors_a, selection.tensors_b
    values_a, values_b = selection.values_a, selection.values_b
    difference.only_a = [name for name in tensors_a if name not in tensors_b]
    difference.only_a += [name for name in values_a if name not in values_b]
    difference.only_b = [name for name in tensors_b if name not in tensors_a]
    difference.only_b += [name for name in values_b if name not in values_a]
    pairs = {name: (values_a[name].value, values_b[name].value) for name in values_a if name in values_b}
    attached_a, attached_b = selection.first.contents.attached, selection.second.contents.attached
    pairs |= {name: (attached_a[name], attached_b[name]) for name in selection.attached}
    difference.values = {
        name: pair for name, pair in pairs.items() if _canonical(pair[0]) != _canonical(pair[1])
    }
    return [name for name in tensors_a if name in tensors_b]


def _canonical(value: Any) -> str:
    return json.dumps(encode_value(value), sort_keys=True)


def _judge(a: TensorRecord, b: TensorRecord, name: str, tally: "_Tally", difference: Difference) -> None:
    if a.shape == b.shape and a.dtype == b.dtype and not tally.num_items:
        difference.num_equal += 1
        return
    difference.tensors.append(
        TensorDifference(
            name=name,
            dtypes=(a.dtype, b.dtype),
            shapes=(a.shape, b.shape),
            num_items=tally.num_items,
            largest_absolute=tally.largest_absolute,
            largest_relative=tally.largest_relative,
        )
    )


class _Tally:
    """The largest differences so far."""

    def __init__(self) -> None:
        self.num_items = 0
        self.largest_absolute = 0.0
        self.largest_relative = 0.0

    def add(self, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> None:
        a, b = a.reshape(-1), b.reshape(-1)
        if a.dtype == b.dtype:
            same_bits = a.view(np.uint8) == b.view(np.uint8)
            if same_bits.all():
                return
        a, b = _widened(a), _widened(b)
        with np.errstate(invalid="ignore", over="ignore"):
            is_same = (a == b) | ((a != a) & (b != b))
            if is_same.all():
                return
            differing_a, differing_b = a[~is_same], b[~is_same]
            self.num_items += differing_a.size
            gap = np.abs(_difference(differing_a, differing_b))
            scale = np.maximum(_magnitude(differing_a), _magnitude(differing_b))
            relative = gap / np.where(scale == 0, 1, scale)
        self.largest_absolute = max(self.largest_absolute, _largest(gap))
        self.largest_relative = max(self.largest_relative, _largest(relative))


def _widened(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the items in a dtype that represents them exactly and that NumPy can compute with."""
    if array.dtype.kind in "iu":
        return array
    if array.dtype.kind == "b":
        return array.astype(np.int8)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _difference(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if a.dtype.kind in "iu" and b.dtype.kind in "iu":
        # For integers, larger minus smaller always fits in 64 unsigned bits.
        low, high = np.minimum(a, b), np.maximum(a, b)
        if low.dtype.kind in "iu":
            distance: npt.NDArray[Any] = high.astype(np.uint64) - low.astype(np.uint64)
            return distance.astype(np.float64)
    gap: npt.NDArray[Any] = a.astype(np.result_type(a, np.float64)) - b
    return gap


def _magnitude(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    size: npt.NDArray[Any] = np.abs(array.astype(np.complex128 if array.dtype.kind == "c" else np.float64))
    return size


def _largest(numbers: npt.NDArray[Any]) -> float:
    """Return the largest number; NaN (of infinities, or of NaN against a number) counts as infinite."""
    return float(np.where(np.isnan(numbers), np.inf, numbers).max())
