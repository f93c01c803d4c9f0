"""Transfer of batches from DataLoader workers to their parent, through reused blocks of shared memory.

A worker writes several small batches into one block of shared memory and sends a message with the locations
of the values. Passing a new block needs a connection between the processes, and each page of new memory
causes a page fault in both of them; together this takes longer than reading a small batch. Each block is
therefore passed once and reused. Its first byte is 1 while the block is in use; the parent clears it when the
last tensor of the message is gone.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from hocket.stream.read.dataset_reader import RankBatch

#: Maximum size and number of batches in one message.
_GROUP_BYTES, _GROUP_BATCHES = 2 << 20, 16

#: Alignment in bytes of values in a block. The first value follows the block's head, which has this size.
_ALIGNMENT = 64


@dataclass(slots=True)
class _PackedValues:
    """The location of a column's values in a block."""

    kind: str
    """`stacked`; or `array`, `bytes` or `str` for values of different sizes."""

    dtype: torch.dtype
    """Dtype of the elements; `uint8` for bytes and text."""

    start: int
    """Offset of the first byte in the block."""

    num_bytes: int

    shapes: list[tuple[int, ...]]
    """Shape of the whole column if it is stacked, else of each array."""

    ends: list[int]
    """End of each value, in elements, if values differ in size."""

    def write(self, sources: list[Any], block: NDArray[np.uint8]) -> None:
        """Write the values, which are arrays or bytes, into `block` one after the other."""
        memory = block[self.start : self.start + self.num_bytes]
        if isinstance(sources[0], np.ndarray):
            np.concatenate([source.reshape(-1) for source in sources], out=memory.view(sources[0].dtype))
            return
        text = memory.data
        for (start, end), source in zip(itertools.pairwise([0, *self.ends]), sources, strict=True):
            text[start:end] = source

    def read(self, block: torch.Tensor) -> torch.Tensor | list[Any]:
        """Return the column; its tensors are views of `block`."""
        memory = block[self.start : self.start + self.num_bytes]
        if self.kind == "stacked":
            return memory.view(self.dtype).view(self.shapes[0])
        pairs = itertools.pairwise([0, *self.ends])
        if self.kind == "array":
            flat = memory.view(self.dtype)
            return [flat[a:b].view(shape) for (a, b), shape in zip(pairs, self.shapes, strict=True)]
        text = memory.numpy().data
        if self.kind == "str":
            return [str(text[a:b], "utf-8") for a, b in pairs]
        return [bytes(text[a:b]) for a, b in pairs]


@dataclass(slots=True)
class _MessageLayout:
    """Several batches of a worker, and the locations of their values in a block."""

    marks: list[tuple[int, int, int]]
    """Number and shares of each batch."""

    ends: list[int]
    """End of each batch in the columns."""

    columns: dict[str, _PackedValues | list[Any]]
    """Columns of all batches; a list contains the values themselves and is pickled."""

    num_bytes: int
    """Length of the part of the block that is used."""


@dataclass(slots=True)
class WorkerMessage:
    """A message with several batches, as a worker sends it. Unpickling returns a `ReceivedBatches`."""

    inbox: int
    """Number of the receiving inbox."""

    worker: int
    """Number of the worker."""

    index: int
    """Number of the block among those of the worker."""

    block: torch.Tensor | None
    """The block; None if the parent already has it."""

    layout: _MessageLayout

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the function that the parent calls on arrival, and its arguments."""
        return _receive, (self.inbox, self.worker, self.index, self.block, self.layout)


class WorkerOutbox:
    """The sending side in a worker, which owns the worker's blocks.

    Args:
        inbox: Number of the parent's inbox.
        worker: Number of the worker.
    """

    def __init__(self, inbox: int, worker: int) -> None:
        self._inbox = inbox
        self._worker = worker
        self._blocks: list[torch.Tensor] = []

    def pack(self, batches: list[RankBatch]) -> WorkerMessage:
        """Write batches whose columns have the same form into a block, and return the message for it."""
        columns: dict[str, _PackedValues | list[Any]] = {}
        pending: list[tuple[_PackedValues, list[Any]]] = []
        end = _ALIGNMENT
        for name, first in batches[0].columns.items():
            parts: list[Any] = [batch.columns[name] for batch in batches]
            values, sources = (
                (_stacked(parts, end), parts)
                if isinstance(first, np.ndarray)
                else _of_different_sizes(list(itertools.chain.from_iterable(parts)), end)
            )
            columns[name] = sources if values is None else values
            if values is not None:
                pending.append((values, sources))
                end = values.start + values.num_bytes
                end += -end % _ALIGNMENT
        index, is_new = self._take(end)
        block = self._blocks[index]
        for values, sources in pending:
            values.write(sources, block.numpy())
        rows = [len(next(iter(batch.columns.values()), ())) for batch in batches]
        marks = [(batch.number, batch.local, batch.total) for batch in batches]
        layout = _MessageLayout(marks, list(itertools.accumulate(rows)), columns, end)
        return WorkerMessage(self._inbox, self._worker, index, block if is_new else None, layout)

    def _take(self, num_bytes: int) -> tuple[int, bool]:
        """Mark a block as in use; return its number, and whether it is new."""
        index = len(self._blocks)
        for number, block in enumerate(self._blocks):
            if not (head := block.numpy())[0]:
                if len(head) >= num_bytes:
                    head[0] = 1
                    return number, False
                index = number
        # Larger than needed, so that slightly larger batches fit too.
        new_block = torch.zeros(num_bytes + num_bytes // 4, dtype=torch.uint8, device="cpu")
        new_block.share_memory_()  # type: ignore[no-untyped-call]  # of torch
        new_block[0] = 1
        self._blocks[index : index + 1] = [new_block]
        return index, True


@dataclass(slots=True)
class ReceivedBatches:
    """Several batches of a worker, in the parent."""

    block: torch.Tensor
    """The block; the worker may reuse it when this tensor and its views are gone."""

    layout: _MessageLayout

    def unpack(self) -> Iterator[tuple[int, int, int, dict[str, Any]]]:
        """Yield the number, shares and columns of each batch; tensors are views of the block."""
        layout = self.layout
        columns = {
            name: column.read(self.block) if isinstance(column, _PackedValues) else column
            for name, column in layout.columns.items()
        }
        for mark, (start, end) in zip(layout.marks, itertools.pairwise([0, *layout.ends]), strict=True):
            yield *mark, {name: column[start:end] for name, column in columns.items()}

    def pin_memory(self) -> ReceivedBatches:
        """Copy the values to page-locked memory; called by torch."""
        return ReceivedBatches(self.block[: self.layout.num_bytes].pin_memory(), self.layout)


class WorkerInbox:
    """The receiving side in the parent, with the blocks of all workers of one iteration."""

    _numbers: ClassVar[Iterator[int]] = itertools.count()
    _present: ClassVar[weakref.WeakValueDictionary[int, WorkerInbox]] = weakref.WeakValueDictionary()

    def __init__(self) -> None:
        self.number = next(self._numbers)
        """Number by which messages refer to this inbox."""
        self._present[self.number] = self
        self._blocks: dict[tuple[int, int], torch.Tensor] = {}

    @classmethod
    def of(cls, number: int) -> WorkerInbox:
        """Return the inbox with a number; it exists as long as its iteration."""
        return cls._present[number]

    def lend(self, worker: int, index: int, block: torch.Tensor | None) -> torch.Tensor:
        """Return a block as a tensor `(bytes,)`, and clear its first byte when all views are gone."""
        if block is None:
            block = self._blocks[worker, index]
        else:
            self._blocks[worker, index] = block
        memory = block.numpy()
        # Only the tensor's storage, which all views share, references this array.
        weakref.finalize(memory, _release, block.numpy()).atexit = False
        return torch.from_numpy(memory)


def _receive(
    inbox: int, worker: int, index: int, block: torch.Tensor | None, layout: _MessageLayout
) -> ReceivedBatches:
    return ReceivedBatches(WorkerInbox.of(inbox).lend(worker, index, block), layout)


def _release(block: NDArray[np.uint8]) -> None:
    block[0] = 0


def small_together(batches: Iterator[RankBatch]) -> Iterator[list[RankBatch]]:
    """Yield batches in groups of the same form, of at most `_GROUP_BYTES` and `_GROUP_BATCHES`.

    The first groups are small, so that the loop can start early. Before an error is raised, the batches that
    precede it are yielded.
    """
    group: list[RankBatch] = []
    form: list[object] | None = None
    num_bytes, max_batches = 0, 1
    try:
        for batch in batches:
            size, batch_form = _size(batch), _form(batch)
            if group and (batch_form != form or len(group) >= max_batches or num_bytes + size > _GROUP_BYTES):
                max_batches = min(2 * max_batches, _GROUP_BATCHES)
                yield group
                group, num_bytes = [], 0
            group.append(batch)
            num_bytes, form = num_bytes + size, batch_form
    except Exception:
        if group:
            yield group
        raise
    if group:
        yield group


def to_list(column: list[Any]) -> list[Any]:
    """Return a column's values, with arrays converted to tensors."""
    # A value of a ragged column may start at any byte, and tensors need aligned memory.
    return [
        torch.from_numpy(np.require(v, requirements=["A", "W"])) if isinstance(v, np.ndarray) else v
        for v in column
    ]


def _stacked(parts: list[NDArray[Any]], start: int) -> _PackedValues:
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    return _PackedValues(
        "stacked", _dtype(parts[0].dtype), start, sum(part.nbytes for part in parts), [shape], []
    )


def _of_different_sizes(column: list[Any], start: int) -> tuple[_PackedValues | None, list[Any]]:
    """Return the location and the parts of a column; None and the values if they are of other types."""
    first = column[0] if column else None
    if not isinstance(first, (bytes, str, np.ndarray)) or any(type(v) is not type(first) for v in column):
        return None, to_list(column)
    if isinstance(first, np.ndarray):
        if any(value.dtype != first.dtype for value in column):
            return None, to_list(column)
        ends = list(itertools.accumulate(value.size for value in column))
        shapes = [value.shape for value in column]
        return _PackedValues(
            "array", _dtype(first.dtype), start, ends[-1] * first.itemsize, shapes, ends
        ), column
    values = [value.encode() if isinstance(value, str) else value for value in column]
    ends = list(itertools.accumulate(map(len, values)))
    return _PackedValues(type(first).__name__, torch.uint8, start, ends[-1], [], ends), values


@functools.cache
def _dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return the torch dtype for a NumPy dtype; raise TypeError if there is none."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _form(batch: RankBatch) -> list[object]:
    """Return a key of the properties that must be equal for two batches to be joined."""
    return [
        (column.dtype, column.shape[1:]) if isinstance(column, np.ndarray) else None
        for column in batch.columns.values()
    ]


def _size(batch: RankBatch) -> int:
    """Return the approximate size in bytes of a batch's arrays, bytes and strings."""
    num_bytes = 0
    for column in batch.columns.values():
        if isinstance(column, np.ndarray):
            num_bytes += column.nbytes
        else:
            num_bytes += sum(v.nbytes if isinstance(v, np.ndarray) else _length(v) for v in column)
    return num_bytes


def _length(value: object) -> int:
    return len(value) if isinstance(value, (bytes, str)) else 0
