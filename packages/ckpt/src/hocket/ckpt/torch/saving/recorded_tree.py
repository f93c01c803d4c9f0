"""The state tree as the manifest records it, and the union of the trees of pipeline stages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hocket.ckpt.document.records import TensorRecord
from hocket.ckpt.document.tree import Path, join
from hocket.ckpt.errors import CheckpointStateError
from hocket.ckpt.torch.saving.plan import StateSnapshot
from hocket.ckpt.torch.saving.tensor_digests import COMPARED_BYTES

__all__ = ["RecordedTree", "TreeTensor", "merge_trees"]


@dataclass(frozen=True, slots=True)
class TreeTensor:
    """A tensor of a tree."""

    record: TensorRecord
    """Its record, without chunks."""
    ranks: tuple[int, ...]
    """The ranks that hold parts of it."""
    digest: str | None = None
    """Digest of its bytes, for a small plain tensor of a stage's tree."""


@dataclass(frozen=True, slots=True)
class RecordedTree:
    """A state tree as the manifest records it, without the location of its bytes."""

    tensors: Mapping[str, TreeTensor]
    values: Mapping[str, tuple[Path, bytes]]
    """Paths and canonical JSON."""
    integer_keyed: frozenset[Path] = frozenset()
    """Paths of mappings with integer keys, as in the manifest."""

    @classmethod
    def of(cls, snapshot: StateSnapshot) -> RecordedTree:
        """Return the tree of a snapshot."""
        tensors = {}
        for info in snapshot.infos:
            record = TensorRecord(dtype=info.dtype, shape=info.shape, path=info.path, same_as=info.same_as)
            digest = snapshot.digests.get(info.name)
            tensors[info.name] = TreeTensor(record, info.placing.ranks, digest)
        return cls(tensors, snapshot.values, snapshot.integer_keyed)

    def to_json(self) -> bytes:
        """Return the tree for a report as one line; equal tuples of ranks are stored once."""
        ranks = list(dict.fromkeys(tensor.ranks for tensor in self.tensors.values()))
        indices = {each: position for position, each in enumerate(ranks)}
        tensors = []
        for name, tensor in self.tensors.items():
            record = tensor.record
            fields = [record.path, record.dtype, record.shape, record.same_as]
            tensors.append([name, *fields, tensor.digest, indices[tensor.ranks]])
        values = [[name, path, text.decode()] for name, (path, text) in self.values.items()]
        keyed = sorted(map(list, self.integer_keyed), key=str)
        told = {"ranks": ranks, "tensors": tensors, "values": values, "integer_keyed": keyed}
        return json.dumps(told, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> RecordedTree:
        """Return the tree that `to_json` encoded."""
        told = json.loads(text)
        ranks = [tuple(each) for each in told["ranks"]]
        tensors = {
            name: TreeTensor(
                TensorRecord(dtype=dtype, shape=tuple(shape), path=tuple(path), same_as=same_as),
                ranks[index],
                digest,
            )
            for name, path, dtype, shape, same_as, digest, index in told["tensors"]
        }
        values = {name: (tuple(path), text.encode()) for name, path, text in told["values"]}
        return cls(tensors, values, frozenset(map(tuple, told["integer_keyed"])))


def merge_trees(trees: Mapping[int, RecordedTree]) -> RecordedTree:
    """Return the union of the stages' trees, given by their leads' ranks.

    A leaf that several stages hold is taken from the first.

    Raises:
        CheckpointStateError: Two stages hold different leaves under one name.
    """
    tensors: dict[str, TreeTensor] = {}
    values: dict[str, tuple[Path, bytes]] = {}
    holder_ranks: dict[str, int] = {}
    for rank, tree in trees.items():
        for name, tensor in tree.tensors.items():
            if name in values or not _is_same(tensors.setdefault(name, tensor), tensor):
                raise _conflict("tensor", name, holder_ranks[name], rank)
            holder_ranks.setdefault(name, rank)
        for name, value in tree.values.items():
            if name in tensors or values.setdefault(name, value) != value:
                raise _conflict("value", name, holder_ranks[name], rank)
            holder_ranks.setdefault(name, rank)
    keyed = frozenset().union(*(tree.integer_keyed for tree in trees.values()))
    return RecordedTree(tensors, _without_hollow(tensors, values, holder_ranks), keyed)


def _is_same(first: TreeTensor, other: TreeTensor) -> bool:
    """Return whether two stages hold one tensor: shared over a mesh, or small with equal bytes."""
    if first is other:
        return True
    if first.ranks == other.ranks:
        return first.record == other.record
    is_alike = replace(first.record, same_as=None) == replace(other.record, same_as=None)
    return is_alike and first.digest is not None and first.digest == other.digest


def _conflict(kind: str, name: str, first: int, other: int) -> CheckpointStateError:
    return CheckpointStateError(
        f"{kind} `{name}` differs between the stages of rank {first} and of rank {other}, or is larger than "
        f"{COMPARED_BYTES} bytes and not compared. Give each stage's its own name, or leave it out of all "
        "stages but one"
    )


def _without_hollow(
    tensors: Mapping[str, TreeTensor],
    values: Mapping[str, tuple[Path, bytes]],
    holder_ranks: Mapping[str, int],
) -> dict[str, tuple[Path, bytes]]:
    """Drop a stage's empty dicts and lists that are not empty on another stage."""
    paths = [(name, tensor.record.path) for name, tensor in tensors.items()]
    paths += [(name, path) for name, (path, _) in values.items()]
    inner = {path[:depth]: name for name, path in paths for depth in range(len(path))}
    for name, path in paths:
        is_hollow = name in values and values[name][1] in (b"{}", b"[]")
        if path in inner and not is_hollow:
            raise _conflict("leaf", join(path), holder_ranks[name], holder_ranks[inner[path]])
    return {name: value for name, value in values.items() if value[0] not in inner}
