"""Tensors of a checkpoint as NumPy arrays, without torch."""

import contextlib
import difflib
import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hocket.ckpt.errors import (
    CheckpointCorruptError,
    CheckpointIncompatibleError,
    CheckpointNotFoundError,
    CheckpointPartialError,
)
from hocket.ckpt.formats.boxes import Filling, index_of, whole
from hocket.ckpt.manifest import ITEM_BYTES, Manifest, TensorRecord
from hocket.ckpt.owners import told
from hocket.ckpt.planning import Box
from hocket.native import _native

if TYPE_CHECKING:
    from hocket.ckpt.formats.catalogue import Catalogue

__all__ = ["Checkpoint", "open"]

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
    """A committed checkpoint, opened for reading; `checkpoint[name]` is one tensor, whole.

    Holds its manifest and no open file. One of another format is opened too, and has `contents` in place of
    a manifest.

    Attributes:
        uri: Where it is.
    """

    def __init__(self, uri: str, manifest: Manifest, *, check: bool = True, follow: bool = True) -> None:
        self.uri = uri
        self._manifest = manifest
        self._check = check
        self._follow = follow

    @property
    def format(self) -> str:
        """`hocket`; `dcp`, `torch` or `safetensors` where others wrote it."""
        return "hocket"

    @property
    def manifest(self) -> Manifest:
        """The table of contents."""
        return self._manifest

    @property
    def contents(self) -> "Manifest | Catalogue":
        """Files, tensors and values, whatever the format."""
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
        """A tensor's record; that of the tensor whose storage it shares, where it shares one.

        Raises:
            CheckpointNotFoundError: There is no such tensor; the nearest names are given.
        """
        return self._record(self.contents, name)

    def _record(self, contents: "Manifest | Catalogue", name: str) -> TensorRecord:
        record = contents.tensors.get(name)
        if record is None:
            near = difflib.get_close_matches(name, contents.tensors, n=3)
            hint = f" Did you mean {', '.join(f'`{other}`' for other in near)}?" if near else ""
            among = len(contents.tensors)
            raise CheckpointNotFoundError(f"`{self.uri}` has no tensor `{name}`, among {among}.{hint}")
        return record if record.same_as is None else contents.tensors[record.same_as]

    def __getitem__(self, name: str) -> npt.NDArray[np.generic]:
        """One tensor, assembled from its chunks; every block that is read is checked.

        Raises:
            CheckpointNotFoundError: There is no such tensor, or a data file is gone.
            CheckpointCorruptError: A block or a file is not what was written.
        """
        return self.part(name, whole(self.record(name).shape))

    def part(self, name: str, box: Box) -> npt.NDArray[np.generic]:
        """A box of one tensor. Raises as `checkpoint[name]`, which is all of it."""
        try:
            [array] = self.read([(name, box)])
        except CheckpointCorruptError as error:
            of = f"Tensor `{name}`"
            if isinstance(self.contents, Manifest):
                of = told(self.contents, error.file, error.offset, name=name)
            raise CheckpointCorruptError(f"{of}: {error}", error.file, error.offset) from error
        return array

    def read(
        self, wanted: Sequence[tuple[str, Box]], into: Sequence[npt.NDArray[Any]] | None = None
    ) -> list[npt.NDArray[Any]]:
        """Parts of tensors in C order, each a new array or that of `into`; all of them in one parallel read.

        All are of one save. Where a data file is gone and another save has taken the checkpoint's place, all
        are read from that one, as `manifest` then says; what earlier calls read is of the old one.

        Args:
            wanted: Tensors' names, each with the box of it that is wanted.
            into: Arrays to fill, of the boxes' sizes and the tensors' dtypes, in C order.

        Raises:
            CheckpointNotFoundError: There is no such tensor, or a data file is gone; with `follow=False`,
                because another save has taken the checkpoint's place.
            CheckpointIncompatibleError: The checkpoint was replaced, and a tensor has another shape or dtype.
            CheckpointCorruptError: A block or a file is not what was written.
        """
        manifest = self.manifest
        try:
            return self._read(manifest, wanted, into)
        except CheckpointNotFoundError as error:
            latest = Manifest.from_document(_native.ckpt_manifest_read(self.uri))
            if latest.save_id == manifest.save_id:
                raise
            if not self._follow:
                raise replaced_error(self.uri) from error
        self._manifest = latest
        for name, _ in wanted:
            old, new = self._record(manifest, name), self._record(latest, name)
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise CheckpointIncompatibleError(
                    f"`{self.uri}` was replaced meanwhile, and `{name}`, which was {old.dtype} of shape "
                    f"{list(old.shape)}, is {new.dtype} of {list(new.shape)} now. Ask for it again."
                )
        return self._read(latest, wanted, into)

    def _read(
        self,
        manifest: Manifest,
        wanted: Sequence[tuple[str, Box]],
        into: Sequence[npt.NDArray[Any]] | None,
    ) -> list[npt.NDArray[Any]]:
        filling = Filling()
        arrays = []
        for number, (name, box) in enumerate(wanted):
            record = self._record(manifest, name)
            array = np.empty(box.size, numpy_dtype(record.dtype)) if into is None else into[number]
            if record.data is not None:
                held = np.frombuffer(record.data, array.dtype).reshape(record.shape)
                array[...] = held[index_of(box.start, box.size)]
            else:
                filling.add(array, box, record.chunks)
            arrays.append(array)
        filling.run(lambda reads: _native.ckpt_read(self.uri, manifest.files, reads, check=self._check))
        return arrays


def open(  # noqa: A001 - read as `hocket.ckpt.open`
    source: str | os.PathLike[str], *, check: bool = True, follow: bool = True
) -> Checkpoint:
    """Opens a committed checkpoint; reads its manifest and no data.

    One that others wrote is recognised by what stands there: a distributed checkpoint of torch, a file of
    `torch.save` (never unpickled: its opcodes are read as data), safetensors, single or sharded.

    Args:
        source: Its folder or file, or a URI such as `s3://bucket/run/ep0-ba1000`.
        check: Verify the digest of every block that is read. Other formats have none.
        follow: Read the save that has taken this one's place, once its files are gone; else that is an error.

    Raises:
        CheckpointNotFoundError: There is none; a `CheckpointPartialError` where the save never finished.
        CheckpointCorruptError: The manifest is not what was written, or breaks a rule of the format.
        CheckpointIncompatibleError: A later format; the version that reads it is named.
        CheckpointUnsafeError: A foreign file asks for more than data.

    Example:
        >>> checkpoint = hocket.ckpt.open(folder + "/demo")
        >>> checkpoint["model.embed.weight"].shape
        (257, 64)
    """
    source = os.fspath(source)
    try:
        document = _native.ckpt_manifest_read(source)
    except CheckpointPartialError:
        raise
    except CheckpointNotFoundError:
        from hocket.ckpt.formats.foreign import open_foreign

        return open_foreign(source)
    return Checkpoint(source, Manifest.from_document(document), check=check, follow=follow)


@contextlib.contextmanager
def of_one_save(uri: str, save_id: str) -> Iterator[None]:
    """For work of many reads, all of the save that its manifest was read of.

    Raises:
        CheckpointNotFoundError: A file is gone; that the checkpoint was replaced, where it was.
    """
    try:
        yield
    except CheckpointNotFoundError as error:
        if json.loads(_native.ckpt_manifest_head(uri))["save_id"] == save_id:
            raise
        raise replaced_error(uri) from error


def replaced_error(uri: str) -> CheckpointNotFoundError:
    """That another save has taken the place of the one that was being read."""
    return CheckpointNotFoundError(
        f"`{uri}` was replaced by another save meanwhile, and the one that was being read is gone. Run it "
        "again."
    )


def read_manifest(source: str) -> Manifest:
    """The manifest of a Hocket checkpoint.

    Raises:
        CheckpointNotFoundError: There is none; a `CheckpointPartialError` where the save never finished.
        CheckpointCorruptError: It is not what was written, or breaks a rule of the format.
        CheckpointIncompatibleError: A later format, or somebody else's; what reads that is named.
    """
    checkpoint = open(source)
    if isinstance(checkpoint.contents, Manifest):
        return checkpoint.contents
    from hocket.ckpt.formats.catalogue import FORMATS

    raise CheckpointIncompatibleError(
        f"`{source}` is a {FORMATS[checkpoint.format]}, where a Hocket checkpoint was expected. "
        f"`hocket-ckpt convert {source} DST --to hocket` makes one of it; "
        "`torch.distributed.checkpoint.load` reads it as it is, with `hocket.ckpt.dcp.HocketReader`."
    )


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """NumPy's dtype for safetensors' name of it; bf16 and fp8 by ml_dtypes."""
    if name in _NUMPY:
        return np.dtype(_NUMPY[name])
    import ml_dtypes  # takes a tenth of the command's start

    dtype: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, _ML_DTYPES[name]))
    return dtype


assert _NUMPY.keys() | _ML_DTYPES.keys() == ITEM_BYTES.keys()
