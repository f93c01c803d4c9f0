"""The place of this process in the job, of the process group if there is one, else of the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hocket.dist.errors import WorldError
from hocket.dist.ranks.addresses import rendezvous_variables
from hocket.dist.ranks.job_place import (
    JobPlace,
    JobPlaceError,
    check_place,
    choose_gpu,
    export_job_place,
    read_job_place,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The place of this process in the job.

    Attributes:
        rank: This process among all, from 0.
        world_size: Number of processes.
        local_rank: This process among those of its machine, from 0.
        local_world_size: Number of processes on this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    def __post_init__(self) -> None:
        try:
            check_place(self.rank, self.world_size, self.local_rank, self.local_world_size)
        except JobPlaceError as error:
            raise WorldError(str(error)) from None


def read_world(env: Mapping[str, str] | None = None) -> World:
    """Return the place of this process in the job.

    A process group that is initialised is the truth, whatever the environment says. Otherwise the variables
    of torch's launchers are read, and without these those of `srun`, `mpirun` and similar programs; without
    any it is a job of one process. Where the environment does not tell, all ranks are on one machine.

    Args:
        env: The environment, read without regard to a process group; that of this process by default.

    Raises:
        WorldError: A variable is missing, is no integer or contradicts another.
    """
    if env is None and dist.is_available() and dist.is_initialized():
        return _world_of_group(dist.get_rank(), dist.get_world_size())
    try:
        return _as_world(read_job_place(os.environ if env is None else env))
    except JobPlaceError as error:
        raise WorldError(str(error)) from None


def export_world() -> None:
    """Set torch's variables from those of another starter, where they are not set."""
    try:
        export_job_place(os.environ)
        os.environ.update(rendezvous_variables(os.environ))
    except JobPlaceError as error:
        raise WorldError(str(error)) from None


def own_gpu() -> int:
    """Return the index of this process's GPU.

    Raises:
        WorldError: As for `read_world`, or this host has more ranks than GPUs.
    """
    if dist.is_initialized():
        return torch.cuda.current_device()  # the code that made the group has chosen the device, too
    try:
        return choose_gpu(read_job_place(os.environ), torch.cuda.device_count())
    except JobPlaceError as error:
        raise WorldError(str(error)) from None


def _as_world(place: JobPlace | None) -> World:
    if place is None:
        return World()
    return World(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.rank if place.local_rank is None else place.local_rank,
        local_world_size=place.world_size if place.local_world_size is None else place.local_world_size,
    )


def _world_of_group(rank: int, world_size: int) -> World:
    """Return the place in the process group; the environment serves where it tells of the same place."""
    try:
        place = read_job_place(os.environ)
        if place is not None and (place.rank, place.world_size) == (rank, world_size):
            return _as_world(place)
    except JobPlaceError:
        pass  # the group has formed without these variables
    return World(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
