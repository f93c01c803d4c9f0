"""The place of this process in the job, read from the launcher's environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hocket.dist.errors import WorldError
from hocket.dist.ranks.slurm import detect_world


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
        _check_within("RANK", self.rank, "WORLD_SIZE", self.world_size)
        _check_within("LOCAL_RANK", self.local_rank, "LOCAL_WORLD_SIZE", self.local_world_size)
        if self.local_world_size > self.world_size:
            raise WorldError(
                f"`LOCAL_WORLD_SIZE` is {self.local_world_size}, more than `WORLD_SIZE` = {self.world_size}: "
                "a machine cannot hold more processes than the job has. Correct one of them"
            )


def read_world(env: Mapping[str, str] | None = None) -> World:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, the names that torchrun sets.

    Without them, the variables of Slurm (`srun`) and of Open MPI are read; without those it is a job of one
    process. Without LOCAL_RANK and LOCAL_WORLD_SIZE, all ranks are on one machine.

    Args:
        env: The environment; that of this process by default.

    Raises:
        WorldError: One of RANK and WORLD_SIZE is missing, a value is no integer, or they contradict.
    """
    env = os.environ if env is None else env
    if not env.get("RANK") and not env.get("WORLD_SIZE"):
        env = detect_world(env) or {}
    rank, world_size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    if rank is None and world_size is None:
        return World()
    if rank is None or world_size is None:
        missing, given = ("RANK", "WORLD_SIZE") if rank is None else ("WORLD_SIZE", "RANK")
        raise WorldError(
            f"`{given}` is set ({env[given]!r}) but `{missing}` is not: both are needed to join a job. "
            "Start the script with `hocket-launch -n N script.py`, or unset both to run one process"
        )
    local_rank, local_world_size = _integer(env, "LOCAL_RANK"), _integer(env, "LOCAL_WORLD_SIZE")
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=rank if local_rank is None else local_rank,
        local_world_size=world_size if local_world_size is None else local_world_size,
    )


def export_world() -> None:
    """Set torch's variables from those of Slurm or Open MPI, where they are not set."""
    if not os.environ.get("RANK") and not os.environ.get("WORLD_SIZE"):
        os.environ.update(detect_world(os.environ) or {})


def _integer(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if text is None or not text.strip():
        return None
    try:
        return int(text)
    except ValueError:
        raise WorldError(
            f"`{name}` is {text!r}, expected an integer. Launchers set it: unset it to run one process"
        ) from None


def _check_within(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if size < 1:
        raise WorldError(f"`{size_name}` is {size}, expected at least 1")
    if not 0 <= rank < size:
        raise WorldError(
            f"`{rank_name}` is {rank}, expected 0 to {size - 1} since `{size_name}` is {size}. "
            "Are these left over from another job? Unset them, or start with `hocket-launch`"
        )
