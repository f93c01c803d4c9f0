"""A storage reader for `torch.distributed.checkpoint.load`."""

import io
import logging
import os
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from hocket.ckpt.document.planning import Box
from hocket.ckpt.errors import CheckpointIncompatibleError
from hocket.ckpt.gc_pause import gc_paused
from hocket.ckpt.read.opener import open as open_checkpoint
from hocket.ckpt.read.reader import Checkpoint, replaced_error
from hocket.ckpt.torch.layout import torch_dtype
from hocket.ckpt.torch.loading.overlap import refuse_overlaps
from hocket.ckpt.torch.loading.tensor_reads import BoxTarget, plan_reads, read_into

__all__ = ["HocketReader"]

_log = logging.getLogger(__name__)


class HocketReader(StorageReader):
    """A storage reader for Hocket checkpoints and all other formats that `open` reads.

    Each rank reads the ranges that its own shards need, whatever the number of ranks that saved. torch wraps
    the errors of all ranks into a `CheckpointException` that is raised on every rank; its `failures` hold the
    exceptions that are listed here. An error of `read_metadata` appears there as an AssertionError with the
    same message.

    Args:
        path: The checkpoint's folder, file or URI; `checkpoint_id` replaces it if given.
        cast: Convert between dtypes. If False, a difference is an error; torch's own reader converts
            silently.
        check: Verify the digest of each block that is read. Other formats have no digests.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> state = {"weight": torch.zeros(3), "epoch": 0}
        >>> dcp.load(state, checkpoint_id=f"{folder}/step-7", storage_reader=HocketReader())
        >>> state
        {'weight': tensor([0., 1., 2.]), 'epoch': 1}
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, cast: bool = False, check: bool = True
    ) -> None:
        super().__init__()
        self._uri = None if path is None else os.fspath(path)
        self._cast = cast
        self._check = check
        self._checkpoint: Checkpoint | None = None

    def __repr__(self) -> str:
        return f"<HocketReader of {self._uri!r}>"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another load, from `checkpoint_id` if given."""
        if checkpoint_id is not None:
            self._uri = os.fspath(checkpoint_id)
        self._checkpoint = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the id is a path or a URI: any non-empty text."""
        return bool(os.fspath(checkpoint_id))

    def read_metadata(self) -> Metadata:
        """Open the checkpoint and describe it to the planner, with each tensor as a single chunk.

        Raises:
            ValueError: Neither `path` nor `checkpoint_id` was given.
            CheckpointNotFoundError: There is no checkpoint; a `CheckpointPartialError` if the save never
                finished.
            CheckpointCorruptError: The manifest, or its counterpart in another format, is corrupt.
            CheckpointIncompatibleError: A later format, or a dtype that this version of torch lacks.
        """
        if self._uri is None:
            raise ValueError(
                "the checkpoint to load is not named: expected `HocketReader(path)`, or `checkpoint_id=` "
                "given to `load`"
            )
        self._checkpoint = open_checkpoint(self._uri, check=self._check)
        contents = self._checkpoint.contents
        if contents.thinned is not None:
            # The planner names a missing key, and cannot know why it is missing.
            _log.warning(
                "`%s` was thinned: %s were dropped from it, so it loads as weights",
                self._uri,
                ", ".join(f"`{glob}`" for glob in contents.thinned.dropped),
            )
        described: dict[str, Any] = {name: BytesStorageMetadata() for name in contents.values}
        for name, record in contents.tensors.items():
            size = torch.Size(record.shape)
            # The chunks that a box needs are looked up when it is read, so plans do not list them.
            whole_chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
            properties = TensorProperties(dtype=torch_dtype(record.dtype, name))
            described[name] = TensorStorageMetadata(properties=properties, size=size, chunks=[whole_chunk])
        paths = {name: tensor.path for name, tensor in contents.tensors.items()}
        paths |= {name: value.path for name, value in contents.values.items()}
        return Metadata(state_dict_metadata=described, planner_data=paths)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Record in a rank's plan which save it reads."""
        assert self._checkpoint is not None, "plans come after `read_metadata`"
        return replace(plan, storage_data=self._checkpoint.contents.save_id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged, after a check that all ranks read the same save.

        Raises:
            CheckpointNotFoundError: Ranks read different saves, because the checkpoint was replaced.
        """
        if len({plan.storage_data for plan in plans}) > 1:
            raise replaced_error(str(self._uri))
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank's plan in parallel, directly into place if possible.

        Raises:
            CheckpointIncompatibleError: A dtype differs, and `cast` is False. Nothing was read.
            CheckpointStateError: Two tensors overlap partially in memory. Nothing was read.
            CheckpointCorruptError: A block does not match its digest; the message names tensor, file and
                offset.
        """
        checkpoint = self._checkpoint
        assert checkpoint is not None, "`read_data` comes after `read_metadata`"
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        targets = [_target(checkpoint, item, planner) for item in tensors]
        refuse_overlaps((target.name, target.local) for target in targets)
        if not self._cast:
            _refuse_casts(checkpoint, targets)
        checkpoint.check_expansion([(target.name, target.box) for target in targets])
        with checkpoint.one_save():
            with gc_paused():
                reads = plan_reads(targets)
            read_into(checkpoint, reads, check=self._check)
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target.local)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pickled(checkpoint.contents.values[item.storage_index.fqn].value))
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _target(checkpoint: Checkpoint, item: ReadItem, planner: LoadPlanner) -> BoxTarget:
    name = item.storage_index.fqn
    local = planner.resolve_tensor(item).detach()
    return BoxTarget(
        name, checkpoint.record(name), local, Box(tuple(item.storage_offsets), tuple(item.lengths))
    )


def _refuse_casts(checkpoint: Checkpoint, targets: list[BoxTarget]) -> None:
    different = [
        f"`{target.name}` is {target.record.dtype} there and {target.local.dtype} here"
        for target in targets
        if torch_dtype(target.record.dtype, target.name) != target.local.dtype
    ]
    if different:
        suffix = f"; and {len(different) - 5} more" if len(different) > 5 else ""
        raise CheckpointIncompatibleError(
            f"`{checkpoint.uri}` does not fit: {'; '.join(different[:5])}{suffix}. "
            f"Pass `HocketReader(cast=True)` to convert"
        )


def _pickled(value: object) -> io.BytesIO:
    """Return a plain value as an in-memory pickle, as planners expect it."""
    pickled = io.BytesIO()
    torch.save(value, pickled)
    pickled.seek(0)
    return pickled
