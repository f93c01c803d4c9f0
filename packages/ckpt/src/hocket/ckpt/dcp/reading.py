"""What `torch.distributed.checkpoint.load` calls to read any checkpoint that Hocket opens."""

import io
import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from operator import add
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

from hocket.ckpt.errors import CheckpointIncompatibleError
from hocket.ckpt.formats.boxes import index_of, pieces
from hocket.ckpt.formats.catalogue import Catalogue
from hocket.ckpt.formats.foreign import Foreign
from hocket.ckpt.manifest import ITEM_BYTES
from hocket.ckpt.planning import Box
from hocket.ckpt.reader import Checkpoint, of_one_save, replaced_error
from hocket.ckpt.reader import open as open_checkpoint
from hocket.ckpt.torch.filling import SCRATCH_BYTES, Target, read_into
from hocket.ckpt.torch.layout import torch_dtype

__all__ = ["HocketReader"]


class HocketReader(StorageReader):
    """Reads a checkpoint for `torch.distributed.checkpoint.load`: Hocket's, and others that `open` knows.

    Each rank reads what its own shards need, whatever the number of ranks that saved. torch wraps an error of
    any rank into its `CheckpointException`, raised on all; what is told here is in its `failures`. One of
    `read_metadata` is there as an AssertionError with this one's message.

    Args:
        path: The checkpoint's folder, file or URI; `checkpoint_id` takes its place where it is given.
        cast: Convert dtypes that differ, which is refused otherwise (and by torch's own reader done
            silently).
        check: Verify the digest of each block that is read. Other formats have none.

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

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins another load; a `checkpoint_id` says from where."""
        if checkpoint_id is not None:
            self._uri = os.fspath(checkpoint_id)
        self._checkpoint = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path or a URI: any text that is not empty."""
        return bool(os.fspath(checkpoint_id))

    def read_metadata(self) -> Metadata:
        """Opens the checkpoint and describes it to the planner, which sees each tensor as one chunk.

        Raises:
            ValueError: Nobody has said where it is.
            CheckpointNotFoundError: There is none; a `CheckpointPartialError` where the save never finished.
            CheckpointCorruptError: Its manifest, or what another format has in its place, is not sound.
            CheckpointIncompatibleError: A later format, or a dtype that this torch does not have.
        """
        if self._uri is None:
            raise ValueError(
                "no place to load from: expected `HocketReader(path)`, or `checkpoint_id=` given to `load`"
            )
        self._checkpoint = open_checkpoint(self._uri, check=self._check)
        contents = self._checkpoint.contents
        described: dict[str, Any] = {name: BytesStorageMetadata() for name in contents.values}
        for name, record in contents.tensors.items():
            size = torch.Size(record.shape)
            # Which chunks a box needs is found when it is read: plans then need not name them.
            whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
            properties = TensorProperties(dtype=torch_dtype(record.dtype, name))
            described[name] = TensorStorageMetadata(properties=properties, size=size, chunks=[whole])
        paths = {name: tensor.path for name, tensor in contents.tensors.items()}
        paths |= {name: value.path for name, value in contents.values.items()}
        return Metadata(state_dict_metadata=described, planner_data=paths)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing: the checkpoint is open since `read_metadata`."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Notes in a rank's plan which save it reads."""
        assert self._checkpoint is not None, "plans come after `read_metadata`"
        contents = self._checkpoint.contents
        save = contents.digest if isinstance(contents, Catalogue) else contents.save_id
        return replace(plan, storage_data=save)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leaves the plans as they are, where all ranks read the same save.

        Raises:
            CheckpointNotFoundError: They do not: the checkpoint was replaced meanwhile.
        """
        if len({plan.storage_data for plan in plans}) > 1:
            raise replaced_error(str(self._uri))
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what this rank's plan asks for, in parallel and straight to its place where it can.

        Raises:
            CheckpointIncompatibleError: A dtype differs, and `cast` is False. Nothing was read.
            CheckpointCorruptError: A block is not what was written; tensor, file and offset are named.
        """
        checkpoint = self._checkpoint
        assert checkpoint is not None, "`read_data` comes after `read_metadata`"
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        targets = [_target(checkpoint, item, planner) for item in tensors]
        if not self._cast:
            _refuse_casts(checkpoint, targets)
        if isinstance(checkpoint, Foreign):
            _fill_from_arrays(checkpoint, targets)
        else:
            with of_one_save(checkpoint.uri, checkpoint.manifest.save_id):
                read_into(checkpoint.uri, checkpoint.manifest, targets, check=self._check)
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target.local)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pickled(checkpoint.contents.values[item.storage_index.fqn].value))
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _target(checkpoint: Checkpoint, item: ReadItem, planner: LoadPlanner) -> Target:
    name = item.storage_index.fqn
    local = planner.resolve_tensor(item).detach()
    return Target(name, checkpoint.record(name), local, Box(tuple(item.storage_offsets), tuple(item.lengths)))


def _refuse_casts(checkpoint: Checkpoint, targets: list[Target]) -> None:
    different = [
        f"`{target.name}` is {target.record.dtype} there and {target.local.dtype} here"
        for target in targets
        if torch_dtype(target.record.dtype, target.name) != target.local.dtype
    ]
    if different:
        more = f"; and {len(different) - 5} more" if len(different) > 5 else ""
        raise CheckpointIncompatibleError(
            f"`{checkpoint.uri}` does not fit: {'; '.join(different[:5])}{more}. "
            f"Pass `HocketReader(cast=True)` to convert."
        )


def _fill_from_arrays(checkpoint: Checkpoint, targets: list[Target]) -> None:
    """Other formats, by way of arrays; a bounded number of bytes at a time."""
    for batch in _batches(targets):
        wanted = [(target.name, target.box) for target in batch]
        for target, array in zip(batch, checkpoint.read(wanted), strict=True):
            # As bytes: NumPy's names of bf16 and fp8 mean nothing to torch.
            flat = torch.from_numpy(array.reshape(-1).view("u1"))
            dtype = torch_dtype(target.record.dtype, target.name)
            target.local.copy_(flat.view(dtype).reshape(array.shape))


def _batches(targets: list[Target]) -> Iterator[list[Target]]:
    batch: list[Target] = []
    total = 0
    for target in itertools.chain.from_iterable(map(_pieces, targets)):
        num_bytes = target.box.num_items * ITEM_BYTES[target.record.dtype]
        if batch and total + num_bytes > SCRATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(target)
        total += num_bytes
    if batch:
        yield batch


def _pieces(target: Target) -> Iterator[Target]:
    """Cuts a target that is larger than the scratch memory."""
    for piece in pieces(target.box.size, ITEM_BYTES[target.record.dtype], SCRATCH_BYTES):
        box = Box(tuple(map(add, target.box.start, piece.start)), piece.size)
        yield target._replace(local=target.local[index_of(*piece)], box=box)


def _pickled(value: object) -> io.BytesIO:
    """A plain value as planners take it; only in memory."""
    pickled = io.BytesIO()
    torch.save(value, pickled)
    pickled.seek(0)
    return pickled
