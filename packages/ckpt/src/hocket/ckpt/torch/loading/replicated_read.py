"""Loads in which one rank reads each replicated part and sends it to the other ranks that hold it.

Every rank computes the same assignment of parts to readers, as in a save. All ranks first read and report
the outcome through the coordinator. Only if every rank succeeded are tensors sent, point to point over the
job's process group; no group is created for the ranks that hold one part.
"""

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from hocket.ckpt.document.planning import boxes
from hocket.ckpt.errors import CheckpointError, CheckpointIncompatibleError
from hocket.ckpt.gc_pause import gc_paused
from hocket.ckpt.read.reader import Checkpoint
from hocket.ckpt.torch.layout import TensorInfo
from hocket.ckpt.torch.loading.tensor_reads import SCRATCH_BYTES, TensorFill, destinations, fill
from hocket.ckpt.torch.ranks.coordinator import Coordinator
from hocket.ckpt.torch.ranks.error_propagation import agree
from hocket.native import _native

__all__ = ["fill_sharing"]


class _Share(NamedTuple):
    """A replicated part that this rank holds, and the rank that reads it."""

    info: TensorInfo
    reader: int
    holders: tuple[int, ...]
    batch: int
    """Parts with the same batch number are sent together; the same on all ranks."""


def fill_sharing(
    checkpoint: Checkpoint,
    fills: Sequence[TensorFill],
    *,
    coordinator: Coordinator,
    key: str,
    timeout_s: float,
    check: bool,
) -> None:
    """Load tensors as `fill` does, but read each replicated part on one rank only; collective.

    Tensors on a device that the process group has no backend for (CPU tensors under NCCL alone) are read by
    every rank.

    Args:
        checkpoint: The checkpoint, opened.
        fills: The tensors, the same and in the same order on all ranks.
        coordinator: The coordinator of the ranks.
        key: Identifier of this load; the same on all ranks, and used once.
        timeout_s: Seconds to wait for a late rank.
        check: Verify the digest of each block that is read.

    Raises:
        CheckpointError: Reading failed on this rank or on the rank that the message names, or the ranks hold
            different trees. No tensor was sent.
    """
    rank, world_size = coordinator.rank, coordinator.world_size
    shares: list[_Share] = []
    failed: BaseException | None = None
    is_compared = False
    try:
        with gc_paused():
            infos = destinations(fills, rank=rank, world_size=world_size)
        signatures = [[*info.signature[2:], info.name, info.local.device.type] for info in infos]
        digest = _native.xxh3_128(json.dumps(signatures, default=str).encode()).hex()
        _compare(coordinator, key, digest, timeout_s)
        is_compared = True
        shares = list(_shares(infos, rank, world_size))
        received_names = {share.info.name for share in shares if share.reader != rank}
        names = {info.name for info in infos if (info.same_as or info.name) not in received_names}
        own_fills = [fill for fill in fills if fill.name in names]
        with checkpoint.one_save():
            fill(checkpoint, own_fills, rank=rank, world_size=world_size, check=check)
    except BaseException as error:  # noqa: BLE001 - reported to the other ranks, then raised
        failed = error
        if coordinator.is_rank_0 and not is_compared:
            coordinator.post(f"{key}/tree", b"")
    agree(coordinator, f"{key}/read", failed, timeout_s=timeout_s, what=f"load of `{checkpoint.uri}`")
    if coordinator.is_rank_0:
        coordinator.forget(f"{key}/tree")
    _exchange(shares, rank)


def _compare(coordinator: Coordinator, key: str, digest: str, timeout_s: float) -> None:
    if coordinator.is_rank_0:
        coordinator.post(f"{key}/tree", digest.encode())
        return
    text = coordinator.receive(f"{key}/tree", timeout_s=timeout_s, what="which tensors it loads")
    if text.decode() == digest:
        return
    if not text:
        raise CheckpointError("rank 0 failed; its own error names the cause")
    raise CheckpointIncompatibleError(
        "this rank loads other tensors than rank 0, or in another order, and so cannot share what is read. "
        "Load the same tree on all ranks, or pass `read_once=False`"
    )


def _shares(infos: Sequence[TensorInfo], rank: int, world_size: int) -> Iterator[_Share]:
    """Yield the replicated parts of this rank, with readers chosen to balance the bytes read."""
    devices = {device.type for device in dist.distributed_c10d._get_default_group()._device_types}
    loads = [0] * world_size
    total = 0
    for info in infos:
        if info.same_as is not None or info.local.device.type not in devices:
            continue
        largest = 0
        for box, holders in boxes(info.shape, info.placing):
            num_bytes = box.num_items * info.item_bytes
            largest = max(largest, num_bytes)
            reader = min(holders, key=lambda holder: (loads[holder], holder))
            loads[reader] += num_bytes
            if len(holders) > 1 and rank in holders:
                yield _Share(info, reader, holders, total // SCRATCH_BYTES)
        total += largest


def _exchange(shares: Sequence[_Share], rank: int) -> None:
    """Send the parts that this rank read and receive the others, one batch at a time."""
    for number in sorted({share.batch for share in shares}):
        transfers, received = [], []
        for share in shares:
            if share.batch != number:
                continue
            local = share.info.local
            is_plain = local.is_contiguous() and not (local.is_conj() or local.is_neg())
            buffer = (
                local.resolve_conj().resolve_neg().contiguous()
                if share.reader == rank or is_plain
                else torch.empty(local.shape, dtype=local.dtype, device=local.device)
            )
            flat = buffer.view(-1).view(torch.uint8)  # no backend has all dtypes
            if share.reader == rank:
                others = [holder for holder in share.holders if holder != rank]
                transfers += [dist.P2POp(dist.isend, flat, holder) for holder in others]
            else:
                transfers.append(dist.P2POp(dist.irecv, flat, share.reader))
                received.append((local, buffer))
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        for local, buffer in received:
            if buffer is not local:
                local.copy_(buffer)
