"""Save planning: a state tree flattened into parts, and the staging of this rank's bytes."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hocket.ckpt.document.file_names import entry_name, in_entry_order
from hocket.ckpt.document.manifest import INLINE_BYTES, INLINE_TOTAL_BYTES
from hocket.ckpt.document.planning import Box, PlannedTensor, WrittenPart, plan_parts
from hocket.ckpt.document.tree import Path, flatten
from hocket.ckpt.document.values import canonical, canonical_leaves
from hocket.ckpt.errors import CheckpointStateError
from hocket.ckpt.gc_pause import gc_paused
from hocket.ckpt.torch.layout import TensorInfo, describe, mesh_axes
from hocket.ckpt.torch.saving.tensor_digests import digests_of
from hocket.native._native import xxh3_128

__all__ = [
    "MemoryRange",
    "SavePlan",
    "SavePlanner",
    "StagingBuffer",
    "StateSnapshot",
    "checked_per_rank",
    "part_name",
    "stage",
]

_PAGE_BYTES = 4096


class MemoryRange(NamedTuple):
    """A contiguous memory range to write, and the part of a tensor that it holds."""

    part: WrittenPart
    dtype: str
    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SavePlan:
    """The assignment of a tree's parts to ranks, for one layout."""

    signature: tuple[object, ...]
    digest: str
    """Digest of the signature; ranks with equal trees have equal digests."""
    parts: tuple[WrittenPart, ...]
    """The parts that this rank writes, in file order."""
    inlined: frozenset[str]
    """Names of the tensors that are also stored in the manifest."""
    rank_bytes: tuple[int, ...]
    """Bytes that each rank writes."""


@dataclass(frozen=True, slots=True, eq=False)
class StateSnapshot:
    """A flattened state tree. Everything except the tensors' bytes is copied."""

    infos: Sequence[TensorInfo]
    plan: SavePlan
    value_paths: Mapping[str, Path]
    value_texts: Mapping[str, bytes]
    """The canonical JSON of each value, so that later changes by the caller have no effect."""
    mesh: Mapping[str, int] | None
    peers: tuple[int, ...] | None = None
    """The ranks that hold this tree, or None if all ranks do."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Digests of the tensors that other trees may also hold; only on the first rank of `peers`."""
    integer_keyed: frozenset[Path] = frozenset()
    """As in `Manifest.integer_keyed`."""

    @property
    def values(self) -> Mapping[str, tuple[Path, bytes]]:
        """The path and the canonical JSON of each value."""
        return {name: (path, self.value_texts[name]) for name, path in self.value_paths.items()}

    @property
    def values_digest(self) -> str:
        """The digest of all values together."""
        text = b"\n".join(name.encode() + b"\0" + text for name, text in sorted(self.value_texts.items()))
        return xxh3_128(text).hex()


class SavePlanner:
    """A planner of saves that reuses its plan as long as the layout does not change.

    Attributes:
        num_plans: Number of plans made so far.
    """

    def __init__(self, *, rank: int, world_size: int):
        self.rank = rank
        self.world_size = world_size
        self.num_plans = 0
        self._plan: SavePlan | None = None

    @gc_paused()
    def snapshot(self, state: object, peers: tuple[int, ...] | None = None) -> StateSnapshot:
        """Flatten a state tree and plan its save, or reuse the last plan if the layout is unchanged.

        Args:
            state: The tree.
            peers: The ranks that hold the tree, or None if all ranks do.

        Raises:
            CheckpointStateError: The tree holds something that cannot be saved.
        """
        flat = flatten(state, tensor_type=torch.Tensor)
        infos = describe(flat.tensors, rank=self.rank, world_size=self.world_size, peers=peers)
        return StateSnapshot(
            infos=infos,
            plan=self.plan(infos, peers),
            value_paths={name: leaf.path for name, leaf in flat.values.items()},
            value_texts=canonical_leaves(flat.values),
            mesh=mesh_axes(flat.tensors),
            peers=peers,
            digests=digests_of(infos) if peers is not None and self.rank == peers[0] else {},
            integer_keyed=frozenset(flat.integer_keyed),
        )

    def plan(self, infos: Sequence[TensorInfo], peers: tuple[int, ...] | None = None) -> SavePlan:
        """Return the plan for these tensors: the last plan if their layout is unchanged, else a new one."""
        signature = (peers, *(info.signature for info in infos))
        if self._plan is None or self._plan.signature != signature:
            self._plan = self._make(infos, peers, signature)
            self.num_plans += 1
        return self._plan

    def _make(
        self, infos: Sequence[TensorInfo], peers: tuple[int, ...] | None, signature: tuple[object, ...]
    ) -> SavePlan:
        inlined = _inlined(infos, peers)
        items = [
            PlannedTensor(
                info.name,
                info.shape,
                info.item_bytes,
                info.placing,
                owner=0 if info.name in inlined else None,
            )
            for info in infos
            if info.same_as is None
        ]
        parts, rank_bytes = plan_parts(items, self.world_size, self.rank, peers)
        dtypes = {info.name: info.dtype for info in infos}
        shapes = {item.name: item.shape for item in items}
        parts = in_entry_order(parts, lambda part: (dtypes[part.name], part_name(part, shapes[part.name])))
        text = json.dumps([_plain(info.signature) for info in infos], separators=(",", ":"))
        return SavePlan(signature, xxh3_128(text.encode()).hex(), tuple(parts), inlined, tuple(rank_bytes))


def part_name(part: WrittenPart, shape: tuple[int, ...]) -> str:
    """Return the entry name of a part: the tensor's name, plus the chunk's offsets unless it is whole."""
    return entry_name(part.name, part.box.start, is_whole=part.box.size == shape)


def _plain(entry: Any) -> Any:
    name, path, dtype, shape, placing, same_as = entry
    return [name, path, dtype, shape, placing.mesh_shape, placing.ranks, placing.cuts, placing.late, same_as]


def _inlined(infos: Sequence[TensorInfo], peers: tuple[int, ...] | None) -> frozenset[str]:
    """Return the names of small tensors that rank 0 holds whole, up to the manifest's size limit.

    Tensors that are also held by ranks with another tree are excluded, because those ranks would compute
    another remaining size.
    """
    inlined, room = set(), INLINE_TOTAL_BYTES
    for info in infos:
        num_bytes = math.prod(info.shape) * info.item_bytes
        is_whole = 0 in info.placing.ranks and (len(info.placing.ranks) == 1 or not _is_cut(info))
        is_known = peers is None or set(info.placing.ranks) <= set(peers)
        if info.same_as is None and 0 < num_bytes <= min(INLINE_BYTES, room) and is_whole and is_known:
            inlined.add(info.name)
            room -= num_bytes
    return frozenset(inlined)


def _is_cut(info: TensorInfo) -> bool:
    return any(
        dim is not None and num_ranks > 1
        for dim, num_ranks in zip(info.placing.cuts, info.placing.mesh_shape, strict=True)
    )


def checked_per_rank(per_rank: Mapping[str, object] | None) -> bytes | None:
    """Return a rank's own values as canonical JSON.

    Raises:
        CheckpointStateError: A leaf is not a plain value.
    """
    return None if per_rank is None else canonical(dict(per_rank), "per_rank")


class StagingBuffer:
    """A staging buffer in host memory, allocated once and pinned if tensors come from a device.

    The buffer is page-aligned and the copies in it have no gaps beyond alignment, so that a data file with
    the tensors in this order is written directly from the buffer.

    Args:
        budget_bytes: The maximum size; None for no limit.

    Attributes:
        num_allocations: Number of times that the buffer was allocated or grown.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.num_allocations = 0
        self._budget_bytes = budget_bytes
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._layout: list[tuple[torch.dtype, torch.Size]] = []
        self._copies: list[torch.Tensor] = []

    def like(self) -> "StagingBuffer":
        """Return an empty staging buffer with the same budget."""
        return StagingBuffer(self._budget_bytes)

    @torch.inference_mode(False)  # a buffer made in inference mode could not be written outside of it
    @torch.no_grad()
    def copy(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors into the buffer, replacing its contents, and return the contiguous copies.

        Raises:
            CheckpointStateError: The tensors are larger than the budget.
        """
        layout = [(view.dtype, view.shape) for view in views]
        devices = {view.device for view in views if view.device.type != "cpu"}
        on_device = bool(devices)
        if layout != self._layout or (on_device and not self._buffer.is_pinned()):
            self._lay_out(views, layout, on_device=on_device)
        if views:
            torch._foreach_copy_(self._copies, list(views), non_blocking=True)
        for device in devices:  # each device has its own stream
            torch.accelerator.synchronize(device)
        return list(self._copies)

    def _lay_out(
        self,
        views: Sequence[torch.Tensor],
        layout: list[tuple[torch.dtype, torch.Size]],
        *,
        on_device: bool,
    ) -> None:
        """Assign each copy its place in the buffer; allocate a new buffer if the old one is unsuitable."""
        offsets, total = [], 0
        for view in views:
            total = -(-total // view.itemsize) * view.itemsize
            offsets.append(total)
            total += view.nbytes
        if self._budget_bytes is not None and total > self._budget_bytes:
            raise CheckpointStateError(
                f"this rank writes {total} bytes, and its staging buffer may have {self._budget_bytes}. Give "
                f"`staging_bytes` room; a synchronous save from host memory needs none"
            )
        self._layout, self._copies = [], []  # the views keep the old buffer alive
        if self._buffer.numel() < total or (on_device and not self._buffer.is_pinned()):
            # Free the old buffer before allocating the new one.
            self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
            num_bytes = total + _PAGE_BYTES
            memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=on_device)
            self._buffer = memory[-memory.data_ptr() % _PAGE_BYTES :]
            self.num_allocations += 1
        self._copies = [
            self._buffer[offset : offset + view.nbytes].view(view.dtype).view(view.shape)
            for view, offset in zip(views, offsets, strict=True)
        ]
        self._layout = layout


@gc_paused()
def stage(
    snapshot: StateSnapshot, staging: StagingBuffer | None
) -> tuple[list[MemoryRange], list[torch.Tensor]]:
    """Return this rank's parts as contiguous ranges of host memory.

    Args:
        snapshot: The flattened and planned tree.
        staging: The buffer that all parts are copied into. If None, the tensors' own memory is used, and only
            non-contiguous parts are copied.

    Returns:
        The entries, and the tensors that keep their memory alive.
    """
    by_name = {info.name: info for info in snapshot.infos}
    views = [_view(by_name[part.name], part.box) for part in snapshot.plan.parts]
    tensors = [view.contiguous() for view in views] if staging is None else staging.copy(views)
    entries = [
        MemoryRange(part, by_name[part.name].dtype, tensor.data_ptr(), tensor.nbytes)
        for part, tensor in zip(snapshot.plan.parts, tensors, strict=True)
    ]
    return entries, tensors


def _view(info: TensorInfo, box: Box) -> torch.Tensor:
    """Return the view of this rank's memory that holds `box` of the global tensor."""
    assert info.box is not None, f"`{info.name}` is planned for a rank that does not hold it"
    view = info.local
    for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        if size != view.shape[dim]:
            view = view.narrow(dim, start - info.box.start[dim], size)
    return view.resolve_conj().resolve_neg()
