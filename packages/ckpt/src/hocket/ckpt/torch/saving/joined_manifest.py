"""The manifest of a save, from the ranks' trees and their packed reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal
from weakref import WeakKeyDictionary

from hocket.ckpt.document.records import DeltaBase
from hocket.ckpt.document.tree import Path
from hocket.ckpt.document.tree import join as join_path
from hocket.ckpt.torch.saving.plan import SavePlan, StateSnapshot
from hocket.ckpt.torch.saving.recorded_tree import RecordedTree, merge_trees
from hocket.native import _native

__all__ = ["JoinedTree", "join_stages", "join_trees", "joined_tree_of", "union_manifest"]

_FORMAT = _native.CKPT_FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedTree:
    """The tensors of all ranks' trees as the document lists them, and the ranks that hold them."""

    tensors: bytes
    """The document's tensors as JSON, without chunks and data."""
    trees: Sequence[Sequence[int]]
    """For each stage, the index in the document of each of its tensors; one without stages."""
    holders: Sequence[Sequence[int]]
    """Distinct groups of ranks that hold parts of a tensor."""
    holders_of: Sequence[int]
    """The index of the group of each tensor."""


def join_trees(tree: RecordedTree, stages: Sequence[RecordedTree]) -> JoinedTree:
    """Return the tensors of a tree, which is the union of the stages' trees."""
    numbers = {name: number for number, name in enumerate(tree.tensors)}
    groups = dict.fromkeys(tensor.ranks for tensor in tree.tensors.values())
    holders = {ranks: number for number, ranks in enumerate(groups)}
    tensors = {}
    for name, tensor in tree.tensors.items():
        record = tensor.record
        tensors[name] = {"dtype": record.dtype, "shape": record.shape, "path": record.path}
        if record.same_as is not None:
            tensors[name]["same_as"] = record.same_as
    return JoinedTree(
        tensors=_to_json(tensors),
        trees=[[numbers[name] for name in stage.tensors] for stage in stages],
        holders=list(holders),
        holders_of=[holders[tensor.ranks] for tensor in tree.tensors.values()],
    )


_joined: WeakKeyDictionary[SavePlan, JoinedTree] = WeakKeyDictionary()


def joined_tree_of(snapshot: StateSnapshot) -> JoinedTree:
    """Return the tensors of a tree that all ranks hold; one object per layout."""
    joined = _joined.get(snapshot.plan)
    if joined is None:
        tree = RecordedTree.of(snapshot)
        joined = _joined[snapshot.plan] = join_trees(tree, [tree])
    return joined


def join_stages(
    snapshot: StateSnapshot, texts: Mapping[int, bytes]
) -> tuple[JoinedTree, Mapping[str, tuple[Path, bytes]], frozenset[Path]]:
    """Join the trees of the pipeline stages.

    Args:
        snapshot: The tree of rank 0.
        texts: The tree of the first rank of each stage as JSON, by rank; that of rank 0 is not read.

    Returns:
        The joined tree, its values by name, and the paths of its nodes with integers as keys.
    """
    if list(texts) == [0]:
        return joined_tree_of(snapshot), snapshot.values, snapshot.integer_keyed
    trees = [
        RecordedTree.from_json(text) if rank else RecordedTree.of(snapshot) for rank, text in texts.items()
    ]
    merged = merge_trees(dict(zip(texts, trees, strict=True)))
    return join_trees(merged, trees), merged.values, merged.integer_keyed


def union_manifest(
    *,
    save_id: str,
    step: int,
    tree: JoinedTree,
    tree_of: Sequence[int],
    values: Mapping[str, tuple[Sequence[str | int], bytes]],
    integer_keyed: frozenset[tuple[str | int, ...]],
    mesh: Mapping[str, int] | None,
    inlined: Mapping[str, bytes],
    reports: _native.CkptReports,
    user: bytes,
    policy: Literal["reseed", "require", "drop"],
    writer: str = "hocket.ckpt.torch",
    delta: DeltaBase | None = None,
) -> bytes:
    """Return the encoded manifest of the ranks' reports, in rank order; chunks written twice are listed once.

    Args:
        save_id: The id of the save.
        step: The caller's step.
        tree: The tensors of all ranks.
        tree_of: The index in `tree.trees` of each rank's tree.
        values: The path and the canonical JSON of each value.
        integer_keyed: As in `Manifest.integer_keyed`.
        mesh: The mesh of the ranks.
        inlined: The bytes of the tensors that the document has itself.
        reports: The packed reports of all ranks.
        user: Canonical JSON.
        policy: The policy for the ranks' own values.
        writer: The writer that the manifest names.
        delta: The checkpoint that the tensors are stored as a difference from.

    Raises:
        CheckpointCorruptError: The chunks of a tensor do not tile it, or another rule is broken.
    """
    # The extension raises the format's number where files or fields need it.
    head: dict[str, object] = {
        "format": _FORMAT,
        "version": _native.__version__,
        "save_id": save_id,
        "step": step,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "writer": writer,
        "world_size": len(tree_of),
        "mesh": None if mesh is None else dict(mesh),
        "files": [],
        "per_rank": {"policy": policy, "ranks": []},
    }
    if delta is not None:
        head["delta"] = {"base": delta.base, "save_id": delta.save_id}
    if integer_keyed:
        head["integer_keyed"] = sorted(map(list, integer_keyed), key=join_path)
    leaves = (
        b'%b:{"path":%b,"value":%b}' % (_to_json(name), _to_json(path), text)
        for name, (path, text) in values.items()
    )
    document = b'%b,"tensors":%b,"values":{%b},"user":%b}' % (
        _to_json(head)[:-1],
        tree.tensors,
        b",".join(leaves),
        user,
    )
    return reports.join(
        document,
        trees=tree.trees,
        tree_of=tree_of,
        holders=tree.holders,
        holders_of=tree.holders_of,
        inlined=inlined,
    )


def _to_json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
