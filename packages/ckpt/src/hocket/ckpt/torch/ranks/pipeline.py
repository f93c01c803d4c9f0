"""States that differ between ranks: each pipeline stage holds its own part of the tree.

The caller names the ranks of a stage, so each rank still plans without communication. A checkpoint holds the
union of the stages' trees.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hocket.ckpt.errors import CheckpointError, CheckpointIncompatibleError
from hocket.ckpt.torch.ranks.coordinator import Coordinator
from hocket.ckpt.torch.ranks.error_propagation import agree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["agree_on_rest", "as_peers"]


def as_peers(
    peers: Sequence[int] | DeviceMesh | None, *, rank: int, world_size: int
) -> tuple[int, ...] | None:
    """Return the ranks of this rank's stage, ascending; None if all ranks hold one tree.

    Raises:
        ValueError: A rank is outside of this job, or `rank` is not among them.
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


def agree_on_rest(
    coordinator: Coordinator, key: str, left: Sequence[str] | None, *, timeout_s: float, what: str
) -> None:
    """Raise if the checkpoint holds leaves that no stage loads; collective over the coordinator, blocking.

    Args:
        coordinator: Connects the ranks.
        key: Identifies this agreement: the same on all ranks, and used once.
        left: Names that this rank's stage does not load; None if another rank of the stage reports them.
        timeout_s: Seconds to wait for the other ranks.
        what: The operation, to begin messages with.

    Raises:
        CheckpointIncompatibleError: Some names are loaded by no stage.
    """
    failed: CheckpointError | None = None
    if coordinator.is_rank_0:
        others = range(1, coordinator.world_size)
        try:
            reports = coordinator.collect(f"{key}/left", others, timeout_s=timeout_s, what=what)
            name_lists = [left, *(json.loads(text) for text in reports.values())]
            rest = set.intersection(*(set(each) for each in name_lists if each is not None))
            if rest:
                names = ", ".join(f"`{name}`" for name in sorted(rest)[:5])
                suffix = f", and {len(rest) - 5} more" if len(rest) > 5 else ""
                failed = CheckpointIncompatibleError(
                    f"{what}: no stage takes {names}{suffix}. Load it into all of the model that it was "
                    "saved from, or pass `strict=False` or `include=`"
                )
        except CheckpointError as collect_error:
            failed = collect_error
    else:
        coordinator.post(f"{key}/left/{coordinator.rank}", json.dumps(left).encode())
    agree(coordinator, key, failed, timeout_s=timeout_s, what=what)
