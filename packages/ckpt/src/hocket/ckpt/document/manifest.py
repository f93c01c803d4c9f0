"""The manifest as Python objects. docs/format.md describes its JSON document and file."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hocket.ckpt.document.chunks import ChunkColumns
from hocket.ckpt.document.contents import CheckpointContents
from hocket.ckpt.document.records import DeltaBase, PerRank, TensorRecord, ThinnedState, ValueRecord
from hocket.ckpt.document.tree import join as join_path
from hocket.ckpt.document.values import decode_value, encode_value
from hocket.ckpt.errors import CheckpointCorruptError
from hocket.ckpt.gc_pause import gc_paused
from hocket.ckpt.uris import local_path
from hocket.native import _native

if TYPE_CHECKING:
    from hocket.native._native import CkptFile

__all__ = ["INLINE_BYTES", "INLINE_TOTAL_BYTES", "MAX_DIMS", "VERSION_WRITER", "Manifest", "SaveSummary"]

INLINE_BYTES = _native.CKPT_INLINE_BYTES
"""Size limit of a tensor that is stored in the manifest itself."""

INLINE_TOTAL_BYTES = _native.CKPT_INLINE_TOTAL_BYTES
"""Size limit of all tensors in the manifest together."""

MAX_DIMS = _native.CKPT_MAX_DIMS
"""The most dims that a tensor may have."""

VERSION_WRITER = _native.CKPT_VERSION_WRITER
"""The `writer` of versions of published weights, which may be bases of deltas."""

_THINNED_FORMAT = 2
_PLANES_FORMAT = 3
_DELTA_FORMAT = 4
_FILE_FIELDS = ("path", "size", "data_start", "header", "digests", "frames", "planes")


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSummary:
    """The identity of a save and its files: a manifest without the costly part, the tensors and values."""

    save_id: str
    step: int
    paths: tuple[str, ...]
    """The paths of the data files."""
    user: Any

    @classmethod
    def read(cls, uri: str | os.PathLike[str]) -> SaveSummary:
        """Read and check the manifest of a checkpoint.

        Raises:
            CheckpointError: As for `_native.Checkpoint`.
        """
        raw = _native.Checkpoint(local_path(uri)).summary()
        try:
            return cls(user=decode_value(raw.pop("user")), **raw)
        except (TypeError, ValueError, RecursionError) as error:
            raise _undecodable(error) from error


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Manifest(CheckpointContents):
    """The contents of a checkpoint in Hocket's format, and how it was saved."""

    format: str = "hocket"
    created: str
    version: str
    delta: DeltaBase | None = None
    """The checkpoint that the tensors are stored as a difference from."""

    @property
    def format_number(self) -> int:
        """The least number of a format that has every field of the manifest."""
        if self.delta is not None:
            return _DELTA_FORMAT
        if any("planes" in file for file in self.files):
            return _PLANES_FORMAT
        return _native.CKPT_FORMAT if self.thinned is None else _THINNED_FORMAT

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
            "format": self.format_number,
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
        if self.thinned is not None:
            document["thinned"] = {
                "save_id": self.thinned.save_id,
                "dropped": list(self.thinned.dropped),
                "tensors": self.thinned.num_tensors,
                "bytes": self.thinned.num_bytes,
            }
        if self.delta is not None:
            document["delta"] = {"base": self.delta.base, "save_id": self.delta.save_id}
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
            per_rank, thinned = raw.pop("per_rank"), raw.pop("thinned", None)
            delta = raw.pop("delta", None)
            raw.pop("format")
            return cls(
                tensors=TensorRecord.by_name(raw.pop("tensors")),
                values=ValueRecord.by_name(raw.pop("values")),
                per_rank=per_rank
                and PerRank(policy=per_rank[0], ranks=tuple(decode_value(value) for value in per_rank[1])),
                user=decode_value(raw.pop("user")),
                integer_keyed=frozenset(raw.pop("integer_keyed")),
                thinned=thinned and _thinned_state(*thinned),
                delta=delta and DeltaBase(*delta),
                **raw,
            )
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise _undecodable(error) from error

    @classmethod
    def read(cls, uri: str | os.PathLike[str]) -> Manifest:
        """Read the manifest of a checkpoint whose data is not read.

        Raises:
            CheckpointError: As for `_native.Checkpoint`, or as for `of`.
        """
        return cls.of(_native.Checkpoint(local_path(uri)))


def _thinned_state(save_id: str, dropped: list[str], num_tensors: int, num_bytes: int) -> ThinnedState:
    return ThinnedState(save_id=save_id, dropped=tuple(dropped), num_tensors=num_tensors, num_bytes=num_bytes)


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
