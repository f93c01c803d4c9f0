"""Tensors of a checkpoint as NumPy arrays, without torch."""

import difflib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hocket.ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from hocket.ckpt.manifest import ITEM_BYTES, Chunk, Manifest, TensorRecord
from hocket.native import _native

__all__ = ["Checkpoint", "name_tensors", "open"]

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

    Holds its manifest and no open file.

    Attributes:
        uri: Where it is.
        manifest: Its table of contents.
    """

    def __init__(self, uri: str, manifest: Manifest, *, check: bool = True) -> None:
        self.uri = uri
        self.manifest = manifest
        self._check = check

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.tensors)

    def __len__(self) -> int:
        return len(self.manifest.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.tensors

    def __repr__(self) -> str:
        return f"<Checkpoint {self.uri!r}: step {self.manifest.step}, {len(self)} tensors>"

    def record(self, name: str) -> TensorRecord:
        """A tensor's record; that of the tensor whose storage it shares, where it shares one.

        Raises:
            CheckpointNotFoundError: There is no such tensor; the nearest names are given.
        """
        record = self.manifest.tensors.get(name)
        if record is None:
            near = difflib.get_close_matches(name, self.manifest.tensors, n=3)
            hint = f" Did you mean {', '.join(f'`{other}`' for other in near)}?" if near else ""
            raise CheckpointNotFoundError(f"`{self.uri}` has no tensor `{name}`, among {len(self)}.{hint}")
        return record if record.same_as is None else self.manifest.tensors[record.same_as]

    def __getitem__(self, name: str) -> npt.NDArray[np.generic]:
        """One tensor, assembled from its chunks; every block that is read is checked.

        Raises:
            CheckpointNotFoundError: There is no such tensor, or a data file is gone.
            CheckpointCorruptError: A block or a file is not what was written.
        """
        record = self.record(name)
        array = np.empty(record.shape, numpy_dtype(record.dtype))
        if record.data is not None:
            array.reshape(-1).view(np.uint8)[...] = np.frombuffer(record.data, np.uint8)
            return array
        reads = []
        scattered = []
        for chunk in record.chunks:
            target = array[_box(chunk)]
            if not target.flags.c_contiguous:
                scratch = np.empty(chunk.size, array.dtype)
                scattered.append((target, scratch))
                target = scratch
            reads.append((chunk.file, chunk.offset, chunk.length, target.ctypes.data))
        try:
            _native.ckpt_read(self.uri, self.manifest.files, reads, check=self._check)
        except CheckpointCorruptError as error:
            raise CheckpointCorruptError(f"Tensor `{name}`: {error}", error.file, error.offset) from error
        for target, scratch in scattered:
            target[...] = scratch
        return array


def _box(chunk: Chunk) -> tuple[Any, ...]:
    """The index of a chunk's box; with an ellipsis, lest a 0-d tensor come as a copy."""
    return (*(slice(a, a + n) for a, n in zip(chunk.start, chunk.size, strict=True)), ...)


def open(source: str, *, check: bool = True) -> Checkpoint:  # noqa: A001 - read as `hocket.ckpt.open`
    """Opens a committed checkpoint; reads its manifest and no data.

    Args:
        source: Its folder, or a URI such as `s3://bucket/run/ep0-ba1000`.
        check: Verify the digest of every block that is read.

    Raises:
        CheckpointNotFoundError: There is none; a `CheckpointPartialError` where the save never finished.
        CheckpointCorruptError: The manifest is not what was written, or breaks a rule of the format.
        CheckpointIncompatibleError: A later format; the version that reads it is named.

    Example:
        >>> checkpoint = hocket.ckpt.open(folder + "/demo")
        >>> checkpoint["model.embed.weight"].shape
        (257, 64)
    """
    return Checkpoint(source, Manifest.from_document(_native.ckpt_manifest_read(source)), check=check)


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """NumPy's dtype for safetensors' name of it; bf16 and fp8 by ml_dtypes."""
    if name in _NUMPY:
        return np.dtype(_NUMPY[name])
    import ml_dtypes  # takes a tenth of the command's start

    dtype: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, _ML_DTYPES[name]))
    return dtype


def name_tensors(manifest: Manifest, file: str | None, offset: int | None) -> list[str]:
    """Tensors, aliases too, that have bytes in a block.

    Args:
        manifest: The checkpoint's.
        file: The data file's path.
        offset: Where the block begins in the file's data; None is the whole file.
    """
    paths = [entry["path"] for entry in manifest.files]
    end = math.inf if offset is None else offset + _native.CKPT_BLOCK_BYTES

    def is_hit(chunk: Chunk) -> bool:
        in_block = chunk.offset < end and chunk.offset + chunk.length > (offset or 0)
        return in_block and paths[chunk.file] == file

    hit = {name for name, record in manifest.tensors.items() if any(map(is_hit, record.chunks))}
    return [name for name, record in manifest.tensors.items() if name in hit or record.same_as in hit]


assert _NUMPY.keys() | _ML_DTYPES.keys() == ITEM_BYTES.keys()
