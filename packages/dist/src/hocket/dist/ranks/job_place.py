"""The place of this process in its job, read from the variables of the program that started it.

`hocket.dist`, `hocket.trainer` and `hocket.stream` never import each other, and have to agree about it. Each
has a copy of this file, and a test holds the copies equal.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import partial


class JobPlaceError(ValueError):
    """The environment contradicts itself, or does not tell which process of several this one is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlace:
    """The place of this process in a job.

    Attributes:
        starter: The program that started the processes, for messages.
        rank: This process among all, from 0.
        world_size: Number of processes.
        local_rank: This process among those of its host; None if the environment does not tell.
        local_world_size: Number of processes on this host; None if the environment does not tell.
        num_hosts: Number of hosts; None if the environment does not tell.
    """

    starter: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    num_hosts: int | None = None

    def __post_init__(self) -> None:
        check_place(self.rank, self.world_size, self.local_rank, self.local_world_size)


@dataclass(frozen=True, slots=True)
class _Names:
    """The variables of a program that starts processes; of several names, the first that is set counts."""

    starter: str
    rank: str
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    num_hosts: tuple[str, ...] = ()


# A later program may be the one that started the earlier: `mpirun` starts its daemons by `srun`.
_STARTERS = (
    _Names(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Names(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Names(
        "PALS",
        "PALS_RANKID",
        ("PALS_SIZE", "PMI_SIZE"),
        ("PALS_LOCAL_RANKID",),
        ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    ),
    _Names(
        "Flux",
        "FLUX_TASK_RANK",
        ("FLUX_JOB_SIZE",),
        ("FLUX_TASK_LOCAL_ID",),
        num_hosts=("FLUX_JOB_NNODES",),
    ),
    _Names(
        "MPI's process manager",
        "PMI_RANK",
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
)
# Steps that hold a shell, such as that of `salloc`, or a batch script: their process is no rank.
_SHELL_STEPS = ("4294967290", "4294967291", "4294967292")


def read_job_place(env: Mapping[str, str]) -> JobPlace | None:
    """Return the place of this process; None if nothing tells of a job.

    `RANK` and `WORLD_SIZE`, the variables of torch's launchers, are read first, then those of the programs
    that start a process for each rank.

    Raises:
        JobPlaceError: A variable is missing, is no number or contradicts another.
    """
    rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if rank is None and world_size in (None, 1):
        place = read_starter(env)
        if place is None and world_size is None:
            _check_nothing_told(env)
        return place
    if rank is None or world_size is None:
        missing, given = ("RANK", "WORLD_SIZE") if rank is None else ("WORLD_SIZE", "RANK")
        raise JobPlaceError(
            f"`{given}` is set ({env[given]!r}) but `{missing}` is not: both are needed to join a job. "
            "Start the script with `hocket-launch -n N script.py`, or unset both to run one process"
        )
    place = JobPlace(
        starter="the launcher",
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, "LOCAL_RANK"),
        local_world_size=_number(env, "LOCAL_WORLD_SIZE"),
    )
    if place.local_rank is None and world_size > 1:
        with contextlib.suppress(JobPlaceError):
            place = _complete(place, read_starter(env))
    return place


def read_starter(env: Mapping[str, str]) -> JobPlace | None:
    """Return the place in a job that `srun`, `mpirun` or a similar program started, not torch's launchers.

    A job of one process is None, too.

    Raises:
        JobPlaceError: As for `read_job_place`.
    """
    readers: list[Callable[[Mapping[str, str]], JobPlace | None]]
    readers = [*(partial(_read, names=names) for names in _STARTERS), _read_slurm, _read_sagemaker]
    first: JobPlace | None = None
    for read in readers:
        if first is None:
            first = read(env)
            continue
        with contextlib.suppress(JobPlaceError):  # the other tells of other processes
            first = _complete(first, read(env))
    return first if first is not None and first.world_size > 1 else None


def export_job_place(env: MutableMapping[str, str]) -> JobPlace | None:
    """Set torch's variables from those of another starter, where they are not set; return the place.

    Raises:
        JobPlaceError: As for `read_job_place`.
    """
    place = read_job_place(env)
    if place is not None and "RANK" not in env:
        numbers = {
            "RANK": place.rank,
            "WORLD_SIZE": place.world_size,
            "LOCAL_RANK": place.local_rank,
            "LOCAL_WORLD_SIZE": place.local_world_size,
        }
        env.update({name: str(number) for name, number in numbers.items() if number is not None})
    return place


def choose_gpu(place: JobPlace | None, num_gpus: int) -> int:
    """Return the index of the GPU of this process, among those that it sees.

    A process that sees one GPU uses it: some engines show each process only its own. Without a local rank,
    the ranks of a host are taken to follow one another.

    Raises:
        JobPlaceError: The host has more ranks than GPUs.
    """
    if place is None or num_gpus == 1:
        return 0
    if place.local_rank is None:
        return place.rank % max(num_gpus, 1)
    if place.local_rank >= num_gpus:
        raise JobPlaceError(
            f"`LOCAL_RANK` is {place.local_rank}, and this process sees {num_gpus} GPUs: each rank of a host "
            "needs a GPU of its own. Start fewer ranks on it"
        )
    return place.local_rank


def check_place(rank: int, world_size: int, local_rank: int | None, local_world_size: int | None) -> None:
    """Raise `JobPlaceError` if the numbers, in the order of torch's variables, contradict each other."""
    _check_within("RANK", rank, "WORLD_SIZE", world_size)
    if local_rank is not None and local_world_size is not None:
        _check_within("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
    if local_world_size is not None and local_world_size > world_size:
        raise JobPlaceError(
            f"`LOCAL_WORLD_SIZE` is {local_world_size}, more than `WORLD_SIZE` = {world_size}: "
            "a machine cannot hold more processes than the job has. Correct one of them"
        )


def _read(env: Mapping[str, str], names: _Names) -> JobPlace | None:
    if names.rank not in env and names.world_size[0] not in env:
        return None  # the other names are those of several programs
    rank, world_size = _number(env, names.rank), _number(env, *names.world_size)
    if rank is None and world_size in (None, 1):
        return None
    if rank is None or world_size is None:
        missing = names.rank if rank is None else " or ".join(f"`{name}`" for name in names.world_size)
        raise _untold(names.starter, missing.strip("`"))
    num_hosts, local_world_size = _number(env, *names.num_hosts), _number(env, *names.local_world_size)
    return JobPlace(
        starter=names.starter,
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, *names.local_rank),
        local_world_size=world_size if local_world_size is None and num_hosts == 1 else local_world_size,
        num_hosts=num_hosts,
    )


def _read_slurm(env: Mapping[str, str]) -> JobPlace | None:
    """Read the place in a step of Slurm; the numbers of the job are no numbers of processes that exist."""
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID")
    size = _number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if not step or step in _SHELL_STEPS or size in (None, 1):
        return None
    rank, node = _number(env, "SLURM_PROCID"), _number(env, "SLURM_NODEID")
    if rank is None:
        raise _untold("Slurm", "SLURM_PROCID")
    per_node = _tasks_of_nodes(
        env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(size)
    )
    return JobPlace(
        starter="Slurm",
        rank=rank,
        world_size=int(size or 1),
        local_rank=_number(env, "SLURM_LOCALID"),
        local_world_size=per_node[node] if node is not None and node < len(per_node) else None,
        num_hosts=_number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    )


def _read_sagemaker(env: Mapping[str, str]) -> JobPlace | None:
    """Read the place of a script that SageMaker starts once on each host."""
    try:
        hosts = json.loads(env.get("SM_HOSTS", "[]"))
    except ValueError:
        raise JobPlaceError(f"`SM_HOSTS` is {env['SM_HOSTS']!r}, expected a list of hosts in JSON") from None
    if not isinstance(hosts, list) or len(hosts) < 2:
        return None
    own = env.get("SM_CURRENT_HOST")
    if own not in hosts:
        raise _untold("SageMaker", "SM_CURRENT_HOST")
    return JobPlace(
        starter="SageMaker",
        rank=hosts.index(own),
        world_size=len(hosts),
        local_rank=0,
        local_world_size=1,
        num_hosts=len(hosts),
    )


def _check_nothing_told(env: Mapping[str, str]) -> None:
    """Refuse the environment of one process of several from which its rank cannot be read."""
    local = {name: _number(env, name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    if local["LOCAL_RANK"] or (local["LOCAL_RANK"] is not None and (local["LOCAL_WORLD_SIZE"] or 1) > 1):
        raise JobPlaceError(
            f"`LOCAL_RANK` is {env['LOCAL_RANK']!r} but `RANK` and `WORLD_SIZE` are not set: this is one "
            "process of several, and not told which. Set both, or unset `LOCAL_RANK` to run one process"
        )
    if env.get("PMIX_RANK") is not None and not env.get(
        "SLURM_STEP_NUM_TASKS", env.get("OMPI_COMM_WORLD_SIZE")
    ):
        raise _untold("PMIx", "WORLD_SIZE")
    for name in ("PET_NNODES", "PET_NPROC_PER_NODE"):
        if (text := env.get(name, "1")) not in ("", "1", "1:1"):
            raise JobPlaceError(
                f"`{name}` is {text!r} but `RANK` is not set: it is an option for a launcher that starts "
                f"several ranks. Start the script with `hocket-launch script.py`, or unset `{name}` to run "
                "one process"
            )


def _untold(starter: str, missing: str) -> JobPlaceError:
    return JobPlaceError(
        f"{starter} started this process as one of several, and `{missing}` is not set: which one it is, and "
        "of how many, cannot be told. Set `RANK` and `WORLD_SIZE` (0 and 1 to run one process)"
    )


def _number(env: Mapping[str, str], *names: str) -> int | None:
    """Return the value of the first of these variables that is set; None if none is."""
    for name in names:
        text = env.get(name)
        if text is None:
            continue
        if not re.fullmatch(r"\s*-?\d+\s*", text):
            raise JobPlaceError(
                f"`{name}` is {text!r}, expected an integer. Launchers set it: unset it to run one process"
            )
        return int(text)
    return None


def _complete(place: JobPlace, other: JobPlace | None) -> JobPlace:
    """Fill in what another program tells of the same place."""
    if other is None or (other.rank, other.world_size) != (place.rank, place.world_size):
        return place
    missing = {
        name: getattr(other, name)
        for name in ("local_rank", "local_world_size", "num_hosts")
        if getattr(place, name) is None
    }
    return replace(place, **missing)


def _tasks_of_nodes(text: str) -> list[int]:
    """Expand Slurm's "2(x3),1" to [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is not None:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _check_within(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if size < 1:
        raise JobPlaceError(f"`{size_name}` is {size}, expected at least 1")
    if not 0 <= rank < size:
        raise JobPlaceError(
            f"`{rank_name}` is {rank}, expected 0 to {size - 1} since `{size_name}` is {size}. "
            "Are these left over from another job? Unset them, or start with `hocket-launch`"
        )
