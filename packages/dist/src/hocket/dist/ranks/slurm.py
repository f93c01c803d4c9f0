"""Detection of this process's place in a job from the environments of Slurm and Open MPI."""

import re
import subprocess
from collections.abc import Mapping

from hocket.dist.errors import WorldError

_DEFAULT_PORTS = range(15000, 25000)


def detect_world(env: Mapping[str, str]) -> dict[str, str] | None:
    """Return torch's variables for a process that `srun` or `mpirun` started; None for any other process.

    Args:
        env: The environment. A Slurm allocation without a step (`salloc`, a batch script) is not a rank.
    """
    if "SLURM_STEP_ID" in env and int(env.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in env:
        num_tasks = int(env["SLURM_NTASKS"])
        local = _tasks_of_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", ""))
        node = int(env.get("SLURM_NODEID", "0"))
        return {
            "RANK": env["SLURM_PROCID"],
            "WORLD_SIZE": str(num_tasks),
            "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
            "LOCAL_WORLD_SIZE": str(local[node] if node < len(local) else num_tasks),
            "GROUP_RANK": str(node),
            "MASTER_ADDR": env.get("MASTER_ADDR") or first_host(env),
            "MASTER_PORT": env.get("MASTER_PORT") or str(job_port(env)),
        }
    if "OMPI_COMM_WORLD_RANK" in env:
        variables = {
            "RANK": env["OMPI_COMM_WORLD_RANK"],
            "WORLD_SIZE": env["OMPI_COMM_WORLD_SIZE"],
            "LOCAL_RANK": env["OMPI_COMM_WORLD_LOCAL_RANK"],
            "LOCAL_WORLD_SIZE": env["OMPI_COMM_WORLD_LOCAL_SIZE"],
        }
        return variables | {name: env[name] for name in ("MASTER_ADDR", "MASTER_PORT") if env.get(name)}
    return None


def detect_nodes(env: Mapping[str, str]) -> dict[str, str] | None:
    """Return the launcher's options for one launcher on each node of a Slurm step; None outside of one."""
    num_nodes = int(env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES") or "1")
    if "SLURM_STEP_ID" not in env or num_nodes < 2 or int(env.get("SLURM_NTASKS", "1")) != num_nodes:
        return None
    return {
        "nnodes": str(num_nodes),
        "node_rank": env["SLURM_NODEID"],
        "master_addr": env.get("MASTER_ADDR") or first_host(env),
        "master_port": env.get("MASTER_PORT") or str(job_port(env)),
    }


def first_host(env: Mapping[str, str]) -> str:
    """Return the first host of the step.

    Raises:
        WorldError: The step's list of hosts is absent or cannot be read.
    """
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


def job_port(env: Mapping[str, str]) -> int:
    """Return a port that is the same on all nodes and differs between jobs and restarts."""
    number = int(env.get("SLURM_JOB_ID", "0")) * 7 + int(env.get("SLURM_RESTART_COUNT", "0"))
    return _DEFAULT_PORTS[number % len(_DEFAULT_PORTS)]


def _tasks_of_node(text: str) -> list[int]:
    """Expand Slurm's "2(x3),1" to [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is not None:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts
