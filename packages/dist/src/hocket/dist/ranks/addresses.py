"""The address at which ranks and launchers meet, where `srun`, `mpirun` or a similar program started them."""

import json
import os
import re
import subprocess
import zlib
from collections.abc import Mapping
from pathlib import Path

from hocket.dist.errors import WorldError
from hocket.dist.ranks.job_place import JobPlace, read_starter

_PORTS = range(15000, 25000)
_JOB_NAMES = (
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "PALS_APID",
    "FLUX_JOB_ID",
    "PBS_JOBID",
    "LSB_JOBID",
    "SLURM_JOB_ID",
)
_RANK_NAMES = (b"PMI_RANK=", b"COMM_WORLD_RANK=")
_SAGEMAKER_PORT = 7777
_HOST_FILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE")


def rendezvous_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return `MASTER_ADDR` and `MASTER_PORT` where they are not set and can be told.

    Raises:
        WorldError: The list of hosts of a step of Slurm is absent or cannot be read.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    place = read_starter(env) if missing else None
    if place is None or (env.get("RANK"), env.get("WORLD_SIZE")) != (str(place.rank), str(place.world_size)):
        return {}
    host = first_host(env, place)
    found = {} if host is None else {"MASTER_ADDR": host, "MASTER_PORT": str(job_port(env, place))}
    return {name: value for name, value in found.items() if name in missing}


def launcher_options(env: Mapping[str, str]) -> dict[str, str]:
    """Return the launcher's options where one launcher was started on each of several hosts; else none.

    Raises:
        JobPlaceError: The environment does not tell which of several processes this one is.
        WorldError: As for `rendezvous_variables`.
    """
    place = read_starter(env)
    if place is None or is_rank(place):
        return {}
    options = {"nnodes": str(place.world_size), "node_rank": str(place.rank)}
    host = env.get("MASTER_ADDR") or first_host(env, place)
    if host is not None:
        options |= {"master_addr": host, "master_port": env.get("MASTER_PORT") or str(job_port(env, place))}
    return options


def is_rank(place: JobPlace) -> bool:
    """Return whether a starter's process is one rank of several on its host, not a launcher of ranks."""
    if place.num_hosts is not None:
        return place.world_size > place.num_hosts
    return place.local_world_size != 1


def first_host(env: Mapping[str, str], place: JobPlace) -> str | None:
    """Return the host of rank 0; None if the environment does not tell.

    Raises:
        WorldError: As for `rendezvous_variables`.
    """
    if place.local_world_size == place.world_size or place.num_hosts == 1:
        return "127.0.0.1"
    if place.starter == "SageMaker":
        return str(json.loads(env["SM_HOSTS"])[0])
    if place.starter == "Slurm" or env.get("SLURM_JOB_NODELIST"):
        return _first_slurm_host(env)
    for name in _HOST_FILES:
        if (path := env.get(name)) and Path(path).is_file() and (hosts := Path(path).read_text().split()):
            return hosts[0]
    return None


def job_port(env: Mapping[str, str], place: JobPlace | None = None) -> int:
    """Return a port that is the same on all hosts, and differs between jobs, steps and restarts."""
    if place is not None and place.starter == "SageMaker":
        return _SAGEMAKER_PORT
    if place is None or place.starter == "Slurm":
        step = int(env.get("SLURM_STEP_ID") or "0") * 1009
        number = int(env.get("SLURM_JOB_ID", "0")) * 7 + int(env.get("SLURM_RESTART_COUNT", "0")) + step
    else:
        name = next((env[name] for name in _JOB_NAMES if env.get(name)), None)
        number = zlib.crc32((name or str(_starter_process())).encode())
    return _PORTS[number % len(_PORTS)]


def _starter_process() -> int:
    """Return the id of the process that started the ranks of this host: MPICH does not name its jobs.

    It is the nearest ancestor without a rank; the nearer ones are shells and wrappers of this rank.
    """
    pid = os.getppid()
    try:
        while any(name in Path(f"/proc/{pid}/environ").read_bytes() for name in _RANK_NAMES):
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        pass  # not Linux, or another user's process
    return pid


def _first_slurm_host(env: Mapping[str, str]) -> str:
    names = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if not names:
        raise WorldError("Slurm started this process but `SLURM_STEP_NODELIST` is not set. Set `MASTER_ADDR`")
    if "[" not in names:
        return names.split(",")[0]
    try:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", names], capture_output=True, text=True, check=True, timeout=10
        )
        return listed.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        # "gpu[003-007,9]-x" begins with gpu003-x.
        match = re.match(r"([^\[,]*)\[(\w+)[^\]]*\]([^,\[]*)", names)
        if match is None:
            raise WorldError(
                f"`SLURM_STEP_NODELIST` is {names!r}, and `scontrol show hostnames` failed. Set `MASTER_ADDR`"
            ) from None
        return "".join(match.groups())
