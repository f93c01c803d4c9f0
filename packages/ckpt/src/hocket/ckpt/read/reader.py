"""A reader of the tensors of a checkpoint of any format, as NumPy arrays, without torch."""

import contextlib
import difflib
import json
import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hocket.ckpt.document.boxes import BoxRead, whole
from hocket.ckpt.document.contents import CheckpointContents
from hocket.ckpt.document.dtypes import ITEM_BYTES, numpy_dtype
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.document.planning import Box
from hocket.ckpt.document.records import TensorRecord
from hocket.ckpt.errors import CheckpointIncompatibleError, CheckpointNotFoundError
from hocket.ckpt.formats.table import FORMATS
from hocket.native import _native

__all__ = ["Checkpoint", "replaced_error"]

_SMALL_BYTES = 64 << 20
_MAX_EXPANSION = 16


class Checkpoint:
    """A checkpoint of any format, opened for reading; `checkpoint[name]` reads one whole tensor. Thread-safe.

    Holds the contents and the digests, and no open file. Only Hocket's format has a manifest and digests, so
    reads of the others are not verified.

    Attributes:
        uri: The checkpoint's folder, file or URI.
        allow_expand: Whether tensors are read that are far larger in memory than in their file.
    """

    def __init__(
        self,
        uri: str,
        opened: _native.Checkpoint,
        contents: CheckpointContents,
        *,
        check: bool = True,
        follow: bool = True,
        allow_expand: bool = False,
    ) -> None:
        self.uri = uri
        self.allow_expand = allow_expand
        self._save = _Save(contents, opened)
        self._check = check
        self._follow = follow

    @property
    def format(self) -> str:
        """The format: `hocket`, or `dcp`, `torch` or `safetensors` for a foreign checkpoint."""
        return self.contents.format

    @property
    def contents(self) -> CheckpointContents:
        """The files, tensors and values."""
        return self._save.contents

    @property
    def has_manifest(self) -> bool:
        """Whether the format is Hocket's, with a manifest and digests."""
        return FORMATS[self.format].has_manifest

    @property
    def manifest(self) -> Manifest:
        """The manifest, which only Hocket's format has.

        Raises:
            CheckpointIncompatibleError: The checkpoint is of another format.
        """
        contents = self.contents
        if isinstance(contents, Manifest):
            return contents
        command = f"hocket-ckpt convert {shlex.quote(self.uri)} DST --to hocket"
        raise CheckpointIncompatibleError(
            f"`{self.uri}` is a {FORMATS[self.format].title} and has no manifest; `contents` is what it "
            f"holds. `{command}` makes a Hocket checkpoint of it"
        )

    def identity(self) -> list[str]:
        """Return the strings that identify what is read: the id of the save and the manifest's digest.

        Raises:
            CheckpointNotFoundError: Another save has replaced the manifest since it was read.
        """
        save_id, head = self.contents.save_id, self._stored_head()
        if head is None:
            return [save_id]
        if head["save_id"] != save_id:
            raise replaced_error(self.uri)
        return [save_id, head["digest"]]

    @property
    def identifies_data(self) -> bool:
        """Whether equal identities mean equal data, as the digests in a manifest tell."""
        return self.has_manifest

    def _stored_head(self) -> dict[str, Any] | None:
        """Return the head of the manifest as it is stored now; None in a format without one."""
        if not self.has_manifest:
            return None
        head: dict[str, Any] = json.loads(_native.ckpt_manifest_head(self.uri))
        return head

    @contextlib.contextmanager
    def one_save(self) -> Iterator[None]:
        """Check, for the duration of several reads by `read_boxes`, that all of them belong to one save.

        Raises:
            CheckpointNotFoundError: A file is missing; the message says so if the checkpoint was replaced.
        """
        save_id = self.contents.save_id
        try:
            yield
        except CheckpointNotFoundError as error:
            head = self._stored_head()
            if head is None or head["save_id"] == save_id:
                raise
            raise replaced_error(self.uri) from error

    def read_boxes(self, boxes: Sequence[BoxRead], *, check: bool, scratch_bytes: int) -> None:
        """Read boxes of tensors into memory, all from the save of `contents`.

        The arguments are those of `_native.Checkpoint.read_boxes`.

        Raises:
            CheckpointCorruptError: A block or a file does not match its digest; the message names the tensor.
            CheckpointNotFoundError: A data file is missing, perhaps because the checkpoint was replaced.
        """
        self._save.opened.read_boxes(boxes, check=check, scratch_bytes=scratch_bytes)

    def in_block(self, path: str, offset: int | None) -> list[tuple[str, str]]:
        """Return the (tensor, chunk) pairs in a block of a file, as `_native.Checkpoint.in_block` does."""
        return self._save.opened.in_block(path, offset)

    def __iter__(self) -> Iterator[str]:
        return iter(self.contents.tensors)

    def __len__(self) -> int:
        return len(self.contents.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.contents.tensors

    def __repr__(self) -> str:
        kind = f"step {self.contents.step}" if self.has_manifest else FORMATS[self.format].title
        return f"<Checkpoint {self.uri!r}: {kind}, {len(self)} tensors>"

    def record(self, name: str) -> TensorRecord:
        """Return a tensor's record; for an alias, the record of the tensor that owns the storage.

        Raises:
            CheckpointNotFoundError: There is no such tensor; the message lists the nearest names.
            CheckpointIncompatibleError: The tensor has no supported form, in another format.
        """
        return self._record(self.contents, name)

    def _record(self, contents: CheckpointContents, name: str) -> TensorRecord:
        record = contents.tensors.get(name)
        if record is not None:
            return record if record.same_as is None else contents.tensors[record.same_as]
        if name in contents.opaque:
            raise CheckpointIncompatibleError(
                f"`{self.uri}` holds `{name}`, but it is neither read nor converted: {contents.opaque[name]}"
            )
        if name in contents.values:
            raise CheckpointNotFoundError(
                f"`{self.uri}` has no tensor `{name}`, which is a value: {contents.values[name].value!r:.80}"
            )
        near = [other for other in contents.tensors if other.endswith(f".{name}")][:3]
        near = near or difflib.get_close_matches(name, contents.tensors, n=3)
        hint = f" Did you mean {', '.join(f'`{other}`' for other in near)}?" if near else ""
        num_tensors = len(contents.tensors)
        raise CheckpointNotFoundError(f"`{self.uri}` has no tensor `{name}`, among {num_tensors}.{hint}")

    def __getitem__(self, name: str) -> npt.NDArray[np.generic]:
        """Read one tensor, assembled from its chunks; every block that is read is verified.

        Raises:
            CheckpointNotFoundError: There is no such tensor, or a data file is missing.
            CheckpointCorruptError: A block or a file does not match its digest.
        """
        return self.part(name, whole(self.record(name).shape))

    def part(self, name: str, box: Box) -> npt.NDArray[np.generic]:
        """Read a box of one tensor.

        Raises:
            CheckpointError: As for `checkpoint[name]`.
        """
        [array] = self.read([(name, box)])
        return array

    def read(
        self, wanted: Sequence[tuple[str, Box]], into: Sequence[npt.NDArray[Any]] | None = None
    ) -> list[npt.NDArray[Any]]:
        """Read parts of tensors in C order, into new arrays or those of `into`, in one parallel read.

        All parts come from one save. If a data file is missing because another save replaced the checkpoint,
        all parts are read from the new save and `manifest` is updated; results of earlier calls belong to the
        old one.

        Args:
            wanted: Names of tensors, each with the box to read.
            into: Arrays to fill, of the boxes' sizes and the tensors' dtypes, in C order.

        Raises:
            ValueError: An array of `into` is not writable, or has another size.
            CheckpointNotFoundError: There is no such tensor, or a data file is missing; with `follow=False`,
                also if another save replaced the checkpoint.
            CheckpointIncompatibleError: The checkpoint was replaced, and a tensor has another shape or dtype.
            CheckpointCorruptError: A block or a file does not match its digest.
        """
        self.check_expansion(wanted)
        save = self._save
        try:
            return self._read(save, wanted, into)
        except CheckpointNotFoundError as error:
            if not self.has_manifest:
                raise
            opened = _native.Checkpoint(self.uri)
            latest = _Save(Manifest.of(opened), opened)
            if latest.contents.save_id == save.contents.save_id:
                raise
            if not self._follow:
                raise replaced_error(self.uri) from error
        self._save = latest
        for name, _ in wanted:
            old, new = self._record(save.contents, name), self._record(latest.contents, name)
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise CheckpointIncompatibleError(
                    f"`{self.uri}` was replaced while it was open: `{name}` was {old.dtype} of shape "
                    f"{list(old.shape)} and is now {new.dtype} of shape {list(new.shape)}. Look it up again"
                )
        return self._read(latest, wanted, into)

    def _read(
        self, save: "_Save", wanted: Sequence[tuple[str, Box]], into: Sequence[npt.NDArray[Any]] | None
    ) -> list[npt.NDArray[Any]]:
        arrays = self._arrays(save.contents, wanted, into)
        save.opened.read_boxes(_box_reads(wanted, arrays), check=self._check)
        return arrays

    def _arrays(
        self,
        contents: CheckpointContents,
        wanted: Sequence[tuple[str, Box]],
        into: Sequence[npt.NDArray[Any]] | None,
    ) -> list[npt.NDArray[Any]]:
        """Return the arrays to fill: new ones, or those of `into`.

        Raises:
            ValueError: An array is not writable, or not of its box's size and its tensor's item size.
        """
        records = [self._record(contents, name) for name, _ in wanted]
        if into is None:
            return [
                np.empty(box.size, numpy_dtype(record.dtype))
                for (_, box), record in zip(wanted, records, strict=True)
            ]
        for (name, box), record, array in zip(wanted, records, into, strict=True):
            # Other memory would be written beyond its end.
            is_fitting = array.shape == tuple(box.size) and array.itemsize == ITEM_BYTES[record.dtype]
            if not (is_fitting and array.flags.writeable):
                kind = f"{array.dtype}{'' if array.flags.writeable else ', read-only'}"
                raise ValueError(
                    f"the array for `{name}` has the shape {list(array.shape)} ({kind}); expected "
                    f"{list(box.size)} of {record.dtype}, writable"
                )
        return list(into)

    def locate(self, names: Iterable[str]) -> None:
        """Find the offsets of tensors inside entries that are zips, many in one read.

        Reading also locates the entries that it needs.
        """
        if self.contents.items:
            self._strided(names)

    @property
    def is_sequential(self) -> bool:
        """Whether there are compressed entries, which are decompressed in one pass if read in order."""
        return any(wrapped == "zstd" for *_, wrapped, _ in self.contents.items)

    def check_expansion(self, wanted: Sequence[tuple[str, Box]]) -> None:
        """Raise if a tensor is far larger in memory than in its file, unless `allow_expand` is set.

        A box with one item along the dims of stride 0 is checked without the repeated items.

        Raises:
            CheckpointIncompatibleError: A tensor is an expanded view; the message gives its name and sizes.
        """
        if self.allow_expand:
            return
        strided = self._strided(name for name, _ in wanted)
        for (name, box), chunks in zip(wanted, strided, strict=True):
            for size, strides in chunks:
                dims = _repeated_dims(size, strides)
                if all(box.size[dim] <= 1 for dim in dims):
                    size = tuple(1 if dim in dims else extent for dim, extent in enumerate(size))
                _check_expansion(self.uri, name, self.record(name).dtype, size, strides)

    def repeated_dims(self, name: str) -> tuple[int, ...]:
        """Return the dims along which a tensor of one chunk repeats the same items."""
        [strided] = self._strided([name])
        return _repeated_dims(*strided[0]) if strided and len(self.record(name).chunks) == 1 else ()

    def _strided(self, names: Iterable[str]) -> list[list[tuple[tuple[int, ...], Sequence[int]]]]:
        """Return the sizes and strides, in items, of the chunks of tensors that are not in C order."""
        records = [(name, self.record(name)) for name in names]
        located = self._save.opened.strides([name for name, _ in records])
        return [
            [(record.chunks[number].size, strides) for number, strides in strided]
            for (_, record), strided in zip(records, located, strict=True)
        ]


def _check_expansion(uri: str, name: str, dtype: str, size: Sequence[int], strides: Sequence[int]) -> None:
    """Raise if a chunk is far larger in memory than in its file.

    With a stride of 0, which `Tensor.expand` produces, a file of a kilobyte can describe a tensor of
    terabytes. A chunk is allowed if it has at most 64 MiB, or at most 16 times the bytes that its strides
    reach.

    Args:
        uri: The checkpoint, for the error message.
        name: The tensor, for the error message.
        dtype: Its dtype, by safetensors name.
        size: The shape of the chunk.
        strides: The strides of the located chunk, in items.

    Raises:
        CheckpointIncompatibleError: The chunk is larger than allowed.
    """
    num_bytes = math.prod(size) * ITEM_BYTES[dtype]
    stored_items = 1 + sum((extent - 1) * stride for extent, stride in zip(size, strides, strict=True))
    stored_bytes = stored_items * ITEM_BYTES[dtype]
    if num_bytes > max(_SMALL_BYTES, _MAX_EXPANSION * stored_bytes):
        raise CheckpointIncompatibleError(
            f"`{uri}`: tensor `{name}` of shape {list(size)} is an expanded view: {stored_bytes} bytes "
            f"are stored, {num_bytes} are described. Pass `allow_expand=True` (`--allow-expand`) to write or "
            "read all of them, or leave the tensor out (`--exclude`)"
        )


def _repeated_dims(size: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the dims along which a chunk repeats the same items, because their stride is 0."""
    return tuple(dim for dim, stride in enumerate(strides) if stride == 0 and size[dim] > 1)


def _box_reads(wanted: Sequence[tuple[str, Box]], arrays: Sequence[npt.NDArray[Any]]) -> list[BoxRead]:
    """Return the reads of boxes into arrays of their sizes, for `_native.Checkpoint.read_boxes`."""
    return [
        (name, box.start, box.size, array.ctypes.data, None if array.flags.c_contiguous else array.strides)
        for (name, box), array in zip(wanted, arrays, strict=True)
    ]


class _Save(NamedTuple):
    """The save that a checkpoint reads: its contents, and its data files with their digests."""

    contents: CheckpointContents
    opened: _native.Checkpoint


def replaced_error(uri: str) -> CheckpointNotFoundError:
    """Return the error for a checkpoint that another save replaced while it was being read."""
    return CheckpointNotFoundError(
        f"`{uri}` was replaced by another save meanwhile, and the one that was being read is gone. Run it "
        "again"
    )
