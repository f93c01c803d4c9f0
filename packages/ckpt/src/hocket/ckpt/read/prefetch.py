"""Prefetch of tensor bytes for a writer, into reused memory blocks."""

import contextlib
import math
import mmap
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hocket.ckpt.document.boxes import pieces
from hocket.ckpt.document.dtypes import ITEM_BYTES, cast_floats, numpy_dtype
from hocket.ckpt.document.planning import Box
from hocket.ckpt.formats.output_file import OutFile, TensorPayload
from hocket.ckpt.read.source import TensorSource

__all__ = ["PayloadReader"]

# Several threads read each batch.
_IN_FLIGHT = 4
_LARGEST_PIECE_BYTES = 32 << 20
# No dtype needs a larger alignment.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class _Piece:
    payload: TensorPayload
    box: Box
    """The box, in the source tensor's coordinates."""


class PayloadReader:
    """A reader that prefetches payloads, batches small ones, and yields them in order."""

    def __init__(self, source: TensorSource, files: Sequence[OutFile], memory_bytes: int) -> None:
        self._source = source
        # Pieces in flight, a second copy of each while it is cast, and the piece being written; the threads
        # that read use their own memory, up to a fourth of the limit.
        piece_bytes = min(_LARGEST_PIECE_BYTES, memory_bytes // 16)
        self._batches = _batches(source, files, piece_bytes)
        self._memory = _MemoryPool(piece_bytes)
        # Compressed items are decompressed sequentially: by one thread, in the order of the pieces.
        num_threads = 1 if source.is_sequential else _IN_FLIGHT
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="hocket-convert")
        self._running: deque[tuple[list[_Piece], Future[_Batch]]] = deque()
        source.locate(dict.fromkeys(name for file in files for name in file.sources))
        self._arrays = self._in_order()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        # The generator and the futures hold memory blocks, in a circle with this object.
        self._arrays.close()
        self._running.clear()

    def take(self, payload: TensorPayload) -> Iterator[npt.NDArray[Any]]:
        """Yield the pieces of a payload; each is valid until the next one.

        Payloads must be taken in the order of the files.
        """
        remaining_bytes = payload.tensor.num_bytes
        payload.num_beyond = 0  # the payload may have been taken before, for a file that had to be replaced
        while remaining_bytes:
            piece, array, num_beyond = next(self._arrays)
            payload.num_beyond += num_beyond
            assert piece.payload is payload
            remaining_bytes -= array.nbytes
            yield array

    def _in_order(self) -> Generator[tuple[_Piece, npt.NDArray[Any], int]]:
        while True:
            while len(self._running) < _IN_FLIGHT and (batch := next(self._batches, None)) is not None:
                self._running.append((batch, self._pool.submit(self._read, batch)))
            if not self._running:
                return
            batch, future = self._running.popleft()
            read = future.result()
            yield from zip(batch, read.arrays, read.num_beyond, strict=True)
            self._memory.give_back(read.memory)

    def _read(self, batch: list[_Piece]) -> "_Batch":
        wanted = [(piece.payload.tensor.source, piece.box) for piece in batch]
        dtypes = [numpy_dtype(self._source.record(name).dtype) for name, _ in wanted]
        read = self._arrays_for(batch, dtypes)
        self._source.read(wanted, into=read.arrays)
        target_dtypes = [numpy_dtype(piece.payload.tensor.dtype) for piece in batch]
        if target_dtypes == dtypes:
            return read
        cast = self._arrays_for(batch, target_dtypes)
        cast.num_beyond = [
            cast_floats(array, target) for array, target in zip(read.arrays, cast.arrays, strict=True)
        ]
        self._memory.give_back(read.memory)
        return cast

    def _arrays_for(self, batch: list[_Piece], dtypes: Sequence[np.dtype[Any]]) -> "_Batch":
        memory = self._memory.take()
        return _Batch(_carve(memory, [piece.box.size for piece in batch], dtypes), memory, [0] * len(batch))


@dataclass(slots=True)
class _Batch:
    arrays: list[npt.NDArray[Any]]
    memory: npt.NDArray[np.uint8]
    num_beyond: list[int]
    """The number of items of each array that were beyond the range of the dtype that they were cast to."""


def _batches(source: TensorSource, files: Iterable[OutFile], piece_bytes: int) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for file in files:
        for part in file.parts:
            if not isinstance(part, TensorPayload):
                continue
            # Size by the larger of the two dtypes, since both are in memory at once.
            dtypes = (part.tensor.dtype, source.record(part.tensor.source).dtype)
            item_bytes = max(ITEM_BYTES[dtype] for dtype in dtypes)
            shape = part.tensor.shape
            part_box = Box(part.start or (0,) * len(shape), shape)
            for box in pieces(part_box, item_bytes, piece_bytes):
                num_bytes = _aligned(item_bytes * math.prod(box.size))
                if batch and size + num_bytes > piece_bytes:
                    yield batch
                    batch, size = [], 0
                batch.append(_Piece(part, box))
                size += num_bytes
    if batch:
        yield batch


class _MemoryPool:
    """A thread-safe pool of page-aligned blocks of one size.

    Allocating fresh memory costs more than reading into it, and an allocator's retained memory would not
    count towards the memory limit.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._free: list[npt.NDArray[np.uint8]] = []

    def take(self) -> npt.NDArray[np.uint8]:
        """Return a block with undefined contents."""
        try:
            return self._free.pop()
        except IndexError:
            pass
        block = mmap.mmap(-1, self._block_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Other systems than Linux have no such advice, and a kernel without huge pages rejects it.
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                block.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(block, np.uint8)

    def give_back(self, block: npt.NDArray[np.uint8]) -> None:
        """Return a block to the pool; nothing may use it any more."""
        self._free.append(block)


def _carve(
    block: npt.NDArray[np.uint8],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[np.dtype[Any]],
    *,
    alignment: int = _ALIGNMENT,
) -> list[npt.NDArray[Any]]:
    """Return consecutive C-order arrays in a block, each at a multiple of `alignment` bytes."""
    arrays, start = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        end = start + math.prod(shape) * dtype.itemsize
        arrays.append(block[start:end].view(dtype).reshape(shape))
        start = _aligned(end, alignment)
    return arrays


def _aligned(num_bytes: int, alignment: int = _ALIGNMENT) -> int:
    """Return the number of bytes that an array occupies in a block."""
    return -(-num_bytes // alignment) * alignment
