"""A reader of foreign checkpoints with the interface of `Checkpoint`."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from hocket.ckpt.document.catalogue import Catalogue
from hocket.ckpt.document.chunks import Chunk, ForeignChunk
from hocket.ckpt.document.manifest import Manifest, TensorRecord
from hocket.ckpt.document.planning import Box
from hocket.ckpt.errors import CheckpointIncompatibleError
from hocket.ckpt.formats.companions import check_whole
from hocket.ckpt.formats.expanded import check_expansion, repeated_dims, without_repeats
from hocket.ckpt.formats.table import FORMATS
from hocket.ckpt.read.reader import Checkpoint, box_reads
from hocket.ckpt.uris import local_path
from hocket.native import _native

__all__ = ["Foreign", "open_foreign"]


def open_foreign(source: str, *, allow_expand: bool = False) -> "Foreign":
    """Open a foreign checkpoint; its format is detected from its files.

    Raises:
        CheckpointNotFoundError: There is no checkpoint of a known format.
        CheckpointUnsafeError: A pickle in it refers to anything but data.
        CheckpointCorruptError: The checkpoint breaks a rule of its format.
        CheckpointIncompatibleError: The variant of the format is not supported, or a folder has only one of
            the several files of a model.
    """
    opened = Foreign(source, _native.Checkpoint.open_foreign(local_path(source)), allow_expand=allow_expand)
    files = opened.contents.files
    if len(files) == 1 and source.rstrip("/").rpartition("/")[2] != files[0]["path"]:
        check_whole(source, opened.contents)  # a folder with one file of several, whose others are missing
    return opened


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

    @property
    def format(self) -> str:
        """`dcp`, `torch` or `safetensors`."""
        return self._contents.format

    @property
    def _opened(self) -> _native.Checkpoint:
        return self._native

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

        Reading also locates the entries that it needs.
        """
        self._strided(names)

    def _strided(self, names: Iterable[str]) -> list[list[ForeignChunk]]:
        """Return the chunks of located tensors that are not in C order, with their strides."""
        records = [(name, self.record(name)) for name in names]
        located = self._native.strides([name for name, _ in records])
        return [
            [_with_strides(record.chunks[number], strides) for number, strides in strided]
            for (_, record), strided in zip(records, located, strict=True)
        ]

    def check_expansion(self, wanted: Sequence[tuple[str, Box]]) -> None:
        """Raise if a tensor is far larger in memory than in its file, unless `allow_expand` is set.

        A box with one item along the dims of stride 0 is checked without the repeated items.

        Raises:
            CheckpointIncompatibleError: A tensor is an expanded view; the message gives its name and sizes.
        """
        if self._allow_expand:
            return
        strided = self._strided(name for name, _ in wanted)
        for (name, box), chunks in zip(wanted, strided, strict=True):
            for chunk in chunks:
                dims = repeated_dims(chunk)
                has_repeats = any(box.size[dim] > 1 for dim in dims)
                check_expansion(
                    self.uri,
                    name,
                    self.record(name).dtype,
                    chunk if has_repeats else without_repeats(chunk, dims),
                )

    def repeated_dims(self, name: str) -> tuple[int, ...]:
        """Return the dims along which a tensor of one chunk repeats the same items."""
        [strided] = self._strided([name])
        return repeated_dims(strided[0]) if strided and len(self.record(name).chunks) == 1 else ()

    def read(
        self, wanted: Sequence[tuple[str, Box]], into: Sequence[npt.NDArray[Any]] | None = None
    ) -> list[npt.NDArray[Any]]:
        """Read parts of tensors in C order, into new arrays or those of `into`, in one parallel read."""
        self.check_expansion(wanted)
        arrays = self._arrays(self._contents, wanted, into)
        self._native.read_boxes(box_reads(wanted, arrays))
        return arrays

    @property
    def is_sequential(self) -> bool:
        """Whether there are compressed entries, which are decompressed in one pass if read in order."""
        return any(wrapped == "zstd" for *_, wrapped, _ in self._contents.items)


def _with_strides(chunk: Chunk, strides: Sequence[int]) -> ForeignChunk:
    assert isinstance(chunk, ForeignChunk)
    return replace(chunk, strides=tuple(strides))
