"""What a save will write: the state taken apart and planned, and this rank's bytes held still."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hocket.ckpt.datafiles import entry_name
from hocket.ckpt.errors import CheckpointStateError
from hocket.ckpt.manifest import INLINE_BYTES, INLINE_TOTAL_BYTES
from hocket.ckpt.planning import Box, Item, Part, plan_parts
from hocket.ckpt.torch.layout import TensorInfo, describe, is_tensor, mesh_axes
from hocket.ckpt.torch.stages import digests_of
from hocket.ckpt.tree import Path, flatten
from hocket.ckpt.values import canonical, canonical_leaves
from hocket.native._native import xxh3_128

__all__ = ["Entry", "Plan", "Planner", "Snapshot", "Staging", "checked_per_rank", "hold_still", "part_name"]

PER_RANK_BYTES = 64 << 10
_PAGE_BYTES = 4096


class Entry(NamedTuple):
    """One run of memory to write."""

    part: Part
    dtype: str
    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Who writes what, for one layout."""

    signature: tuple[object, ...]
    digest: str
    """Of the signature; equal on all ranks, or their trees differ."""
    parts: tuple[Part, ...]
    """What this rank writes, in the order in which its file has it."""
    inlined: frozenset[str]
    """Tensors that the manifest holds, too."""
    rank_bytes: tuple[int, ...]
    """How much each rank writes."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A state tree, taken apart: everything about it but the tensors' bytes is a copy."""

    infos: Sequence[TensorInfo]
    plan: Plan
    value_paths: Mapping[str, Path]
    value_texts: Mapping[str, bytes]
    """Each value's canonical JSON: what the caller does to its lists after the save is no longer seen."""
    mesh: Mapping[str, int] | None
    peers: tuple[int, ...] | None = None
    """The ranks that hold this tree, where not all do."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Of what other trees may hold, too; on the first of the peers alone."""
    integer_keyed: frozenset[Path] = frozenset()
    """As the manifest has them."""

    @property
    def values_digest(self) -> str:
        """Of all values together."""
        text = b"\n".join(name.encode() + b"\0" + text for name, text in sorted(self.value_texts.items()))
        return xxh3_128(text).hex()


class Planner:
    """Plans saves, and keeps the plan while the layout stays what it was.

    Attributes:
        num_plans: How many plans it has made.
    """

    def __init__(self, *, rank: int, world_size: int):
        self.rank = rank
        self.world_size = world_size
        self.num_plans = 0
        self._plan: Plan | None = None

    def snapshot(self, state: object, peers: tuple[int, ...] | None = None) -> Snapshot:
        """Takes a tree apart and plans it, or finds that the last plan still holds.

        Args:
            state: The tree.
            peers: The ranks that hold it, where not all do.

        Raises:
            CheckpointStateError: There is something in the tree that cannot be saved.
        """
        flat = flatten(state, is_tensor=is_tensor)
        infos = describe(flat.tensors, rank=self.rank, world_size=self.world_size, peers=peers)
        return Snapshot(
            infos=infos,
            plan=self.plan(infos, peers),
            value_paths={name: leaf.path for name, leaf in flat.values.items()},
            value_texts=canonical_leaves(flat.values),
            mesh=mesh_axes(flat.tensors),
            peers=peers,
            digests=digests_of(infos) if peers is not None and self.rank == peers[0] else {},
            integer_keyed=frozenset(flat.integer_keyed),
        )

    def plan(self, infos: Sequence[TensorInfo], peers: tuple[int, ...] | None = None) -> Plan:
        """Who writes what of these tensors: the last plan, if they are laid out as they were then."""
        signature = (peers, *(info.signature for info in infos))
        if self._plan is None or self._plan.signature != signature:
            self._plan = self._make(infos, peers, signature)
            self.num_plans += 1
        return self._plan

    def _make(
        self, infos: Sequence[TensorInfo], peers: tuple[int, ...] | None, signature: tuple[object, ...]
    ) -> Plan:
        inlined = _inlined(infos, peers)
        items = [
            Item(
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
        item_bytes = {item.name: item.item_bytes for item in items}
        shapes = {item.name: item.shape for item in items}
        parts.sort(key=lambda part: (-item_bytes[part.name], part_name(part, shapes[part.name])))
        text = json.dumps([_plain(info.signature) for info in infos], separators=(",", ":"))
        return Plan(signature, xxh3_128(text.encode()).hex(), tuple(parts), inlined, tuple(rank_bytes))


def part_name(part: Part, shape: tuple[int, ...]) -> str:
    """A part's name in the data file: the tensor's, with the chunk's offsets where it is not all of it."""
    return entry_name(part.name, part.box.start, is_whole=part.box.size == shape)


def _plain(entry: Any) -> Any:
    name, path, dtype, shape, placing, same_as = entry
    return [name, path, dtype, shape, placing.mesh_shape, placing.ranks, placing.cuts, placing.late, same_as]


def _inlined(infos: Sequence[TensorInfo], peers: tuple[int, ...] | None) -> frozenset[str]:
    """The small tensors that the coordinator holds whole, as far as the manifest has room.

    None that ranks with another tree hold: they see another room.
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
    """A rank's own values as text.

    Raises:
        CheckpointStateError: They hold something else than values, or are larger than 64 KiB.
    """
    if per_rank is None:
        return None
    text = canonical(dict(per_rank), "per_rank")
    if len(text) > PER_RANK_BYTES:
        raise CheckpointStateError(
            f"`per_rank` takes {len(text)} bytes; expected at most {PER_RANK_BYTES}. It is for generators "
            f"and the "
            "like; tensors and what all ranks share belong into `state`."
        )
    return text


class Staging:
    """A buffer in host memory that saves copy into; pinned where tensors come from a device. Allocated once.

    It begins with a page and has no gaps: a file of tensors in this order is written from where they lie.

    Args:
        budget_bytes: The most it may hold; None is no limit.

    Attributes:
        num_allocations: How often it had to be allocated, or to grow.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.num_allocations = 0
        self._budget_bytes = budget_bytes
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._layout: list[tuple[torch.dtype, torch.Size]] = []
        self._copies: list[torch.Tensor] = []

    def like(self) -> "Staging":
        """Another one, with the same budget."""
        return Staging(self._budget_bytes)

    def copy(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies tensors into the buffer; returns the contiguous copies. What was in it before is gone.

        Raises:
            CheckpointStateError: They are more than the budget.
        """
        layout = [(view.dtype, view.shape) for view in views]
        devices = {view.device for view in views if view.device.type != "cpu"}
        on_device = bool(devices)
        if layout != self._layout or (on_device and not self._buffer.is_pinned()):
            self._lay_out(views, layout, on_device=on_device)
        if views:
            torch._foreach_copy_(self._copies, list(views), non_blocking=True)
        for device in devices:  # each copies by a queue of its own
            torch.accelerator.synchronize(device)
        return list(self._copies)

    def _lay_out(
        self,
        views: Sequence[torch.Tensor],
        layout: list[tuple[torch.dtype, torch.Size]],
        *,
        on_device: bool,
    ) -> None:
        """Makes the copies' places, in a new buffer where the old one does not do."""
        offsets, total = [], 0
        for view in views:
            total = -(-total // view.itemsize) * view.itemsize
            offsets.append(total)
            total += view.nbytes
        if self._budget_bytes is not None and total > self._budget_bytes:
            raise CheckpointStateError(
                f"this rank writes {total} bytes, and its staging buffer may have {self._budget_bytes}. Give "
                f"`staging_bytes` room; a synchronous save from host memory needs none."
            )
        self._layout, self._copies = [], []  # as long as they are there, so is the buffer
        if self._buffer.numel() < total or (on_device and not self._buffer.is_pinned()):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            memory = torch.empty(total + _PAGE_BYTES, dtype=torch.uint8, pin_memory=on_device)
            self._buffer = memory[-memory.data_ptr() % _PAGE_BYTES :]
            self.num_allocations += 1
        self._copies = [
            self._buffer[offset : offset + view.nbytes].view(view.dtype).view(view.shape)
            for view, offset in zip(views, offsets, strict=True)
        ]
        self._layout = layout


def hold_still(snapshot: Snapshot, staging: Staging | None) -> tuple[list[Entry], list[torch.Tensor]]:
    """Where the bytes of this rank's parts lie, in host memory and in one run each.

    Args:
        snapshot: What to write.
        staging: Copies all of it there; without, the tensors' own memory is used, and only what is not
            contiguous is copied.

    Returns:
        The entries, and the tensors that keep their memory alive.
    """
    by_name = {info.name: info for info in snapshot.infos}
    views = [_view(by_name[part.name], part.box) for part in snapshot.plan.parts]
    held = [view.contiguous() for view in views] if staging is None else staging.copy(views)
    entries = [
        Entry(part, by_name[part.name].dtype, tensor.data_ptr(), tensor.nbytes)
        for part, tensor in zip(snapshot.plan.parts, held, strict=True)
    ]
    return entries, held


def _view(info: TensorInfo, box: Box) -> torch.Tensor:
    """The part of this rank's memory that is `box` of the global tensor."""
    assert info.box is not None, f"`{info.name}` is planned for a rank that does not hold it"
    view = info.local
    for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        if size != view.shape[dim]:
            view = view.narrow(dim, start - info.box.start[dim], size)
    return view.resolve_conj().resolve_neg()
