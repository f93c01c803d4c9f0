"""A storage writer for `torch.distributed.checkpoint.save` that writes Hocket checkpoints."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from hocket.ckpt.document.chunks import Chunk
from hocket.ckpt.document.file_names import (
    data_path,
    entry_name,
    file_metadata,
    parse_compression,
    stored_bytes,
)
from hocket.ckpt.document.manifest import Manifest, SaveSummary
from hocket.ckpt.document.manifest_builder import build_manifest, commit_over
from hocket.ckpt.document.records import PathItem, TensorRecord, ValueRecord
from hocket.ckpt.document.tree import check_encodable
from hocket.ckpt.document.values import canonical, from_canonical
from hocket.ckpt.errors import (
    CheckpointExistsError,
    CheckpointIncompatibleError,
    CheckpointNotFoundError,
    CheckpointStateError,
)
from hocket.ckpt.torch.layout import DTYPES, check_storable
from hocket.ckpt.torch.saving.rank_reports import check_files
from hocket.ckpt.uris import local_path
from hocket.native import _native

if TYPE_CHECKING:
    from hocket.native._native import CkptFile, CkptWritten

__all__ = ["HocketWriter"]


@dataclass(frozen=True, slots=True)
class _Share:
    """Data that the coordinator sends to each rank with its plan."""

    save_id: str
    number: int
    """The rank's position in the list of plans."""


class _Now(threading.local):
    """The running save. torch runs each save in one thread, and may start the next in another."""

    uri: str | None = None
    save_id = ""
    replaces: SaveSummary | None = None


@dataclass(frozen=True, slots=True)
class _Stored:
    """The location of a chunk's bytes. A rank's results share one `file` object, which is sent once."""

    file: CkptFile
    offset: int
    length: int
    size: tuple[int, ...]


class HocketWriter(StorageWriter):
    """A storage writer of Hocket checkpoints for `torch.distributed.checkpoint.save` and `async_save`.

    Each rank writes one data file, directly from the memory of contiguous host tensors; device tensors and
    non-contiguous tensors are all copied first. The plan is torch's, so a tied tensor is written once per
    name. When `save` returns, the checkpoint is committed. When it raises, there is no checkpoint: the files
    of the other ranks remain as `partial`, do not affect a later save of the same name, and are removed by
    `hocket-ckpt gc`. Nothing on disk is pickled: values are limited to those that a Hocket checkpoint
    supports.

    Args:
        path: The checkpoint's folder or URI; `checkpoint_id` replaces it if given.
        step: The step that listings are sorted by. If None, the number at the end of the checkpoint's name,
            or 0.
        user: A plain value to store with the checkpoint; the coordinator's value is used.
        compression: `"zstd:N"` for compressed data files, N from 1 to 22; `"planes+zstd:N"` makes those of
            floating dtypes smaller.
        overwrite: Replace an existing checkpoint atomically; it is refused otherwise.
        unfenced: Also save to a store that ignores or rejects conditional writes, where two savers of one
            name may both succeed; such a store is refused otherwise.

    Raises:
        ValueError: `step` or `compression` is invalid.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> state = {"weight": torch.arange(3.0), "epoch": 1}
        >>> _ = dcp.save(state, checkpoint_id=f"{folder}/step-7", storage_writer=HocketWriter())
        >>> hocket.ckpt.open(f"{folder}/step-7").manifest.step
        7
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        user: object = None,
        compression: str | None = None,
        overwrite: bool = False,
        unfenced: bool = False,
    ) -> None:
        super().__init__()
        if step is not None and (
            isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**64
        ):
            raise ValueError(f"`step` is {step!r:.80}; expected None or an integer from 0 to 2^64 - 1")
        self._uri = None if path is None else _uri(path)
        self._step = step
        self._user = canonical(user, "user")
        self._compression = parse_compression(compression)
        self._overwrite = overwrite
        self._unfenced = unfenced
        self._now = _Now()

    def __repr__(self) -> str:
        return f"<HocketWriter to {self._uri!r}>"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for torch's saving process, which has no running save yet."""
        return {name: value for name, value in vars(self).items() if name != "_now"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._now = _Now()

    @property
    def uri(self) -> str:
        """The checkpoint's folder or URI.

        Raises:
            ValueError: Neither `path` nor `checkpoint_id` was given.
        """
        uri = self._now.uri or self._uri
        if uri is None:
            raise ValueError(
                "the checkpoint to save is not named: expected `HocketWriter(path)`, or `checkpoint_id=` "
                "given to `save`"
            )
        return uri

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another save, to `checkpoint_id` if given."""
        if checkpoint_id is not None:
            self._uri = self._now.uri = _uri(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the id is a path or a URI: any non-empty text."""
        return bool(os.fspath(checkpoint_id))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check how `save` was called.

        Raises:
            CheckpointIncompatibleError: `use_collectives` is False, so no coordinator could commit for all
                ranks.
        """
        if not kwargs.get("use_collectives", True):
            raise CheckpointIncompatibleError(
                "`use_collectives` is False, which leaves each rank with a checkpoint of its own; a Hocket "
                "checkpoint is committed once for all ranks. Leave it True"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check the names and dtypes of a rank's plan before anything is written; return the plan unchanged.

        Raises:
            CheckpointStateError: A name is not valid Unicode, or a tensor cannot be stored in a data file.
        """
        for item in plan.items:
            check_encodable(item.index.fqn)
            if (planned := item.tensor_data) is not None:
                check_storable(item.index.fqn, planned.properties.dtype, planned.size)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check the destination, choose the save id and add it to the plans; runs on the coordinator only.

        Raises:
            CheckpointExistsError: A checkpoint exists, and `overwrite` is False. Nothing was written.
            CheckpointIncompatibleError: The planner caches plans.
        """
        if not all(plan.usable for plan in plans):
            raise CheckpointIncompatibleError(
                "the planner sent plans that it keeps from an earlier save, and with them what was said to "
                "the ranks then. Use `DefaultSavePlanner(enable_plan_caching=False)`"
            )
        current = self._now
        current.replaces, current.save_id = self._found(), secrets.token_hex(16)
        return [replace(plan, storage_data=_Share(current.save_id, i)) for i, plan in enumerate(plans)]

    def _found(self) -> SaveSummary | None:
        try:
            head = json.loads(_native.ckpt_manifest_head(self.uri))
        except CheckpointNotFoundError:
            return None
        if not self._overwrite:
            raise CheckpointExistsError(
                f"`{self.uri}` holds a checkpoint already, of step {head['step']}, saved {head['created']}. "
                f"Nothing was written. Save under another name, or pass `HocketWriter(overwrite=True)`"
            )
        return SaveSummary.read(self.uri)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors into one file and send the values to the coordinator for the manifest.

        Raises:
            CheckpointStateError: A value or a tensor cannot be saved; the message names it.
        """
        share: _Share = plan.storage_data
        values = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        results = [_value(item, planner) for item in values]
        results += self._write(share, [(item, _chunk(item, planner)) for item in tensors])
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write(self, share: _Share, chunks: list[tuple[WriteItem, torch.Tensor]]) -> list[WriteResult]:
        nonempty = [(item, chunk) for item, chunk in chunks if chunk.numel()]
        if not nonempty:
            return []
        written: CkptWritten = _native.ckpt_write_file(
            self.uri,
            data_path(share.save_id, share.number, is_compressed=self._compression is not None),
            entries=[
                (_entry_name(item), DTYPES[chunk.dtype], tuple(chunk.shape), chunk.data_ptr(), chunk.nbytes)
                for item, chunk in nonempty
            ],
            metadata=file_metadata(share.save_id),
            compression=self._compression,
        )
        file: Any = {key: value for key, value in written.items() if key != "entries"}
        results = []
        for item, chunk in nonempty:
            offset, length = written["entries"][_entry_name(item)]
            stored = _Stored(file, offset, length, tuple(chunk.shape))
            results.append(WriteResult(item.index, length, stored))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check that every rank's file exists and commit; runs on the coordinator only.

        Raises:
            CheckpointExistsError: Another save committed first.
            CheckpointNotFoundError: A rank's file is not visible here, because the folder is not shared.
            CheckpointError: The commit failed for another reason.
        """
        files = [_files_of(rank_results) for rank_results in results]
        may_remove = True
        try:
            check_files(
                self.uri,
                [
                    (rank, file["path"], stored_bytes(file))
                    for rank, rank_files in enumerate(files)
                    for file in rank_files
                ],
            )
            manifest = self._manifest(metadata, results, files)
            encoded = _native.ckpt_manifest_encode(manifest.to_document())
            may_remove = False  # the commit may have succeeded and only its response been lost
            self._now.replaces = commit_over(
                self.uri, encoded, manifest.save_id, self._now.replaces, unfenced=self._unfenced
            )
        except BaseException as error:
            if may_remove or isinstance(error, CheckpointExistsError):
                self._remove([file["path"] for rank_files in files for file in rank_files])
            raise
        if self._now.replaces is not None:
            self._remove(self._now.replaces.paths)

    def _remove(self, paths: Sequence[str]) -> None:
        # An orphan is harmless; the save's own error matters more.
        with contextlib.suppress(Exception):
            _native.ckpt_delete_files(self.uri, paths)

    def _manifest(
        self, metadata: Metadata, results: list[list[WriteResult]], rank_files: Sequence[Sequence[CkptFile]]
    ) -> Manifest:
        files = [file for files_of_rank in rank_files for file in files_of_rank]
        numbers = {file["path"]: number for number, file in enumerate(files)}
        chunks: dict[str, list[Chunk]] = {}
        values: dict[str, Any] = {}
        for result in (result for rank_results in results for result in rank_results):
            stored = result.storage_data
            if isinstance(stored, _Stored):
                chunks.setdefault(result.index.fqn, []).append(_placed(result.index, stored, numbers))
            else:
                values[result.index.fqn] = from_canonical(stored)
        paths = _paths(metadata)
        tensors = {
            name: TensorRecord(
                dtype=DTYPES[stored.properties.dtype],
                shape=tuple(stored.size),
                path=paths[name],
            )
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        return build_manifest(
            writer="hocket.ckpt.dcp",
            files=files,
            tensors=tensors,
            chunks=chunks,
            save_id=self._now.save_id,
            step=_step_of(self.uri) if self._step is None else self._step,
            world_size=len(results),
            values={name: ValueRecord(path=paths[name], value=value) for name, value in values.items()},
            user=from_canonical(self._user),
        )


def _uri(path: str | os.PathLike[str]) -> str:
    return local_path(path).rstrip("/") or "/"


def _step_of(uri: str) -> int:
    number = re.search(r"[0-9]{1,18}$", uri.rpartition("/")[2])  # longer numbers are not step counts
    return int(number[0]) if number else 0


def _value(item: WriteItem, planner: SavePlanner) -> WriteResult:
    """Return a value's canonical JSON. The planner supplies values as in-memory pickles."""
    name = item.index.fqn
    pickled = planner.resolve_data(item)
    assert isinstance(pickled, io.BytesIO)
    pickled.seek(0)
    try:
        value = torch.load(pickled, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointStateError(
            f"`{name}` holds a value that a checkpoint cannot store: expected None, bool, int, float, str, "
            f"bytes, or a tuple, list or dict of these. Turn it into them in `state_dict()`. ({error!s:.200})"
        ) from error
    text = canonical(value, name)
    return WriteResult(item.index, len(text), text)


def _chunk(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    """Return a chunk in host memory, in C order."""
    name, planned = item.index.fqn, item.tensor_data
    chunk = planner.resolve_data(item)
    assert isinstance(chunk, torch.Tensor)
    assert planned is not None
    if chunk.dtype not in DTYPES or chunk.dtype != planned.properties.dtype:
        raise CheckpointStateError(
            f"`{name}` has dtype `{chunk.dtype}`; expected the planned `{planned.properties.dtype}`, and one "
            f"that safetensors has a name for"
        )
    if chunk.layout is not torch.strided or chunk.is_meta or chunk.shape != planned.chunk.sizes:
        raise CheckpointStateError(
            f"`{name}` is {list(chunk.shape)}, of layout `{chunk.layout}`, on `{chunk.device}`; expected the "
            f"planned {list(planned.chunk.sizes)}, dense, with memory"
        )
    return chunk.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _entry_name(item: WriteItem) -> str:
    """Return an entry's name in the data file: the tensor's name, plus the offsets unless it is whole."""
    assert item.tensor_data is not None
    chunk, size = item.tensor_data.chunk, item.tensor_data.size
    return entry_name(item.index.fqn, tuple(chunk.offsets), is_whole=chunk.sizes == size)


def _files_of(results: Sequence[WriteResult]) -> list[CkptFile]:
    return [result.storage_data.file for result in results if isinstance(result.storage_data, _Stored)][:1]


def _placed(index: MetadataIndex, stored: _Stored, numbers: dict[str, int]) -> Chunk:
    # A plain tensor has no offset in its index and is always whole.
    start = tuple(index.offset) if index.offset is not None else (0,) * len(stored.size)
    file = numbers[stored.file["path"]]
    return Chunk(file=file, offset=stored.offset, length=stored.length, start=start, size=stored.size)


def _paths(metadata: Metadata) -> dict[str, tuple[PathItem, ...]]:
    """Return the path of each leaf in the tree; a planner that does not flatten trees has only names."""
    paths = metadata.planner_data or {}
    return {name: tuple(paths.get(name, (name,))) for name in metadata.state_dict_metadata}
