"""The manifest as Python objects. docs/format.md describes its JSON document and file."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hocket.ckpt.document.chunks import Chunk, ChunkColumns
from hocket.ckpt.document.tree import join as join_path
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointIncompatibleError
from hocket.ckpt.gc_pause import gc_paused
from hocket.native import _native

if TYPE_CHECKING:
    from hocket.native._native import CkptFile

__all__ = [
    "INLINE_BYTES",
    "INLINE_TOTAL_BYTES",
    "ITEM_BYTES",
    "MAX_DIMS",
    "Chunk",
    "Manifest",
    "PathItem",
    "PerRank",
    "SaveSummary",
    "TensorRecord",
    "ValueRecord",
    "decode_value",
    "encode_value",
    "join_path",
]

INLINE_BYTES = 1024
"""Size limit of a tensor that is stored in the manifest itself."""

INLINE_TOTAL_BYTES = 4 << 20
"""Size limit of all tensors in the manifest together."""

MAX_DIMS = 64
"""The most dims that a tensor may have."""

ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Item size in bytes by safetensors dtype name."""

_INT_BITS = 8192  # Python limits the conversion of larger integers from and to decimal text

_FILE_FIELDS = ("path", "size", "data_start", "header", "digests", "frames")

PathItem = str | int
"""A step in the state tree: a mapping's key or a list index."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """A tensor of the checkpoint: dtype, global shape and chunks."""

    dtype: str
    """The dtype's safetensors name: `F32`, `BF16`, …"""
    shape: tuple[int, ...]
    path: tuple[PathItem, ...]
    same_as: str | None = None
    """The name of the tensor whose storage this one shares."""
    chunks: Sequence[Chunk] = ()
    data: bytes | None = None
    """The whole tensor, little-endian in C order, if it is small."""

    @property
    def num_bytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueRecord:
    """A leaf that is not a tensor."""

    path: tuple[PathItem, ...]
    value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class PerRank:
    """The values of each rank, and the policy for a load with another world size."""

    policy: Literal["reseed", "require", "drop"]
    ranks: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSummary:
    """The identity of a save and its files: a manifest without the costly part, the tensors and values."""

    save_id: str
    step: int
    paths: tuple[str, ...]
    """The paths of the data files."""
    user: Any

    @classmethod
    def read(cls, uri: str) -> SaveSummary:
        """Read and check the manifest of a checkpoint.

        Raises:
            CheckpointError: As for `_native.Checkpoint`.
        """
        raw = _native.Checkpoint(uri).summary()
        try:
            return cls(user=decode_value(raw.pop("user")), **raw)
        except (TypeError, ValueError, RecursionError) as error:
            raise _undecodable(error) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The table of contents of a checkpoint."""

    save_id: str
    step: int
    created: str
    version: str
    writer: str
    world_size: int
    mesh: Mapping[str, int] | None = None
    files: tuple[CkptFile, ...] = ()
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    values: Mapping[str, ValueRecord] = field(default_factory=dict)
    per_rank: PerRank | None = None
    user: Any = None
    integer_keyed: frozenset[tuple[PathItem, ...]] = frozenset()
    """Paths of the mappings with integer keys, which would otherwise be read as lists."""
    format: int = _native.CKPT_FORMAT

    @property
    def num_bytes(self) -> int:
        """The size of all tensors in bytes; shared storage is counted once."""
        return sum(record.num_bytes for record in self.tensors.values() if record.same_as is None)

    @property
    def attached(self) -> dict[str, Any]:
        """The step, user value and per-rank values, under the names `(step)`, `(user)` and `(per rank)`."""
        rank_values = None if self.per_rank is None else list(self.per_rank.ranks)
        return {"(step)": self.step, "(user)": self.user, "(per rank)": rank_values}

    @gc_paused()
    def to_document(self) -> bytes:
        """Return the document as one line of JSON, for `ckpt_manifest_encode`.

        Raises:
            CheckpointIncompatibleError: A value has no defined JSON form.
        """
        per_rank = self.per_rank and {
            "policy": self.per_rank.policy,
            "ranks": [encode_value(value) for value in self.per_rank.ranks],
        }
        document = {
            "format": self.format,
            "version": self.version,
            "save_id": self.save_id,
            "step": self.step,
            "created": self.created,
            "writer": self.writer,
            "world_size": self.world_size,
            "mesh": None if self.mesh is None else dict(self.mesh),
            "files": [_file_to_json(file) for file in self.files],
            "tensors": {name: _tensor_to_json(record) for name, record in self.tensors.items()},
            "values": {
                name: {"path": list(record.path), "value": encode_value(record.value)}
                for name, record in self.values.items()
            },
            "per_rank": per_rank,
            "user": encode_value(self.user),
        }
        if self.integer_keyed:
            document["integer_keyed"] = sorted(map(list, self.integer_keyed), key=join_path)
        return (
            json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        )

    @classmethod
    @gc_paused()
    def of(cls, opened: _native.Checkpoint) -> Manifest:
        """Build the manifest of an opened checkpoint of Hocket's format; takes its contents.

        Raises:
            CheckpointCorruptError: A tagged value is invalid; everything else was checked when it was opened.
        """
        try:
            raw = opened.take_contents()
            per_rank = raw.pop("per_rank")
            return cls(
                tensors={name: _tensor(*fields) for name, fields in raw.pop("tensors").items()},
                values={
                    name: ValueRecord(path=path, value=decode_value(value))
                    for name, (path, value) in raw.pop("values").items()
                },
                per_rank=per_rank
                and PerRank(policy=per_rank[0], ranks=tuple(decode_value(value) for value in per_rank[1])),
                user=decode_value(raw.pop("user")),
                integer_keyed=frozenset(raw.pop("integer_keyed")),
                **raw,
            )
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise _undecodable(error) from error

    @classmethod
    def read(cls, uri: str) -> Manifest:
        """Read the manifest of a checkpoint whose data is not read.

        Raises:
            CheckpointError: As for `_native.Checkpoint`, or as for `of`.
        """
        return cls.of(_native.Checkpoint(uri))


def _undecodable(error: Exception) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"the manifest's document holds a value that cannot be decoded: {error}")


def _file_to_json(file: CkptFile) -> dict[str, Any]:
    """Return the manifest's fields of a file, which are one fewer than `ckpt_write_file` returns."""
    return {name: value for name, value in file.items() if name in _FILE_FIELDS}


def _tensor_to_json(record: TensorRecord) -> dict[str, Any]:
    raw: dict[str, Any] = {"dtype": record.dtype, "shape": list(record.shape), "path": list(record.path)}
    if record.same_as is not None:
        raw["same_as"] = record.same_as
    if isinstance(record.chunks, ChunkColumns):
        raw["chunks"] = record.chunks.columns
    elif len(record.chunks) == 1:
        (chunk,) = record.chunks
        raw["chunks"] = {
            "file": [chunk.file],
            "offset": [chunk.offset],
            "length": [chunk.length],
            "start": [[begin] for begin in chunk.start],
            "size": [[extent] for extent in chunk.size],
        }
    elif record.chunks:
        dims = range(len(record.shape))
        raw["chunks"] = {
            "file": [chunk.file for chunk in record.chunks],
            "offset": [chunk.offset for chunk in record.chunks],
            "length": [chunk.length for chunk in record.chunks],
            "start": [[chunk.start[dim] for chunk in record.chunks] for dim in dims],
            "size": [[chunk.size[dim] for chunk in record.chunks] for dim in dims],
        }
    if record.data is not None:
        raw["data"] = base64.b64encode(record.data).decode()
    return raw


def _tensor(
    dtype: str,
    shape: tuple[int, ...],
    path: tuple[PathItem, ...],
    same_as: str | None,
    columns: _native.ChunkColumns | None,
    data: bytes | None,
) -> TensorRecord:
    return TensorRecord(
        dtype=dtype,
        shape=shape,
        path=path,
        same_as=same_as,
        chunks=() if columns is None else ChunkColumns(columns),
        data=data,
    )


def encode_value(value: Any) -> Any:
    """Encode a Python value as JSON, with tags for values that JSON cannot represent.

    Raises:
        CheckpointIncompatibleError: The value holds something other than None, bool, int, float, str, bytes,
            tuple, list or a mapping of these, or an integer of more than 8,192 bits; the message gives its
            path within the value.
    """
    return _encode(value, "")


def _encode(value: Any, path: str) -> Any:
    # Exact types only: a subclass (an enum, a NumPy float) would be read back as its base type.
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        if value.bit_length() > _INT_BITS:
            location = f" at `{path}`" if path else ""
            raise CheckpointIncompatibleError(
                f"an integer of {value.bit_length()} bits{location}; expected at most {_INT_BITS}. "
                "Save it as bytes."
            )
        return value if -(2**53) <= value <= 2**53 else {"$int": str(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is list:
        return [_encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [_encode(item, f"{path}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, f"{path}[{key!r}]") for key, item in value.items()}
        pairs = [
            [_encode(key, f"{path} key"), _encode(item, f"{path}[{key!r}]")] for key, item in value.items()
        ]
        return {"$map": pairs}
    location = f" at `{path}`" if path else ""
    raise CheckpointIncompatibleError(
        f"a `{kind.__module__}.{kind.__qualname__}`{location} cannot be stored in a checkpoint; expected a "
        "tensor, None, bool, int, float, str, bytes, tuple, list or mapping. Convert it in the "
        "`state_dict` that returns it."
    )


def decode_value(raw: Any) -> Any:
    """Decode a value that `encode_value` encoded.

    Raises:
        ValueError: A tag is unknown or has invalid content.
    """
    if isinstance(raw, list):
        return [decode_value(item) for item in raw]
    if not isinstance(raw, dict):
        return raw
    if len(raw) == 1:
        tag, inner = next(iter(raw.items()))
        if tag == "$float":
            return float(inner)
        if tag == "$int":
            return int(inner)
        if tag == "$bytes":
            return base64.b64decode(inner, validate=True)
        if tag == "$tuple":
            return tuple(decode_value(item) for item in inner)
        if tag == "$map":
            return {decode_value(key): decode_value(item) for key, item in inner}
    if unknown := [key for key in raw if key.startswith("$")]:
        # A mapping with such a key is written as `$map`.
        raise ValueError(f"`{unknown[0]:.40}` is not a known tag, or is not the only key of its object")
    return {key: decode_value(item) for key, item in raw.items()}
