"""Tensors' bytes for files in the making, read ahead into memory that is used again."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import add
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hocket.ckpt.formats.boxes import pieces
from hocket.ckpt.formats.parts import OutFile, Payload
from hocket.ckpt.manifest import ITEM_BYTES
from hocket.ckpt.memory import Memory, aligned, carve
from hocket.ckpt.planning import Box
from hocket.ckpt.reader import Checkpoint, numpy_dtype

__all__ = ["PayloadReader"]

# Each is read by several threads.
_IN_FLIGHT = 4
_LARGEST_PIECE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class _Piece:
    payload: Payload
    box: Box
    """Of the source's tensor."""


class PayloadReader:
    """Reads payloads ahead of the writer, small ones together, and hands them out in order."""

    def __init__(self, source: Checkpoint, files: Sequence[OutFile], memory_bytes: int) -> None:
        self._source = source
        # What is in flight, each once more while it is cast, and what is being written; the threads that read
        # have memory of their own, up to a fourth of all.
        piece_bytes = min(_LARGEST_PIECE_BYTES, memory_bytes // 16)
        self._batches = _batches(source, files, piece_bytes)
        self._memory = Memory(piece_bytes)
        # Compressed items are unpacked front to back: by one thread, in the order of the pieces.
        num_threads = 1 if getattr(source, "is_sequential", False) else _IN_FLIGHT
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="hocket-convert")
        self._running: deque[tuple[list[_Piece], Future[_Batch]]] = deque()
        names = [part.tensor.source for file in files for part in file.parts if isinstance(part, Payload)]
        locate = getattr(source, "locate", None)
        if locate is not None:
            locate(names)
        self._arrays = self._in_order()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def take(self, payload: Payload) -> Iterator[npt.NDArray[Any]]:
        """The pieces of a payload, each good until the next one; payloads come in the order of the files."""
        left = payload.tensor.num_bytes
        while left:
            piece, array = next(self._arrays)
            assert piece.payload is payload
            left -= array.nbytes
            yield array

    def _in_order(self) -> Iterator[tuple[_Piece, npt.NDArray[Any]]]:
        while True:
            while len(self._running) < _IN_FLIGHT and (batch := next(self._batches, None)) is not None:
                self._running.append((batch, self._pool.submit(self._read, batch)))
            if not self._running:
                return
            batch, future = self._running.popleft()
            read = future.result()
            yield from zip(batch, read.arrays, strict=True)
            self._memory.give_back(read.memory)

    def _read(self, batch: list[_Piece]) -> "_Batch":
        wanted = [(piece.payload.tensor.source, piece.box) for piece in batch]
        dtypes = [numpy_dtype(self._source.record(name).dtype) for name, _ in wanted]
        read = self._arrays_for(batch, dtypes)
        self._source.read(wanted, into=read.arrays)
        becomes = [numpy_dtype(piece.payload.tensor.dtype) for piece in batch]
        if becomes == dtypes:
            return read
        cast = self._arrays_for(batch, becomes)
        with np.errstate(over="ignore", invalid="ignore"):
            for target, array in zip(cast.arrays, read.arrays, strict=True):
                np.copyto(target, array, casting="unsafe")
        self._memory.give_back(read.memory)
        return cast

    def _arrays_for(self, batch: list[_Piece], dtypes: Sequence[np.dtype[Any]]) -> "_Batch":
        memory = self._memory.take()
        return _Batch(carve(memory, [piece.box.size for piece in batch], dtypes), memory)


@dataclass(frozen=True, slots=True)
class _Batch:
    arrays: list[npt.NDArray[Any]]
    memory: npt.NDArray[np.uint8]


def _batches(source: Checkpoint, files: Iterable[OutFile], piece_bytes: int) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for file in files:
        for part in file.parts:
            if not isinstance(part, Payload):
                continue
            # By the larger of the two dtypes, since both are in memory at once.
            dtypes = (part.tensor.dtype, source.record(part.tensor.source).dtype)
            item_bytes = max(ITEM_BYTES[dtype] for dtype in dtypes)
            start = part.start or (0,) * len(part.tensor.shape)
            for piece in pieces(part.tensor.shape, item_bytes, piece_bytes):
                box = Box(tuple(map(add, start, piece.start)), piece.size)
                num_bytes = aligned(item_bytes * math.prod(box.size))
                if batch and size + num_bytes > piece_bytes:
                    yield batch
                    batch, size = [], 0
                batch.append(_Piece(part, box))
                size += num_bytes
    if batch:
        yield batch
