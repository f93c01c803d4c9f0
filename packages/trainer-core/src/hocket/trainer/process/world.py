"""The place of this process in the job, of the process group if there is one, else of the environment."""

from __future__ import annotations

import os

import torch

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.process.job_place import JobPlace, JobPlaceError, export_job_place, read_job_place


def num_ranks() -> int:
    """Return the number of processes of the job: of the process group, else by the environment, else 1.

    Raises:
        TrainerConfigError: If the environment does not tell which process of several this one is.
    """
    if _has_group():
        return torch.distributed.get_world_size()
    place = _read_once()
    return 1 if place is None else place.world_size


def global_rank() -> int:
    """Return this process's rank: in the process group, else by the environment, else 0.

    Raises:
        TrainerConfigError: As for `num_ranks`.
    """
    if _has_group():
        return torch.distributed.get_rank()
    place = _read_once()
    return 0 if place is None else place.rank


def find_place() -> JobPlace | None:
    """Return the place of this process, with its local rank where that is told; None outside of a job.

    Raises:
        TrainerConfigError: As for `num_ranks`.
    """
    if not _has_group():
        return _read_once()
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        place = read_job_place(os.environ)
    except JobPlaceError:
        place = None  # the group has formed without these variables
    if place is not None and (place.rank, place.world_size) == (rank, world_size):
        return place
    return JobPlace(starter="torch", rank=rank, world_size=world_size)


def export_place() -> None:
    """Set torch's variables from those of another starter, so that all libraries see the same place.

    Raises:
        TrainerConfigError: As for `num_ranks`.
    """
    if _has_group():
        return
    try:
        export_job_place(os.environ)
    except JobPlaceError as error:
        raise TrainerConfigError(str(error)) from None


def _has_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _read_once() -> JobPlace | None:
    """Read the environment, unless it was read and `RANK` and `WORLD_SIZE` are as they were."""
    global _last
    texts = (os.environ.get("RANK"), os.environ.get("WORLD_SIZE"))
    if _last is None or _last[0] != texts:
        try:
            _last = texts, read_job_place(os.environ)
        except JobPlaceError as error:
            raise TrainerConfigError(str(error)) from None
    return _last[1]


_last: tuple[tuple[str | None, str | None], JobPlace | None] | None = None
"""The texts of `RANK` and `WORLD_SIZE` that were read last, and the place that the environment told."""
