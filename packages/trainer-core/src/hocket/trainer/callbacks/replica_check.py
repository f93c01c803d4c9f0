"""A callback that checks that replicas of the model are equal."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from hocket.trainer.callback import PeriodicCallback
from hocket.trainer.errors import DivergedError, TrainerConfigError
from hocket.trainer.log.logger import Logger
from hocket.trainer.process.world import global_rank, num_ranks
from hocket.trainer.ranks.rank_gather import gather_objects
from hocket.trainer.ranks.sharded_tensors import local_part
from hocket.trainer.ranks.tensor_digest import digest
from hocket.trainer.time import TimeInput, TimeUnit, ensure_time

if TYPE_CHECKING:
    from hocket.trainer.state import State

_MAX_NAMES = 5


class ReplicaCheck(PeriodicCallback):
    """Compares parameters, bit by bit, over the ranks that hold the same ones.

    Replicas start equal and get equal gradients, so they stay equal. A faulty device, a parameter outside of
    the gradients' reduction, or random numbers that differ between ranks make them drift apart without a
    sign in the loss. The check sends a digest of 8 bytes for each parameter, not the parameters. For a
    sharded model it compares the shards that several ranks hold.

    Args:
        interval: Time between two checks; a bare number counts batches.
        action: `"raise"` or `"warn"` when replicas differ; the same on every rank.
        include_optimizer: Also compare the optimizers' state.

    Raises:
        DivergedError: At the end of a batch, on every rank, if replicas differ; names parameters and ranks.
    """

    needs_whole_model = True
    reads_outputs = False

    def __init__(
        self,
        interval: TimeInput = "100ba",
        *,
        action: Literal["raise", "warn"] = "raise",
        include_optimizer: bool = False,
    ) -> None:
        super().__init__(ensure_time(interval, TimeUnit.BATCH))
        if action not in ("raise", "warn"):
            raise TrainerConfigError(f"`action` is `{action}`; expected `raise` or `warn`")
        self.action = action
        self.include_optimizer = include_optimizer

    def act(self, state: State, logger: Logger) -> None:
        """Compare. Collective and blocking."""
        self.check(state)

    def check(self, state: State) -> None:
        """Compare now. Collective and blocking."""
        if num_ranks() == 1:
            return
        own_digests = {key: digest(tensor) for key, tensor in self._tensors(state)}
        if not (message := describe_differences(gather_objects(own_digests))):
            return
        message += f" (batch {state.timestamp.counts.batch})"
        if self.action == "raise":
            raise DivergedError(message)
        if global_rank() == 0:
            warnings.warn(message, stacklevel=2)

    def _tensors(self, state: State) -> Iterator[tuple[tuple[str, Any], Tensor]]:
        for name, parameter in state.module.named_parameters():
            yield (name, _shard_of(parameter)), local_part(parameter.detach())
            if not self.include_optimizer:
                continue
            for optimizer in state.optimizers:
                for slot, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        yield (f"{name} ({slot})", _shard_of(value)), local_part(value)


def describe_differences(gathered: list[dict[Any, int]]) -> str:
    """Name the tensors whose digests differ and the ranks that are in the minority; empty if none do."""
    different: dict[str, set[int]] = {}
    for key in dict.fromkeys(key for digests in gathered for key in digests):
        digest_of_rank = {rank: digests[key] for rank, digests in enumerate(gathered) if key in digests}
        counts = Counter(digest_of_rank.values())
        if len(counts) > 1:
            usual_digest = counts.most_common(1)[0][0]
            different.setdefault(key[0], set()).update(
                rank for rank, one in digest_of_rank.items() if one != usual_digest
            )
    if not different:
        return ""
    names = [f"`{name}`" for name in different]
    listed = ", ".join(names[:_MAX_NAMES])
    if len(names) > _MAX_NAMES:
        listed += f" and {len(names) - _MAX_NAMES} more"
    ranks = sorted(set().union(*different.values()))
    return (
        f"replicas differ in {listed} on ranks {ranks}; look for parameters outside of the synchronised "
        "model, random numbers that differ between ranks, or a faulty device, and resume from "
        "an earlier checkpoint"
    )


def _shard_of(tensor: Any) -> Any:
    """Return this rank's coordinates in the mesh dims that shard a tensor; None for a plain tensor."""
    if not hasattr(tensor, "placements"):
        return None
    coordinate = tensor.device_mesh.get_coordinate()
    return tuple(
        place
        for place, placement in zip(coordinate, tensor.placements, strict=True)
        if not placement.is_replicate()
    )
