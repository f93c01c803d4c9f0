"""A cluster of Slurm on this machine: Debian's controller, and a node for each of two loopback addresses."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import launches

NODES = ("127.0.0.1", "127.0.0.2")
KILL_WAIT_S = 7
START_TIMEOUT_S = 30

_CONF = """
ClusterName=hocket
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmdSpoolDir={folder}/%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait={kill_wait_s}
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@dataclass(frozen=True, slots=True)
class Slurm:
    """A running cluster."""

    env: Mapping[str, str]
    """The environment of its commands."""
    folder: Path

    def run(self, *command: str | Path) -> str:
        """Run one of Slurm's commands, or a command that calls them, and return its output."""
        words = [str(word) for word in command]
        done = subprocess.run(
            words, env=dict(self.env), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of a job as `scontrol` shows them."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_end(self, number: str, *, timeout_s: float) -> dict[str, str]:
        """Return the fields of a job once it has ended."""
        deadline = time.monotonic() + timeout_s
        while (job := self.job(number))["JobState"] in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < deadline, job
            time.sleep(0.2)
        return job


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Slurm]:
    """Start a controller and two nodes with two CPUs each; skip where Slurm is not installed."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "srun") if _find(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: `apt-get install slurm-wlm` has them")
    ports = [launches.free_port() for _ in range(1 + len(NODES))]
    nodes = [
        f"NodeName={node} NodeHostname=localhost NodeAddr={node} Port={port} CPUs=2"
        for node, port in zip(NODES, ports[1:], strict=True)
    ]
    for name in ("state", *NODES):
        (folder / name).mkdir(parents=True)
    conf = folder / "slurm.conf"
    conf.write_text(
        _CONF.format(
            controller=ports[0],
            user=getpass.getuser(),
            folder=folder,
            kill_wait_s=KILL_WAIT_S,
            nodes="\n".join(nodes),
        )
    )
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    env = {**own, "SLURM_CONF": str(conf)}
    commands = [["slurmctld", "-D", "-i", "-f", str(conf)]]
    commands += [["slurmd", "-D", "-N", node, "-f", str(conf)] for node in NODES]
    daemons = []
    try:
        for name, *arguments in commands:
            daemons.append(
                subprocess.Popen(
                    [str(_find(name)), *arguments],
                    env=env,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        cluster = Slurm(env, folder)
        _wait_for_nodes(cluster)
        yield cluster
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(timeout=20)


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def _wait_for_nodes(cluster: Slurm) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(AssertionError):
            if cluster.run("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle"] * len(NODES):
                return
        if time.monotonic() > deadline:
            logs = [path.read_text()[-2000:] for path in sorted(cluster.folder.glob("*.log"))]
            raise TimeoutError(f"the nodes of Slurm are not up after {START_TIMEOUT_S} s: {logs}")
        time.sleep(0.1)
