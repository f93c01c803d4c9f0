"""Detection of the data-parallel rank, the number of nodes, and the DataLoader worker."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from hocket.stream.errors import ConfigError
from hocket.stream.settings.validation import whole


def resolve_data_parallel(
    rank: int | None, world_size: int | None, *, replication: int | None = None
) -> tuple[int, int]:
    """Return this process's data-parallel rank and the number of such ranks.

    Arguments are used as they are. Otherwise `RANK` and `WORLD_SIZE` are read from the environment and
    divided by `replication`, the number of consecutive ranks that read the same samples, such as the
    members of a tensor-parallel group. There is no communication, and `torch.distributed` is not used.

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
        rank, world_size = _from_environment(group)
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} of {world_size}: expected a rank from 0 to below the world size")
    return rank, world_size


def _from_environment(group: int) -> tuple[int, int]:
    names = ("RANK", "WORLD_SIZE")
    given = [os.environ.get(name) for name in names]
    if given == [None, None]:
        rank, world_size = 0, 1
    else:
        for name, value in zip(names, given, strict=True):
            if value is None or not value.isdecimal():
                raise ConfigError(
                    f"the environment has `{name}`={value!r}: expected a number, set together with the "
                    f"other of {names}, as a launcher does; or give `rank` and `world_size`"
                )
        rank, world_size = int(given[0] or 0), int(given[1] or 0)
    if world_size % group:
        raise ConfigError(f"`replication` is {group} and `WORLD_SIZE` {world_size}: expected a divisor of it")
    return rank // group, world_size // group


def resolve_num_nodes(world_size: int, *, is_given: bool, replication: int | None) -> int:
    """Return the number of nodes that the data-parallel ranks are on, for `order="mosaic"`.

    Computed from `LOCAL_WORLD_SIZE` if rank and world size come from the environment too. Replicated or given
    ranks count as ranks of one node; for replicated ones mosaicml-streaming does the same.

    Raises:
        ConfigError: `LOCAL_WORLD_SIZE` does not divide the world size.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE")
    if is_given or replication not in (None, 1) or text is None:
        return 1
    if not text.isdecimal() or not int(text) or world_size % int(text):
        raise ConfigError(
            f"the environment has `LOCAL_WORLD_SIZE`={text!r} and {world_size} ranks: expected a divisor of "
            "them, as a launcher sets it"
        )
    return world_size // int(text)


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
