"""Read planning: maps the manifest's chunks to byte ranges to read and to their destinations in memory."""

from collections.abc import Iterable, Iterator, Sequence
from operator import sub
from typing import NamedTuple

import torch

from hocket.ckpt.document.boxes import BoxRead, index_of, pieces
from hocket.ckpt.document.chunks import Chunk, files_of
from hocket.ckpt.document.dtypes import ITEM_BYTES
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.document.planning import Box
from hocket.ckpt.document.records import RANK_VALUES_NODE, TensorRecord
from hocket.ckpt.document.tree import TreeLeaf
from hocket.ckpt.errors import CheckpointIncompatibleError, CheckpointStateError
from hocket.ckpt.gc_pause import gc_paused
from hocket.ckpt.read.reader import Checkpoint
from hocket.ckpt.torch.layout import TensorInfo, describe, torch_dtype
from hocket.ckpt.torch.loading.overlap import refuse_overlaps

__all__ = [
    "SCRATCH_BYTES",
    "BoxTarget",
    "TensorFill",
    "batches",
    "destinations",
    "fill",
    "needed_files",
    "plan_reads",
    "read_into",
]

SCRATCH_BYTES = 256 << 20
"""Limit of the scratch memory for bytes that cannot be read directly into their destination."""


class TensorFill(NamedTuple):
    """A tensor to load."""

    name: str
    origin: str
    """The name of the tensor in the checkpoint that owns the storage; differs from `name` for an alias."""
    record: TensorRecord
    tensor: torch.Tensor


class BoxTarget(NamedTuple):
    """A destination in memory for one box of a tensor."""

    name: str
    record: TensorRecord
    local: torch.Tensor
    """The destination: of the box's shape, with any strides, on any device."""
    box: Box


def destinations(fills: Sequence[TensorFill], *, rank: int, world_size: int) -> list[TensorInfo]:
    """Describe the tensors to load, in order.

    Raises:
        CheckpointStateError: A tensor cannot be loaded into: as for `describe`, several of its items share
            one memory location, or it overlaps another tensor partially.
    """
    infos = describe(
        {fill.name: TreeLeaf(fill.name, (), fill.tensor) for fill in fills}, rank=rank, world_size=world_size
    )
    for info in infos:
        steps = zip(info.local.shape, info.local.stride(), strict=True)
        if info.local.numel() and any(size > 1 and stride == 0 for size, stride in steps):
            raise CheckpointStateError(
                f"`{info.name}` is an expanded view: several of its elements share memory and cannot be "
                "loaded separately. Load into its `.contiguous()`"
            )
    refuse_overlaps((info.name, info.local) for info in infos if info.same_as is None)
    return infos


def fill(
    checkpoint: Checkpoint, fills: Sequence[TensorFill], *, rank: int, world_size: int, check: bool
) -> None:
    """Read this rank's parts of tensors into their memory.

    Contiguous ranges are read directly into place. Data that must be scattered, converted or moved to a
    device goes through scratch memory of `SCRATCH_BYTES`.

    Raises:
        CheckpointCorruptError: A block does not match its digest; the message names the tensor, the file and
            the offset. The tensors' contents are then undefined.
        CheckpointIncompatibleError: Two tensors of the checkpoint would be read into the same memory.
        CheckpointStateError: A tensor cannot be loaded into: see `destinations`.
    """
    with gc_paused():
        infos = destinations(fills, rank=rank, world_size=world_size)
        origins = {fill.name: fill.origin for fill in fills}
        targets = []
        for wanted, info in zip(fills, infos, strict=True):
            if info.same_as is None:
                if info.box is not None:
                    targets.append(BoxTarget(wanted.origin, wanted.record, info.local, info.box))
            elif origins[info.same_as] != wanted.origin:
                raise CheckpointIncompatibleError(
                    f"`{info.same_as}` and `{info.name}` share their memory here, but are two tensors in "
                    f"`{checkpoint.uri}`. Untie them to load it, or load one of them by `include=`"
                )
        plan = plan_reads(targets)
    read_into(checkpoint, plan, check=check)


def needed_files(manifest: Manifest, fills: Sequence[TensorFill], *, rank: int, world_size: int) -> list[str]:
    """Return the paths of the data files with bytes for this rank, in the manifest's order.

    Args:
        manifest: The checkpoint's manifest.
        fills: The tensors to load.
        rank: This rank.
        world_size: The number of ranks that load.

    Raises:
        CheckpointStateError: As for `destinations`.
    """
    numbers: set[int] = set()
    infos = destinations(fills, rank=rank, world_size=world_size)
    for fill, info in zip(fills, infos, strict=True):
        if info.box is not None and 0 not in info.box.size:
            numbers.update(
                chunk.file
                for chunk in fill.record.chunks
                if chunk.file not in numbers and _overlap(chunk, info.box)
            )
    own = manifest.tensors.get(f"{RANK_VALUES_NODE}.{rank}")
    if own is not None and manifest.per_rank is not None and len(manifest.per_rank.ranks) == world_size:
        numbers.update(files_of(own.chunks))
    return [manifest.files[number]["path"] for number in sorted(numbers)]


def _overlap(chunk: Chunk, box: Box) -> bool:
    return all(
        first < start + size and start < first + length
        for first, length, start, size in zip(chunk.start, chunk.size, box.start, box.size, strict=True)
    )


class ReadPlan(NamedTuple):
    """The reads of boxes of tensors into memory."""

    in_place: list[BoxTarget]
    """Boxes that are stored as their memory holds them."""
    staged: list[BoxTarget]
    """Boxes that are read into scratch memory: they are converted, moved to a device, or share memory."""


def plan_reads(targets: Sequence[BoxTarget]) -> ReadPlan:
    """Plan the reads of boxes.

    Of several boxes with the same memory, such as a matrix and its transpose, one is read in place: its
    digests are checked there, so no other read may write to it meanwhile.
    """
    plan = ReadPlan([], [])
    addresses = set()
    for target in targets:
        if 0 not in target.box.size:
            address = target.local.data_ptr()
            is_in_place = _is_host_memory(target) and address not in addresses
            addresses.add(address)
            (plan.in_place if is_in_place else plan.staged).append(target)
    return plan


def read_into(checkpoint: Checkpoint, plan: ReadPlan, *, check: bool) -> None:
    """Read the boxes of a plan into memory.

    Raises:
        CheckpointError: As for `fill`.
    """

    def read(targets: Sequence[BoxTarget]) -> None:
        boxes = [_box_read(target) for target in targets]
        checkpoint.read_boxes(boxes, check=check, scratch_bytes=SCRATCH_BYTES // 2)

    read(plan.in_place)
    for batch in batches(plan.staged, SCRATCH_BYTES // 2):
        scratch = [torch.empty(part.box.size, dtype=_stored_dtype(part), device="cpu") for part in batch]
        read([part._replace(local=tensor) for part, tensor in zip(batch, scratch, strict=True)])
        for part, tensor in zip(batch, scratch, strict=True):
            part.local.copy_(tensor)


def batches(targets: Iterable[BoxTarget], limit: int) -> Iterator[list[BoxTarget]]:
    """Yield the targets in batches of at most `limit` bytes; larger targets are split."""
    batch: list[BoxTarget] = []
    total = 0
    for target in targets:
        item_bytes = ITEM_BYTES[target.record.dtype]
        for box in pieces(target.box, item_bytes, limit):
            num_bytes = box.num_items * item_bytes
            if batch and total + num_bytes > limit:
                yield batch
                batch, total = [], 0
            start = tuple(map(sub, box.start, target.box.start))
            batch.append(target._replace(local=target.local[index_of(start, box.size)], box=box))
            total += num_bytes
    if batch:
        yield batch


def _stored_dtype(target: BoxTarget) -> torch.dtype:
    return torch_dtype(target.record.dtype, target.name)


def _is_host_memory(target: BoxTarget) -> bool:
    """Return whether the destination has the stored bytes' form and can be read into by the CPU."""
    local = target.local
    is_lazy = local.is_conj() or local.is_neg()
    return local.device.type == "cpu" and not is_lazy and local.dtype == _stored_dtype(target)


def _box_read(target: BoxTarget) -> BoxRead:
    """Return the read that fills a target in host memory."""
    local = target.local
    strides = None if local.is_contiguous() else [stride * local.itemsize for stride in local.stride()]
    return target.name, target.box.start, target.box.size, local.data_ptr(), strides
