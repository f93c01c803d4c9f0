"""From the manifest's chunks to this rank's memory: which bytes to read, and where they go."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from hocket.ckpt.chunks import near
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointIncompatibleError, CheckpointStateError
from hocket.ckpt.manifest import Chunk, Manifest, TensorRecord
from hocket.ckpt.overlap import overlap
from hocket.ckpt.owners import told
from hocket.ckpt.planning import Box
from hocket.ckpt.torch.layout import TensorInfo, describe, torch_dtype
from hocket.ckpt.tree import Leaf
from hocket.native import _native

__all__ = ["SCRATCH_BYTES", "Fill", "Target", "destinations", "fill", "read_into"]

SCRATCH_BYTES = 256 << 20
"""Bytes that are read beside their destination at a time, before they are scattered into it."""


class Fill(NamedTuple):
    """A tensor to fill."""

    name: str
    origin: str
    """The checkpoint's tensor: another name where this one shares its storage."""
    record: TensorRecord
    tensor: torch.Tensor


class Target(NamedTuple):
    """Memory to fill with a box of a tensor."""

    name: str
    record: TensorRecord
    local: torch.Tensor
    """Of the box's shape, with any strides, on any device."""
    box: Box


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """Bytes of a chunk in one run, whole rows of it, and the part of a tensor's memory that they fill."""

    name: str
    chunk: Chunk
    offset: int
    num_bytes: int
    rows: tuple[int, ...]
    """Shape of what is read."""
    skip: tuple[int, ...]
    """Where in that shape the wanted part begins."""
    target: torch.Tensor
    """The wanted part of the destination, a view."""
    dtype: torch.dtype
    """Of the bytes."""

    @property
    def is_direct(self) -> bool:
        """Whether the bytes are the destination's as they are."""
        target = self.target
        return (
            self.rows == tuple(target.shape)
            and target.dtype == self.dtype
            and target.device.type == "cpu"
            and target.is_contiguous()
            and not (target.is_conj() or target.is_neg())
        )


def destinations(fills: Sequence[Fill], *, rank: int, world_size: int) -> list[TensorInfo]:
    """Describes the tensors to fill, in their order.

    Raises:
        CheckpointStateError: One cannot be filled: as `describe`, or several of its items lie in one place.
    """
    infos = describe(
        {fill.name: Leaf(fill.name, (), fill.tensor) for fill in fills}, rank=rank, world_size=world_size
    )
    for info in infos:
        steps = zip(info.local.shape, info.local.stride(), strict=True)
        if info.local.numel() and any(size > 1 and stride == 0 for size, stride in steps):
            raise CheckpointStateError(
                f"`{info.name}` is expanded: many of its items lie in one place in memory, and cannot be "
                "filled each with its own. Load into its `.contiguous()`."
            )
    return infos


def fill(
    uri: str, manifest: Manifest, fills: Sequence[Fill], *, rank: int, world_size: int, check: bool
) -> None:
    """Reads this rank's part of tensors into their memory.

    Contiguous runs go straight to their place; what has to be scattered, converted or moved to a device goes
    through scratch memory, `SCRATCH_BYTES` at a time.

    Raises:
        CheckpointCorruptError: A block is not what was written; the message names the tensor, the file and
            the offset. The tensors' content is then undefined.
        CheckpointIncompatibleError: Two tensors of the checkpoint would go into one memory.
        CheckpointStateError: A tensor cannot be filled: see `destinations`.
    """
    infos = destinations(fills, rank=rank, world_size=world_size)
    origins = {fill.name: fill.origin for fill in fills}
    targets = []
    for wanted, info in zip(fills, infos, strict=True):
        if info.same_as is None:
            if info.box is not None:
                targets.append(Target(wanted.name, wanted.record, info.local, info.box))
        elif origins[info.same_as] != wanted.origin:
            raise CheckpointIncompatibleError(
                f"`{info.same_as}` and `{info.name}` share their memory here, but are two tensors in "
                f"`{uri}`. Untie them to load it, or load one of them by `include=`."
            )
    read_into(uri, manifest, targets, check=check)


def read_into(uri: str, manifest: Manifest, targets: Sequence[Target], *, check: bool) -> None:
    """Reads boxes of tensors into memory. Raises as `fill`."""
    reads: list[_Read] = []
    for target in targets:
        if target.record.data is not None:
            _copy_inlined(target)
        elif target.box.num_items:
            reads.extend(_reads(target))
    direct = [read for read in reads if read.is_direct]
    _run(uri, manifest, direct, [read.target.data_ptr() for read in direct], check=check)
    for batch in _batches([read for read in reads if not read.is_direct]):
        scratch = [torch.empty(read.rows, dtype=read.dtype) for read in batch]
        _run(uri, manifest, batch, [tensor.data_ptr() for tensor in scratch], check=check)
        for read, rows in zip(batch, scratch, strict=True):
            read.target.copy_(_part(rows, read.skip, tuple(read.target.shape)))


def _copy_inlined(target: Target) -> None:
    record = target.record
    assert record.data is not None
    whole = torch.frombuffer(bytearray(record.data), dtype=torch_dtype(record.dtype, target.name))
    target.local.copy_(_part(whole.reshape(record.shape), *target.box))


def _part(tensor: torch.Tensor, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    for dim, (begin, length) in enumerate(zip(start, size, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, begin, length)
    return tensor


def _reads(target: Target) -> Iterator[_Read]:
    """What of each chunk lies in the box, as runs of whole rows of the chunk."""
    dtype, box = torch_dtype(target.record.dtype, target.name), target.box
    for chunk in near(target.record.chunks, *box):
        shared = overlap(chunk, box)
        if shared is None:
            continue
        begin = [s - b for s, b in zip(shared.box.start, box.start, strict=True)]
        yield _Read(
            name=target.name,
            chunk=chunk,
            offset=chunk.offset + shared.first * dtype.itemsize,
            num_bytes=shared.num_items * dtype.itemsize,
            rows=shared.rows,
            skip=shared.skip,
            target=_part(target.local, begin, shared.box.size),
            dtype=dtype,
        )


def _batches(reads: Sequence[_Read]) -> Iterator[list[_Read]]:
    batch: list[_Read] = []
    total = 0
    for read in itertools.chain.from_iterable(map(_pieces, reads)):
        if batch and total + read.num_bytes > SCRATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(read)
        total += read.num_bytes
    if batch:
        yield batch


def _pieces(read: _Read) -> Iterator[_Read]:
    """Cuts a read that is larger than the scratch memory, along its first dim that can be cut."""
    dim = next((dim for dim, length in enumerate(read.target.shape) if length > 1), None)
    if read.num_bytes <= SCRATCH_BYTES or dim is None:
        yield read
        return
    # Of the dims before it one row is read, so that a row of this one is one run.
    row_bytes = read.num_bytes // read.rows[dim]
    step = max(1, SCRATCH_BYTES // row_bytes)
    for row in range(0, read.target.shape[dim], step):
        num_rows = min(step, read.target.shape[dim] - row)
        piece = replace(
            read,
            offset=read.offset + (read.skip[dim] + row) * row_bytes,
            num_bytes=num_rows * row_bytes,
            rows=(*read.rows[:dim], num_rows, *read.rows[dim + 1 :]),
            skip=(*read.skip[:dim], 0, *read.skip[dim + 1 :]),
            target=read.target.narrow(dim, row, num_rows),
        )
        yield from _pieces(piece)


def _run(
    uri: str, manifest: Manifest, reads: Sequence[_Read], addresses: Sequence[int], *, check: bool
) -> None:
    if not reads:
        return
    try:
        _native.ckpt_read(
            uri,
            manifest.files,
            [
                (read.chunk.file, read.offset, read.num_bytes, address)
                for read, address in zip(reads, addresses, strict=True)
            ],
            check=check,
        )
    except CheckpointCorruptError as error:
        of = told(manifest, error.file, error.offset)
        raise CheckpointCorruptError(f"{of}: {error}", error.file, error.offset) from error
