"""A reader of the linear combination of several checkpoints."""

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hocket.ckpt.document.boxes import pieces, whole
from hocket.ckpt.document.dtypes import FLOATS, ITEM_BYTES, numpy_dtype
from hocket.ckpt.document.planning import Box
from hocket.ckpt.document.records import TensorRecord
from hocket.ckpt.read.reader import Checkpoint

__all__ = ["MergedCheckpoint", "SlerpWeights", "sum_dtype"]

_BLOCK_ITEMS = 1 << 16
"""Items that are combined at a time: three blocks of 8 bytes per item stay in a core's cache."""
_PARALLEL = 0.9995
"""Cosine from which two tensors count as parallel."""


class MergedCheckpoint:
    """Checkpoints with equal names and shapes, read as one whose tensors are a sum with weights.

    Floating-point and complex tensors are combined; all others, and those in `copied`, are read from the last
    checkpoint. Thread-safe.

    Args:
        sources: The checkpoints.
        weights: Returns the weights of a tensor, one for each source.
        copied: Names of tensors that are read from the last source.
    """

    def __init__(
        self,
        sources: Sequence[Checkpoint],
        weights: Callable[[str], Sequence[float]],
        *,
        copied: frozenset[str] = frozenset(),
    ) -> None:
        self._sources = sources
        self._weights = weights
        self._copied = copied
        self._of_thread = threading.local()

    @property
    def identifies_data(self) -> bool:
        """Whether equal identities mean equal data, in all sources."""
        return all(source.identifies_data for source in self._sources)

    @property
    def is_sequential(self) -> bool:
        """Whether a source is read in one pass."""
        return any(source.is_sequential for source in self._sources)

    def identity(self) -> list[str]:
        """Return the strings that identify what is read, of each source in turn."""
        return [part for source in self._sources for part in source.identity()]

    def locate(self, names: Iterable[str]) -> None:
        """Prepare the reads of tensors in all sources."""
        listed = list(names)
        for source in self._sources:
            source.locate(listed)

    def is_combined(self, name: str) -> bool:
        """Return whether a tensor is a sum, and not one of the last source."""
        return name not in self._copied and sum_dtype(self._sources[-1].record(name).dtype) is not None

    def record(self, name: str) -> TensorRecord:
        """Return the record of a tensor, with the dtype in which its sum is given: at least `F32`."""
        record = self._sources[-1].record(name)
        if not self.is_combined(name):
            return record
        wide = sum_dtype(record.dtype)
        assert wide is not None, "only floats are combined"
        if any(sum_dtype(source.record(name).dtype) == "F64" for source in self._sources):
            wide = "F64"
        return dataclasses.replace(record, dtype=wide)

    def read(
        self, wanted: Sequence[tuple[str, Box]], into: Sequence[npt.NDArray[Any]]
    ) -> list[npt.NDArray[Any]]:
        """Read boxes of tensors into arrays of their sizes and of `record`'s dtypes, in C order."""
        combined: list[tuple[tuple[str, Box], npt.NDArray[Any]]] = []
        copied: list[tuple[tuple[str, Box], npt.NDArray[Any]]] = []
        for part, array in zip(wanted, into, strict=True):
            (combined if self.is_combined(part[0]) else copied).append((part, array))
        if copied:
            self._sources[-1].read([part for part, _ in copied], into=[array for _, array in copied])
        if combined:
            parts = [part for part, _ in combined]
            read = [
                source.read(parts, into=self._buffers(number, source, parts))
                for number, source in enumerate(self._sources)
            ]
            for number, ((name, _), total) in enumerate(combined):
                _combine([arrays[number] for arrays in read], self._weights(name), total)
        return list(into)

    def _buffers(
        self, number: int, source: Checkpoint, parts: Sequence[tuple[str, Box]]
    ) -> list[npt.NDArray[Any]]:
        """Return arrays for parts of a source in memory that the thread's next read takes again.

        Memory of its own for each read would be mapped, cleared and given back page by page.
        """
        arrays = [(box, numpy_dtype(source.record(name).dtype)) for name, box in parts]
        sizes = [box.num_items * dtype.itemsize for box, dtype in arrays]
        starts = [0, *itertools.accumulate(-(-size // 64) * 64 for size in sizes)]
        buffers: dict[int, npt.NDArray[np.uint8]] = self._of_thread.__dict__.setdefault("buffers", {})
        if number not in buffers or buffers[number].size < starts[-1]:
            buffers[number] = np.empty(starts[-1], np.uint8)
        return [
            buffers[number][start : start + size].view(dtype).reshape(box.size)
            for start, size, (box, dtype) in zip(starts, sizes, arrays, strict=False)
        ]


def sum_dtype(dtype: str) -> str | None:
    """Return the dtype that holds a sum of tensors of a dtype before it is rounded; None for integers."""
    if dtype in FLOATS:
        return "F64" if ITEM_BYTES[dtype] == 8 else "F32"
    return dtype if numpy_dtype(dtype).kind == "c" else None


def _combine(arrays: Sequence[npt.NDArray[Any]], weights: Sequence[float], total: npt.NDArray[Any]) -> None:
    """Write the sum of arrays with weights into `total`, in blocks.

    The sum of items of 16 bits and less is made in 32 bits, that of others in 64 bits, and rounded once.
    """
    is_narrow = all(array.dtype.itemsize <= 2 for array in arrays)
    dtype: npt.DTypeLike = np.float32 if is_narrow else np.float64
    if total.dtype.kind == "c":
        dtype = np.complex128
    flat = [array.reshape(-1) for array in arrays]
    target = total.reshape(-1)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, target.size, _BLOCK_ITEMS):
            block = slice(start, start + _BLOCK_ITEMS)
            tally = flat[0][block].astype(dtype)
            tally *= weights[0]
            for array, weight in zip(flat[1:], weights[1:], strict=True):
                term = array[block].astype(dtype)
                term *= weight
                tally += term
            target[block] = tally


class SlerpWeights:
    """The weights of spherical interpolation between two checkpoints, tensor by tensor.

    With the angle Ω between two tensors as vectors, the weights are sin((1 - t)Ω) / sin Ω and sin(tΩ) / sin Ω
    (Shoemake, "Animating rotation with quaternion curves", 1985); 1 - t and t where the vectors are parallel
    or zero. A tensor is read once more for its angle.

    Args:
        sources: The two checkpoints.
        t: The share of the second one, from 0 to 1.
        piece_bytes: Largest piece that is read at a time.
    """

    def __init__(self, sources: Sequence[Checkpoint], t: float, piece_bytes: int) -> None:
        self._sources = sources
        self._t = t
        self._piece_bytes = piece_bytes
        self._known: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def __call__(self, name: str) -> tuple[float, float]:
        """Return the weights of a tensor."""
        with self._lock:  # the pieces of one tensor are read by several threads
            if name not in self._known:
                self._known[name] = self._measure(name)
            return self._known[name]

    def _measure(self, name: str) -> tuple[float, float]:
        product = first_square = second_square = 0.0
        first_source, second_source = self._sources
        for box in pieces(whole(first_source.record(name).shape), 16, self._piece_bytes):
            first = _as_numbers(first_source.part(name, box))
            second = _as_numbers(second_source.part(name, box))
            product += float(np.vdot(first, second).real)
            first_square += float(np.vdot(first, first).real)
            second_square += float(np.vdot(second, second).real)
        scale = math.sqrt(first_square) * math.sqrt(second_square)
        cosine = product / scale if scale > 0 else 1.0
        # The angle of nearly parallel vectors is lost in rounding, and their chord is their arc.
        if not abs(cosine) < _PARALLEL:
            return 1 - self._t, self._t
        angle = math.acos(cosine)
        return (
            math.sin((1 - self._t) * angle) / math.sin(angle),
            math.sin(self._t * angle) / math.sin(angle),
        )


def _as_numbers(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array.reshape(-1).astype(np.complex128 if array.dtype.kind == "c" else np.float64)
