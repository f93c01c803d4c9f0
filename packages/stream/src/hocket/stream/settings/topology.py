"""Detection of the data-parallel rank, the number of nodes, and the DataLoader worker."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from hocket.stream.errors import ConfigError
from hocket.stream.settings.job_place import JobPlace, JobPlaceError, read_job_place
from hocket.stream.settings.validation import whole


def resolve_data_parallel(
    rank: int | None, world_size: int | None, *, replication: int | None = None
) -> tuple[int, int]:
    """Return this process's data-parallel rank and the number of such ranks.

    Arguments are used as they are. Otherwise the numbers of torch's process group, if there is one, or of the
    environment (`RANK` and `WORLD_SIZE`, or the variables of `srun`, `mpirun` and similar programs) are
    divided by `replication`, the number of consecutive ranks that read the same samples, such as the
    members of a tensor-parallel group. There is no communication, and torch is not imported.

    Raises:
        ConfigError: One of the two is missing, is not a number, or does not fit the other.
    """
    group = 1 if replication is None else whole("replication", replication, least=1)
    if (rank is None) != (world_size is None):
        raise ConfigError(f"`rank` is {rank} and `world_size` {world_size}: expected both or neither")
    if rank is not None and world_size is not None:
        rank, world_size = whole("rank", rank), whole("world_size", world_size, least=1)
        if group != 1:
            raise ConfigError(
                f"`replication` is {replication} beside `rank` and `world_size`: expected data-parallel "
                "numbers there, already divided; leave `replication` out"
            )
    else:
        rank, world_size = _from_process(group)
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} of {world_size}: expected a rank from 0 to below the world size")
    return rank, world_size


def _from_process(group: int) -> tuple[int, int]:
    """Return rank and world size, divided by the number of ranks that share their samples.

    A process group that is initialised is the truth, whatever the environment says.
    """
    numbers = _group_numbers()
    if numbers is None and (place := _read_place()) is not None:
        numbers = (place.rank, place.world_size)
    rank, world_size = numbers or (0, 1)
    if world_size % group:
        raise ConfigError(f"`replication` is {group} and `WORLD_SIZE` {world_size}: expected a divisor of it")
    return rank // group, world_size // group


def _group_numbers() -> tuple[int, int] | None:
    """Return rank and size in torch's process group; None without one. Does not import torch."""
    torch_dist: Any = sys.modules.get("torch.distributed")
    if torch_dist is None or not (torch_dist.is_available() and torch_dist.is_initialized()):
        return None
    return torch_dist.get_rank(), torch_dist.get_world_size()


def agree_over_ranks(what: str, value: object) -> None:
    """Check that all ranks of torch's process group pass equal values; a collective, if there is a group.

    Raises:
        ConfigError: Ranks pass different values.
    """
    if (numbers := _group_numbers()) is None or numbers[1] == 1:
        return
    torch_dist: Any = sys.modules["torch.distributed"]
    values: list[Any] = [None] * numbers[1]
    torch_dist.all_gather_object(values, value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise ConfigError(
                f"`{what}` got {values[0]} on rank 0 and {other} on rank {rank}: expected the same on "
                "all ranks"
            )


def _read_place() -> JobPlace | None:
    """Read the environment; with a process group, None where it does not tell of the same rank."""
    numbers = _group_numbers()
    try:
        place = read_job_place(os.environ)
        told = None if place is None else (place.rank, place.world_size)
        return place if numbers in (None, told) else None
    except JobPlaceError as error:
        if numbers is not None:
            return None  # the group has formed without these variables
        raise ConfigError(f"{error}; or give `rank` and `world_size`") from None


def resolve_num_nodes(world_size: int, *, is_given: bool, replication: int | None) -> int:
    """Return the number of nodes that the data-parallel ranks are on, for `order="mosaic"`.

    Computed from the ranks of this node if rank and world size come from the environment too. Replicated or
    given ranks count as ranks of one node; for replicated ones mosaicml-streaming does the same.

    Raises:
        ConfigError: The number of ranks of this node does not divide the world size.
    """
    if is_given or replication not in (None, 1) or (place := _read_place()) is None:
        return 1
    if (per_node := place.local_world_size) is None:
        return 1 if place.num_hosts is None else place.num_hosts
    if world_size % per_node:
        raise ConfigError(
            f"the environment has {per_node} ranks on this node (`LOCAL_WORLD_SIZE`) of {world_size}: "
            "expected a divisor of them, as a launcher sets it"
        )
    return world_size // per_node


@dataclass(frozen=True, slots=True)
class LoaderWorker:
    """A worker process of a torch DataLoader."""

    number: int
    """Number of the worker, from 0 to below `num_workers`."""

    num_workers: int
    """Number of workers of the DataLoader."""

    base_seed: int
    """Base seed, the same for all workers of one iteration."""


def resolve_worker() -> LoaderWorker | None:
    """Return the DataLoader worker that this process is; None outside of one.

    Does not import torch: in a worker it is already loaded.
    """
    torch_data: Any = sys.modules.get("torch.utils.data")
    info = None if torch_data is None else torch_data.get_worker_info()
    return None if info is None else LoaderWorker(info.id, info.num_workers, info.seed - info.id)


def register_with_torch(kind: type) -> bool:
    """Register `kind` as a virtual subclass of torch's `IterableDataset`; return whether torch is loaded."""
    torch_data: Any = sys.modules.get("torch.utils.data")
    if torch_data is None:
        return False
    torch_data.IterableDataset.register(kind)
    return True
