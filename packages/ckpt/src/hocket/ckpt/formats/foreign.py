"""Checkpoints of other formats, opened for reading as ours are."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hocket.ckpt.errors import CheckpointIncompatibleError
from hocket.ckpt.formats.boxes import Filling
from hocket.ckpt.formats.catalogue import FORMATS, Catalogue, ForeignChunk
from hocket.ckpt.formats.spilling import Spilled
from hocket.ckpt.manifest import Manifest, TensorRecord
from hocket.ckpt.planning import Box
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
        self._unpacking: tuple[tuple[int, int], _Unpacking] | None = None
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

    def record(self, name: str) -> TensorRecord:
        """A tensor's record; that of the tensor whose storage it shares, where it shares one.

        Raises:
            CheckpointNotFoundError: There is no such tensor; the nearest names are given.
            CheckpointIncompatibleError: There is, of a kind that has no form here.
        """
        if name in self._contents.opaque:
            raise CheckpointIncompatibleError(
                f"`{self.uri}` holds `{name}`, but it is neither read nor converted: "
                f"{self._contents.opaque[name]}."
            )
        return super().record(name)

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

    def read(
        self, wanted: Sequence[tuple[str, Box]], into: Sequence[npt.NDArray[Any]] | None = None
    ) -> list[npt.NDArray[Any]]:
        """Parts of tensors in C order, new arrays or those of `into`; all of them in one parallel read."""
        self.locate(name for name, _ in wanted)
        root, files = self._contents.root, self._contents.files
        filling = Filling(is_remote="://" in root and not root.startswith("file://"))
        arrays = []
        for number, (name, box) in enumerate(wanted):
            record = self.record(name)
            array = np.empty(box.size, numpy_dtype(record.dtype)) if into is None else into[number]
            plain = []
            for chunk in record.chunks:
                assert isinstance(chunk, ForeignChunk)
                if chunk.wrapped == "zstd":
                    self._unpack(array, box, chunk, record)
                else:
                    plain.append(self._located.get((chunk.file, chunk.offset), chunk))
            filling.add(array, box, plain)
            arrays.append(array)
        filling.run(lambda reads: _native.ckpt_read(root, files, reads, check=False))
        return arrays

    @property
    def is_sequential(self) -> bool:
        """Whether it holds compressed items: what is read of those in order takes one pass."""
        return any(wrapped == "zstd" for *_, wrapped, _ in self._contents.items)

    def _unpack(self, target: npt.NDArray[Any], box: Box, chunk: ForeignChunk, record: TensorRecord) -> None:
        """Copies what a compressed item has of a box. The last item is kept open for the next piece of it."""
        key = (chunk.file, chunk.offset)
        with self._lock:
            if self._unpacking is None or self._unpacking[0] != key:
                self._unpacking = None  # not two at a time
                path = self._contents.files[chunk.file]["path"]
                item = (chunk.offset, chunk.length, record.dtype, chunk.size)
                self._unpacking = (
                    key,
                    _Unpacking(_native.ForeignUnpacker(self._contents.root, path, item), chunk),
                )
            self._unpacking[1].copy(target, box)


class _Unpacking:
    """A compressed item of which parts are wanted, one after the other."""

    def __init__(self, unpacker: "_native.ForeignUnpacker", chunk: ForeignChunk) -> None:
        strides = unpacker.strides
        self._chunk = replace(
            chunk, offset=0, wrapped=None, strides=None if strides is None else tuple(strides)
        )
        # Where it is not in C order its parts are all over it, and read in no order.
        self._source = unpacker if strides is None else Spilled(unpacker)

    def copy(self, target: npt.NDArray[Any], box: Box) -> None:
        filling = Filling()
        filling.add(target, box, [self._chunk])
        filling.run(
            lambda reads: self._source.read([(offset, count, address) for _, offset, count, address in reads])
        )
