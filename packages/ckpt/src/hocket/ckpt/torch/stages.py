"""Trees that differ between ranks: each pipeline stage holds its own part of the state.

The ranks of a stage are told by the caller, so each rank plans as ever, alone. The first rank of each stage,
its lead, puts into its report what the coordinator cannot know of the stage's tree; the checkpoint holds the
union.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hocket.ckpt.errors import CheckpointError, CheckpointIncompatibleError, CheckpointStateError
from hocket.ckpt.manifest import TensorRecord
from hocket.ckpt.torch.failures import agree
from hocket.ckpt.torch.rendezvous import Rendezvous
from hocket.ckpt.tree import Path, join
from hocket.native import _native

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hocket.ckpt.torch.committing import Report
    from hocket.ckpt.torch.layout import TensorInfo
    from hocket.ckpt.torch.snapshot import Snapshot

__all__ = ["Held", "Tree", "agree_on_rest", "as_peers", "digests_of", "leads_of", "merge_trees"]

_COMPARED_BYTES = 1 << 20
"""Plain tensors of at most this many bytes may be held by several stages, if their bytes are the same."""


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of a tree."""

    record: TensorRecord
    """Without chunks."""
    ranks: tuple[int, ...]
    """Who holds some of it."""
    digest: str | None = None
    """Of its bytes, where it is plain and small and the tree is a stage's."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A state tree as the manifest tells it, but for where its bytes lie."""

    tensors: Mapping[str, Held]
    values: Mapping[str, tuple[Path, bytes]]
    """Paths and canonical JSON."""
    integer_keyed: frozenset[Path] = frozenset()
    """As the manifest has them."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> Tree:
        """The tree of a snapshot."""
        tensors = {}
        for info in snapshot.infos:
            record = TensorRecord(dtype=info.dtype, shape=info.shape, path=info.path, same_as=info.same_as)
            digest = snapshot.digests.get(info.name)
            tensors[info.name] = Held(record, info.placing.ranks, digest)
        values = {name: (path, snapshot.value_texts[name]) for name, path in snapshot.value_paths.items()}
        return cls(tensors, values, snapshot.integer_keyed)

    def to_json(self) -> dict[str, Any]:
        """The tree for a report; ranks of many tensors stand there once."""
        ranks = list(dict.fromkeys(held.ranks for held in self.tensors.values()))
        at = {each: position for position, each in enumerate(ranks)}
        tensors = []
        for name, held in self.tensors.items():
            record = held.record
            told = [record.path, record.dtype, record.shape, record.same_as]
            tensors.append([name, *told, held.digest, at[held.ranks]])
        values = [[name, path, text.decode()] for name, (path, text) in self.values.items()]
        keyed = sorted(map(list, self.integer_keyed), key=str)
        return {"ranks": ranks, "tensors": tensors, "values": values, "integer_keyed": keyed}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Tree:
        """The tree in what `to_json` gave."""
        ranks = [tuple(each) for each in told["ranks"]]
        tensors = {
            name: Held(
                TensorRecord(dtype=dtype, shape=tuple(shape), path=tuple(path), same_as=same_as),
                ranks[at],
                digest,
            )
            for name, path, dtype, shape, same_as, digest, at in told["tensors"]
        }
        values = {name: (tuple(path), text.encode()) for name, path, text in told["values"]}
        return cls(tensors, values, frozenset(map(tuple, told["integer_keyed"])))


def as_peers(
    peers: Sequence[int] | DeviceMesh | None, *, rank: int, world_size: int
) -> tuple[int, ...] | None:
    """The ranks of a rank's stage, ascending; None where all ranks hold one tree.

    Raises:
        ValueError: They are no ranks of this job, or `rank` is not among them.
    """
    if peers is None:
        return None
    given = peers if isinstance(peers, Sequence) else peers.mesh.flatten().tolist()
    ranks = tuple(sorted(set(given)))
    if rank not in ranks or not 0 <= ranks[0] <= ranks[-1] < world_size:
        raise ValueError(
            f"`peers` is {list(given)} on rank {rank}; expected ranks below {world_size}, this one among them"
        )
    return ranks


def digests_of(infos: Sequence[TensorInfo]) -> dict[str, str]:
    """Digests of the bytes of the small plain tensors, which other stages may hold, too."""
    digests = {}
    for info in infos:
        if info.is_plain and info.local.nbytes <= _COMPARED_BYTES:
            run = info.local.cpu().contiguous().reshape(-1).view(torch.uint8)
            digests[info.name] = _native.xxh3_128(run.numpy().tobytes()).hex()
    return digests


def leads_of(reports: Sequence[Report]) -> list[int]:
    """The lead of each rank: the first of its stage, or rank 0 where there are no stages.

    Raises:
        CheckpointStateError: The ranks do not say the same of who is in a stage.
    """
    if all(report.peers is None for report in reports):
        return [0] * len(reports)
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, report in enumerate(reports):
        members.setdefault(tuple(report.peers or ()), []).append(rank)
    for peers, ranks in members.items():
        if list(peers) != ranks:
            raise CheckpointStateError(
                f"`peers` is {list(peers) or None} on the ranks {ranks}. Every rank names all ranks that "
                "hold the tree that it holds, and they name the same."
            )
    return [report.peers[0] if report.peers else 0 for report in reports]


def merge_trees(trees: Mapping[int, Tree]) -> Tree:
    """The union of the stages' trees, by their leads' ranks; the first that holds a leaf gives it.

    Raises:
        CheckpointStateError: Two stages hold different things under one name.
    """
    tensors: dict[str, Held] = {}
    values: dict[str, tuple[Path, bytes]] = {}
    told_by: dict[str, int] = {}
    for rank, tree in trees.items():
        for name, held in tree.tensors.items():
            if name in values or not _is_same(tensors.setdefault(name, held), held):
                raise _conflict("tensor", name, told_by[name], rank)
            told_by.setdefault(name, rank)
        for name, value in tree.values.items():
            if name in tensors or values.setdefault(name, value) != value:
                raise _conflict("value", name, told_by[name], rank)
            told_by.setdefault(name, rank)
    keyed = frozenset().union(*(tree.integer_keyed for tree in trees.values()))
    return Tree(tensors, _without_hollow(tensors, values, told_by), keyed)


def _is_same(first: Held, other: Held) -> bool:
    """Whether two stages mean one tensor: they share it over a mesh, or each holds the same few bytes."""
    if first is other or first.ranks == other.ranks:
        return first.record == other.record
    is_alike = replace(first.record, same_as=None) == replace(other.record, same_as=None)
    return is_alike and first.digest is not None and first.digest == other.digest


def _conflict(kind: str, name: str, first: int, other: int) -> CheckpointStateError:
    return CheckpointStateError(
        f"{kind} `{name}` differs between the stages of rank {first} and of rank {other}, or is larger than "
        f"{_COMPARED_BYTES} bytes and not compared. Give each stage's its own name, or leave it out of all "
        "stages but one."
    )


def _without_hollow(
    tensors: Mapping[str, Held], values: Mapping[str, tuple[Path, bytes]], told_by: Mapping[str, int]
) -> dict[str, tuple[Path, bytes]]:
    """Drops a stage's empty dicts and lists that have something in them on another stage."""
    paths = [(name, held.record.path) for name, held in tensors.items()]
    paths += [(name, path) for name, (path, _) in values.items()]
    inner = {path[:depth]: name for name, path in paths for depth in range(len(path))}
    for name, path in paths:
        is_hollow = name in values and values[name][1] in (b"{}", b"[]")
        if path in inner and not is_hollow:
            raise _conflict("leaf", join(path), told_by[name], told_by[inner[path]])
    return {name: value for name, value in values.items() if value[0] not in inner}


def agree_on_rest(
    rendezvous: Rendezvous, key: str, left: Sequence[str] | None, *, timeout_s: float, what: str
) -> None:
    """Refuses what no stage takes from a checkpoint; collective over the rendezvous, blocking.

    Args:
        rendezvous: The ranks.
        key: Names this agreement; the same on all ranks, and used once.
        left: What this rank's stage does not take; None where another rank of the stage tells it.
        timeout_s: How long to wait for the others.
        what: What is agreed on, to begin messages with.

    Raises:
        CheckpointIncompatibleError: Some is left by all.
    """
    failed: CheckpointError | None = None
    if rendezvous.is_coordinator:
        others = range(1, rendezvous.world_size)
        try:
            told = rendezvous.collect(f"{key}/left", others, timeout_s=timeout_s, what=what)
            lists = [left, *(json.loads(text) for text in told.values())]
            rest = set.intersection(*(set(each) for each in lists if each is not None))
            if rest:
                shown = ", ".join(f"`{name}`" for name in sorted(rest)[:5])
                more = f", and {len(rest) - 5} more" if len(rest) > 5 else ""
                failed = CheckpointIncompatibleError(
                    f"{what}: no stage takes {shown}{more}. Load it into all of the model that it was saved "
                    "from, or pass `strict=False` or `include=`."
                )
        except CheckpointError as late:
            failed = late
    else:
        rendezvous.post(f"{key}/left/{rendezvous.rank}", json.dumps(left).encode())
    agree(rendezvous, key, failed, timeout_s=timeout_s, what=what)
