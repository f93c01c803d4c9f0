"""A reader of checkpoint tensors as NumPy arrays, without torch."""

import contextlib
import difflib
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hocket.ckpt.document.boxes import BoxRead, whole
from hocket.ckpt.document.catalogue import Catalogue
from hocket.ckpt.document.manifest import ITEM_BYTES, Manifest, TensorRecord
from hocket.ckpt.document.planning import Box
from hocket.ckpt.errors import CheckpointIncompatibleError, CheckpointNotFoundError
from hocket.native import _native

__all__ = ["Checkpoint", "box_reads", "numpy_dtype", "of_one_save", "replaced_error"]

_NUMPY = {
    "BOOL": "bool", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "I32": "<i4",
    "U32": "<u4", "F32": "<f4", "I64": "<i8", "U64": "<u8", "F64": "<f8", "C64": "<c8",
}  # fmt: skip

_ML_DTYPES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


class Checkpoint:
    """A committed checkpoint, opened for reading; `checkpoint[name]` reads one whole tensor.

    Holds the manifest and the digests, and no open file. A checkpoint of another format has `contents` but
    no manifest.

    Attributes:
        uri: The checkpoint's folder, file or URI.
    """

    def __init__(
        self, uri: str, opened: _native.Checkpoint, *, check: bool = True, follow: bool = True
    ) -> None:
        self.uri = uri
        self._save = _Save(Manifest.of(opened), opened)
        self._check = check
        self._follow = follow

    @property
    def format(self) -> str:
        """The format: `hocket`, or `dcp`, `torch` or `safetensors` for a foreign checkpoint."""
        return "hocket"

    @property
    def manifest(self) -> Manifest:
        """The manifest."""
        return self._save.manifest

    def read_boxes(self, boxes: Sequence[BoxRead], *, check: bool, scratch_bytes: int) -> None:
        """Read boxes of tensors into memory, all from the save of `manifest`.

        The arguments are those of `_native.Checkpoint.read_boxes`.

        Raises:
            CheckpointCorruptError: A block or a file does not match its digest; the message names the tensor.
            CheckpointNotFoundError: A data file is missing, perhaps because the checkpoint was replaced.
        """
        self._opened.read_boxes(boxes, check=check, scratch_bytes=scratch_bytes)

    def in_block(self, path: str, offset: int | None) -> list[tuple[str, str]]:
        """Return the (tensor, chunk) pairs in a block of a file, as `_native.Checkpoint.in_block` does."""
        return self._opened.in_block(path, offset)

    @property
    def _opened(self) -> _native.Checkpoint:
        return self._save.opened

    @property
    def contents(self) -> Manifest | Catalogue:
        """The files, tensors and values of a checkpoint of any format."""
        return self.manifest

    def __iter__(self) -> Iterator[str]:
        return iter(self.contents.tensors)

    def __len__(self) -> int:
        return len(self.contents.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.contents.tensors

    def __repr__(self) -> str:
        return f"<Checkpoint {self.uri!r}: step {self.manifest.step}, {len(self)} tensors>"

    def record(self, name: str) -> TensorRecord:
        """Return a tensor's record; for an alias, the record of the tensor that owns the storage.

        Raises:
            CheckpointNotFoundError: There is no such tensor; the message lists the nearest names.
        """
        return self._record(self.contents, name)

    def _record(self, contents: Manifest | Catalogue, name: str) -> TensorRecord:
        record = contents.tensors.get(name)
        if record is None:
            near = difflib.get_close_matches(name, contents.tensors, n=3)
            hint = f" Did you mean {', '.join(f'`{other}`' for other in near)}?" if near else ""
            num_tensors = len(contents.tensors)
            raise CheckpointNotFoundError(f"`{self.uri}` has no tensor `{name}`, among {num_tensors}.{hint}")
        return record if record.same_as is None else contents.tensors[record.same_as]

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
        save = self._save
        try:
            return self._read(save, wanted, into)
        except CheckpointNotFoundError as error:
            opened = _native.Checkpoint(self.uri)
            latest = _Save(Manifest.of(opened), opened)
            if latest.manifest.save_id == save.manifest.save_id:
                raise
            if not self._follow:
                raise replaced_error(self.uri) from error
        self._save = latest
        for name, _ in wanted:
            old, new = self._record(save.manifest, name), self._record(latest.manifest, name)
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise CheckpointIncompatibleError(
                    f"`{self.uri}` was replaced while it was open: `{name}` was {old.dtype} of shape "
                    f"{list(old.shape)} and is now {new.dtype} of shape {list(new.shape)}. Look it up again."
                )
        return self._read(latest, wanted, into)

    def _read(
        self, save: "_Save", wanted: Sequence[tuple[str, Box]], into: Sequence[npt.NDArray[Any]] | None
    ) -> list[npt.NDArray[Any]]:
        arrays = self._arrays(save.manifest, wanted, into)
        save.opened.read_boxes(box_reads(wanted, arrays), check=self._check)
        return arrays

    def _arrays(
        self,
        contents: Manifest | Catalogue,
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


def box_reads(wanted: Sequence[tuple[str, Box]], arrays: Sequence[npt.NDArray[Any]]) -> list[BoxRead]:
    """Return the reads of boxes into arrays of their sizes, for `_native.Checkpoint.read_boxes`."""
    return [
        (name, box.start, box.size, array.ctypes.data, None if array.flags.c_contiguous else array.strides)
        for (name, box), array in zip(wanted, arrays, strict=True)
    ]


class _Save(NamedTuple):
    """The save that a checkpoint reads: its manifest, and its data files with their digests."""

    manifest: Manifest
    opened: _native.Checkpoint


@contextlib.contextmanager
def of_one_save(uri: str, save_id: str) -> Iterator[None]:
    """Check, for the duration of several reads, that all of them belong to the save of the manifest.

    Raises:
        CheckpointNotFoundError: A file is missing; the message says so if the checkpoint was replaced.
    """
    try:
        yield
    except CheckpointNotFoundError as error:
        if json.loads(_native.ckpt_manifest_head(uri))["save_id"] == save_id:
            raise
        raise replaced_error(uri) from error


def replaced_error(uri: str) -> CheckpointNotFoundError:
    """Return the error for a checkpoint that another save replaced while it was being read."""
    return CheckpointNotFoundError(
        f"`{uri}` was replaced by another save meanwhile, and the one that was being read is gone. Run it "
        "again."
    )


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return the NumPy dtype for a safetensors name; bf16 and fp8 come from ml_dtypes."""
    if name in _NUMPY:
        return np.dtype(_NUMPY[name])
    import ml_dtypes  # imported late: it accounts for a tenth of the command's start-up time

    dtype: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, _ML_DTYPES[name]))
    return dtype


assert _NUMPY.keys() | _ML_DTYPES.keys() == ITEM_BYTES.keys()
