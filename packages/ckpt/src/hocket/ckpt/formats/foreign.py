"""A reader of foreign checkpoints with the interface of `Checkpoint`."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hocket.ckpt.box_reads import BoxReads
from hocket.ckpt.catalogue import Catalogue
from hocket.ckpt.chunks import Chunk, ForeignChunk
from hocket.ckpt.errors import CheckpointIncompatibleError
from hocket.ckpt.formats.expanded import check_expansion, repeated_dims, without_repeats
from hocket.ckpt.formats.table import FORMATS
from hocket.ckpt.formats.temp_tensor import TempTensor
from hocket.ckpt.manifest import Manifest, TensorRecord
from hocket.ckpt.planning import Box
from hocket.ckpt.reader import Checkpoint, numpy_dtype
from hocket.native import _native

__all__ = ["Foreign", "open_foreign"]


def open_foreign(source: str, *, allow_expand: bool = False) -> "Foreign":
    """Open a foreign checkpoint; its format is detected from its files.

    Raises:
        CheckpointNotFoundError: There is no checkpoint of a known format.
        CheckpointUnsafeError: A pickle in it refers to anything but data.
        CheckpointCorruptError: The checkpoint breaks a rule of its format.
        CheckpointIncompatibleError: The variant of the format is not supported.
    """
    return Foreign(source, _native.Checkpoint.open_foreign(source), allow_expand=allow_expand)


class Foreign(Checkpoint):
    """A distributed checkpoint of torch, a file of `torch.save`, or safetensors. Thread-safe.

    There is no manifest and there are no digests, so reads are not verified.

    Attributes:
        contents: Files, tensors and values.
    """

    def __init__(self, uri: str, opened: _native.Checkpoint, *, allow_expand: bool = False) -> None:
        self.uri = uri
        self._native = opened
        self._contents = Catalogue.of(opened)
        self._allow_expand = allow_expand
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
        """The manifest, which foreign checkpoints do not have.

        Raises:
            CheckpointIncompatibleError: Always.
        """
        raise CheckpointIncompatibleError(
            f"`{self.uri}` is a {FORMATS[self.format].title} and has no manifest; `contents` is what it "
            "holds. "
            f"`hocket-ckpt convert {self.uri} DST --to hocket` makes a Hocket checkpoint of it."
        )

    def __repr__(self) -> str:
        return f"<Foreign {self.uri!r}: {FORMATS[self.format].title}, {len(self)} tensors>"

    def record(self, name: str) -> TensorRecord:
        """Return a tensor's record; for an alias, the record of the tensor that owns the storage.

        Raises:
            CheckpointNotFoundError: There is no such tensor; the message lists the nearest names.
            CheckpointIncompatibleError: The tensor has no supported form.
        """
        if name in self._contents.opaque:
            raise CheckpointIncompatibleError(
                f"`{self.uri}` holds `{name}`, but it is neither read nor converted: "
                f"{self._contents.opaque[name]}."
            )
        return super().record(name)

    def locate(self, names: Iterable[str]) -> None:
        """Find the offsets of tensors inside entries that are zips, many in one read.

        Reading also does this, one tensor at a time.
        """
        wanted: dict[int, list[tuple[ForeignChunk, TensorRecord]]] = {}
        for name in names:
            record = self.record(name)
            for chunk in record.chunks:
                assert isinstance(chunk, ForeignChunk)
                if chunk.wrapped == "torch" and (chunk.file, chunk.offset) not in self._located:
                    wanted.setdefault(chunk.file, []).append((chunk, record))
        for file, file_chunks in wanted.items():
            items = [(chunk.offset, chunk.length, record.dtype, chunk.size) for chunk, record in file_chunks]
            path = self._contents.files[file]["path"]
            locations = _native.foreign_locate(self._contents.root, path, items)
            with self._lock:
                for (chunk, _), (offset, strides) in zip(file_chunks, locations, strict=True):
                    self._located[chunk.file, chunk.offset] = replace(
                        chunk,
                        offset=offset,
                        strides=None if strides is None else tuple(strides),
                        wrapped=None,
                    )

    def check_expansion(self, wanted: Sequence[tuple[str, Box]]) -> None:
        """Raise if a tensor is far larger in memory than in its file, unless `allow_expand` is set.

        A box with one item along the dims of stride 0 is checked without the repeated items.

        Raises:
            CheckpointIncompatibleError: A tensor is an expanded view; the message gives its name and sizes.
        """
        if self._allow_expand:
            return
        self.locate(name for name, _ in wanted)
        for name, box in wanted:
            record = self.record(name)
            for chunk in map(self._placed, record.chunks):
                dims = repeated_dims(chunk)
                has_repeats = any(box.size[dim] > 1 for dim in dims)
                check_expansion(
                    self.uri, name, record.dtype, chunk if has_repeats else without_repeats(chunk, dims)
                )

    def repeated_dims(self, name: str) -> tuple[int, ...]:
        """Return the dims along which a located tensor of one chunk repeats the same items."""
        chunks = self.record(name).chunks
        return repeated_dims(self._placed(chunks[0])) if len(chunks) == 1 else ()

    def _placed(self, chunk: Chunk) -> ForeignChunk:
        """Return a chunk at its offset in the file, if `locate` has found it."""
        assert isinstance(chunk, ForeignChunk)
        return self._located.get((chunk.file, chunk.offset), chunk)

    def read(
        self, wanted: Sequence[tuple[str, Box]], into: Sequence[npt.NDArray[Any]] | None = None
    ) -> list[npt.NDArray[Any]]:
        """Read parts of tensors in C order, into new arrays or those of `into`, in one parallel read."""
        self.locate(name for name, _ in wanted)
        self.check_expansion(wanted)
        root = self._contents.root
        plan = BoxReads(is_remote="://" in root and not root.startswith("file://"))
        arrays = []
        for number, (name, box) in enumerate(wanted):
            record = self.record(name)
            array = np.empty(box.size, numpy_dtype(record.dtype)) if into is None else into[number]
            plain = []
            for chunk in record.chunks:
                located = self._placed(chunk)
                if located.wrapped == "zstd":
                    self._unpack(array, box, located, record)
                else:
                    plain.append(located)
            plan.add(array, box, plain)
            arrays.append(array)
        plan.run(self._native.read)
        return arrays

    @property
    def is_sequential(self) -> bool:
        """Whether there are compressed entries, which are decompressed in one pass if read in order."""
        return any(wrapped == "zstd" for *_, wrapped, _ in self._contents.items)

    def _unpack(self, target: npt.NDArray[Any], box: Box, chunk: ForeignChunk, record: TensorRecord) -> None:
        """Copy a compressed entry's part of a box; the last entry stays open for its next piece."""
        key = (chunk.file, chunk.offset)
        with self._lock:
            if self._unpacking is None or self._unpacking[0] != key:
                self._unpacking = None  # free the previous file before the next is made
                path = self._contents.files[chunk.file]["path"]
                item = (chunk.offset, chunk.length, record.dtype, chunk.size)
                self._unpacking = (
                    key,
                    _Unpacking(_native.ForeignUnpacker(self._contents.root, path, item), chunk),
                )
            self._unpacking[1].copy(target, box)


class _Unpacking:
    """A compressed entry whose parts are read one after the other."""

    def __init__(self, unpacker: "_native.ForeignUnpacker", chunk: ForeignChunk) -> None:
        strides = unpacker.strides
        self._chunk = replace(
            chunk, offset=0, wrapped=None, strides=None if strides is None else tuple(strides)
        )
        # If the item is not in C order, its parts are scattered and read in any order.
        self._source = unpacker if strides is None else TempTensor(unpacker)

    def copy(self, target: npt.NDArray[Any], box: Box) -> None:
        plan = BoxReads()
        plan.add(target, box, [self._chunk])
        plan.run(
            lambda reads: self._source.read([(offset, count, address) for _, offset, count, address in reads])
        )
