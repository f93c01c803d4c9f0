"""Checkpoints of other formats, opened for reading as ours are."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hocket.ckpt.errors import CheckpointIncompatibleError
from hocket.ckpt.formats.boxes import Box, Filling, index_of
from hocket.ckpt.formats.catalogue import FORMATS, Catalogue, ForeignChunk, c_strides
from hocket.ckpt.manifest import Manifest, TensorRecord
from hocket.ckpt.reader import Checkpoint, numpy_dtype
from hocket.native import _native

__all__ = ["Foreign", "open_foreign"]


def open_foreign(source: str) -> "Foreign":
    """Opens a checkpoint that is not ours; what it is shows in what stands there.

    Raises:
        CheckpointNotFoundError: Nothing that is known is there.
        CheckpointUnsafeError: A pickle in it asks for more than data.
        CheckpointCorruptError: It breaks a rule of its format.
        CheckpointIncompatibleError: A form of it that is not read.
    """
    return Foreign(source, Catalogue.from_document(_native.foreign_open(source)))


class Foreign(Checkpoint):
    """A distributed checkpoint of torch, a file of `torch.save`, or safetensors.

    It has no manifest and no digests: what is read is what stands there. Safe to use from several threads.

    Attributes:
        contents: Files, tensors and values.
    """

    def __init__(self, uri: str, contents: Catalogue) -> None:
        self.uri = uri
        self._contents = contents
        self._located: dict[tuple[int, int], ForeignChunk] = {}
        self._unpacked: tuple[tuple[int, int], npt.NDArray[Any]] | None = None
        self._lock = threading.Lock()

    @property
    def format(self) -> str:
        """`dcp`, `torch` or `safetensors`."""
        return self._contents.format

    @property
    def contents(self) -> Catalogue:
        """The table of contents."""
        return self._contents

    @property
    def manifest(self) -> Manifest:
        """There is none.

        Raises:
            CheckpointIncompatibleError: Always.
        """
        raise CheckpointIncompatibleError(
            f"`{self.uri}` is a {FORMATS[self.format]} and has no manifest; `contents` is what it holds. "
            f"`hocket-ckpt convert {self.uri} DST --to hocket` makes a Hocket checkpoint of it."
        )

    def __repr__(self) -> str:
        return f"<Foreign {self.uri!r}: {FORMATS[self.format]}, {len(self)} tensors>"

    def locate(self, names: Iterable[str]) -> None:
        """Finds where tensors begin inside items that are zips of their own, many in one go.

        Reading does it too, tensor by tensor.
        """
        wanted: dict[int, list[tuple[ForeignChunk, TensorRecord]]] = {}
        for name in names:
            record = self.record(name)
            for chunk in record.chunks:
                assert isinstance(chunk, ForeignChunk)
                if chunk.wrapped == "torch" and (chunk.file, chunk.offset) not in self._located:
                    wanted.setdefault(chunk.file, []).append((chunk, record))
        for file, found in wanted.items():
            items = [(chunk.offset, chunk.length, record.dtype, chunk.size) for chunk, record in found]
            path = self._contents.files[file]["path"]
            places = _native.foreign_locate(self._contents.root, path, items)
            with self._lock:
                for (chunk, _), (offset, strides) in zip(found, places, strict=True):
                    self._located[chunk.file, chunk.offset] = replace(
                        chunk,
                        offset=offset,
                        strides=None if strides is None else tuple(strides),
                        wrapped=None,
                    )

    def read(self, wanted: Sequence[tuple[str, Box]]) -> list[npt.NDArray[np.generic]]:
        """Parts of tensors, each a new array in C order; all of them in one parallel read."""
        self.locate(name for name, _ in wanted)
        filling = Filling()
        arrays = []
        for name, box in wanted:
            record = self.record(name)
            array = np.empty(box.size, numpy_dtype(record.dtype))
            plain = []
            for chunk in record.chunks:
                assert isinstance(chunk, ForeignChunk)
                if chunk.wrapped == "zstd":
                    _copy_part(array, box, chunk, self._unpack(chunk, record))
                else:
                    plain.append(self._located.get((chunk.file, chunk.offset), chunk))
            filling.add(array, box, plain)
            arrays.append(array)
        if filling.reads:
            _native.ckpt_read(self._contents.root, self._contents.files, filling.reads, check=False)
        filling.finish()
        return arrays

    def _unpack(self, chunk: ForeignChunk, record: TensorRecord) -> npt.NDArray[Any]:
        """A compressed item, whole: it has no byte ranges. The last one is kept for the next piece of it."""
        key = (chunk.file, chunk.offset)
        with self._lock:
            if self._unpacked is not None and self._unpacked[0] == key:
                return self._unpacked[1]
            path = self._contents.files[chunk.file]["path"]
            item = (chunk.offset, chunk.length, record.dtype, chunk.size)
            data, strides = _native.foreign_unpack(self._contents.root, path, item)
            dtype = numpy_dtype(record.dtype)
            in_items = c_strides(chunk.size) if strides is None else strides
            in_bytes = [stride * dtype.itemsize for stride in in_items]
            array: npt.NDArray[Any] = np.ndarray(chunk.size, dtype, data, strides=in_bytes)
            self._unpacked = (key, array)
            return array


def _copy_part(target: npt.NDArray[Any], box: Box, chunk: ForeignChunk, held: npt.NDArray[Any]) -> None:
    """Copies what a chunk, all of it in memory, has of a box."""
    start = tuple(map(max, box.start, chunk.start))
    ends = (
        min(a + n, b + m) for a, n, b, m in zip(box.start, box.size, chunk.start, chunk.size, strict=True)
    )
    size = [end - low for low, end in zip(start, ends, strict=True)]
    if all(extent > 0 for extent in size):
        of_target = index_of((low - a for low, a in zip(start, box.start, strict=True)), size)
        of_chunk = index_of((low - b for low, b in zip(start, chunk.start, strict=True)), size)
        target[of_target] = held[of_chunk]
