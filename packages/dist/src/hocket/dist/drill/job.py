"""One run of a drilled job: its launchers, the steps of its ranks, and the end."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hocket.dist.drill.faults import Fault
from hocket.dist.drill.networks import Networks
from hocket.dist.ranks.fault_injection import VARIABLE

RUN = "{run}"
"""A word in the script's arguments that stands for a folder of each run's own."""


class Process(Protocol):
    """A launcher: `subprocess.Popen`, or a fork."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code."""


Start = Callable[[Sequence[str], Mapping[str, str], Path], Process]
"""Starts `hocket-launch` with arguments and further variables; its output goes to a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The settings of all runs of a drill.

    Attributes:
        script: The training script and its arguments.
        folder: The folder of the drill.
        ranks: The number of ranks.
        hosts: The number of hosts among which they are divided, for faults of ranks.
        restarts: The restarts of the job; 0 to see each fault end it.
        steps: The optimizer steps of a run.
        timeout_s: The deadline of collectives.
        elastic: Whether hosts may come and go, as with `--nnodes 1:2`.
        start: Starts a launcher.
    """

    script: list[str]
    folder: Path
    ranks: int
    hosts: int = 1
    restarts: int = 1
    steps: int = 20
    timeout_s: float = 15.0
    elastic: bool = False
    start: Start


@dataclass(kw_only=True, slots=True)
class Outcome:
    """The course of one run.

    Attributes:
        codes: The exit codes of the launchers; None for one that had to be killed.
        logs: Their outputs.
        began_at: Seconds since 1970 at which the fault was made.
        ended_s: Seconds from then to the end of each launcher.
        steps: The steps of rank 0: time, digest, and process.
    """

    codes: list[int | None]
    logs: list[str]
    began_at: float
    ended_s: list[float]
    steps: list[tuple[float, str, int]] = field(default_factory=list)

    def verdicts(self) -> list[str]:
        """Return the paragraph of each launcher, empty where it printed none."""
        return [
            next((line for line in reversed(log.splitlines()) if line.startswith("hocket-launch: ")), "")
            for log in self.logs
        ]

    def next_step_s(self) -> float | None:
        """Return the seconds from the fault to the first step of a new process; None without one."""
        first = self.steps[0][2] if self.steps else None
        later = [at for at, _, pid in self.steps if pid != first and at > self.began_at]
        return min(later) - self.began_at if later else None


def start_launcher(arguments: Sequence[str], env: Mapping[str, str], log: Path) -> Process:
    """Start a launcher as a user does."""
    network = ["ip", "netns", "exec", env["NETWORK"]] if "NETWORK" in env else []
    with log.open("wb") as output:
        return subprocess.Popen(
            [*network, sys.executable, "-m", "hocket.dist.launch", *arguments],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def run_job(plan: Plan, fault: Fault | None, *, step: int = 0, limit_s: float) -> Outcome:
    """Run the job once, and end it after a time limit.

    Args:
        plan: The drill.
        fault: The fault; None for the run with which the others are compared.
        step: The optimizer step after which a rank makes the fault.
        limit_s: Seconds that the run may take.

    Raises:
        OSError: The fault needs networks that this machine does not allow.
    """
    name = "reference" if fault is None else fault.name
    run = plan.folder / name
    (run / "job").mkdir(parents=True)
    for path in (plan.folder / "reference").glob("last-*"):
        shutil.copy(path, run)
    hosts = plan.hosts if fault is None or fault.place == "rank" else 2
    networks = Networks(hosts) if fault is not None and fault.place == "network" else None
    if networks is not None and (reason := networks.open()):
        raise OSError(reason)
    launchers: list[Process] = []
    try:
        began_at = time.time()
        launchers += _start_all(plan, fault, run, hosts, step, networks)
        if networks is not None:
            _wait_for_step(run, step, launchers, began_at + limit_s)
            networks.cut(1)
            began_at = time.time()
        return _watch(launchers, run, began_at, limit_s)
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(launcher.pid, signal.SIGKILL)
            launcher.wait(20)
        if networks is not None:
            networks.close()


def _start_all(
    plan: Plan, fault: Fault | None, run: Path, hosts: int, step: int, networks: Networks | None
) -> list[Process]:
    drill = {
        "folder": str(run),
        "fault": "" if fault is None else fault.name,
        "fault_rank": plan.ranks - 1,
        "step": step,
        "steps": plan.steps,
        "timeout_s": plan.timeout_s,
    }
    address, port = "127.0.0.1" if networks is None else networks.address(0), _free_port()
    launchers = []
    for host in range(hosts):
        env = {VARIABLE: json.dumps(drill), "HOCKET_DRILL_RUN": str(run / "job")}
        script = [word.replace(RUN, str(run / "job")) for word in plan.script]
        options = ["-n", str(plan.ranks // hosts), "--log-dir", str(run / f"logs-{host}")]
        options += ["--max-restarts", str(plan.restarts), "--shutdown-timeout", "5"]
        if hosts > 1:
            is_odd = fault is not None and host == 1
            own_port = _free_port() if is_odd and fault is not None and fault.name == "port" else port
            more = is_odd and fault is not None and fault.name == "nnodes"
            options += [*_nodes_options(plan, fault, hosts, more=more), "--node_rank", str(host)]
            options += ["--master_addr", address, "--master_port", str(own_port)]
            env["GLOO_SOCKET_IFNAME"] = "lo" if networks is None else networks.interface(host)
            if is_odd and fault is not None and fault.name == "code":
                script[0] = _other_script(Path(script[0]), run)
                env["PYTHONPATH"] = os.pathsep.join(
                    [str(Path(plan.script[0]).resolve().parent), os.environ.get("PYTHONPATH", "")]
                )
        if networks is not None:
            env["NETWORK"] = networks.name(host)
        launchers.append(plan.start([*options, *script], env, run / f"log-{host}"))
    return launchers


def _nodes_options(plan: Plan, fault: Fault | None, hosts: int, *, more: bool) -> list[str]:
    """Return the options for the number of hosts, which is one more where the fault says so."""
    if not plan.elastic:
        return ["--nnodes", str(hosts + more)]
    if fault is not None and fault.place == "launch":
        # A host that cannot find the others would train alone where one host is enough.
        return ["--nnodes", f"{hosts}:{hosts + 1 + more}", "--rdzv-conf", "last_call_timeout=2"]
    # The first round begins when all hosts have come, however late one of them is.
    return ["--nnodes", f"1:{hosts}", "--rdzv-conf", "last_call_timeout=60"]


def _other_script(script: Path, run: Path) -> str:
    """Return a copy of a script that differs in a comment."""
    copy = run / "other" / script.name
    copy.parent.mkdir()
    copy.write_text(f"{script.read_text()}\n# another version\n")
    return str(copy)


def _wait_for_step(run: Path, step: int, launchers: list[Process], until: float) -> None:
    while time.time() < until and all(launcher.poll() is None for launcher in launchers):
        if len(read_steps(run)) >= step:
            return
        time.sleep(0.05)


def _watch(launchers: list[Process], run: Path, began_at: float, limit_s: float) -> Outcome:
    """Wait for all launchers."""
    ended: dict[int, float] = {}
    until = began_at + limit_s
    while len(ended) < len(launchers) and time.time() < until:
        for host, launcher in enumerate(launchers):
            if host not in ended and launcher.poll() is not None:
                ended[host] = time.time()
        time.sleep(0.05)
    made = [float(path.read_text()) for path in run.glob("made-*") if path.read_text()]
    began_at = max([began_at, *made])
    return Outcome(
        codes=[launcher.poll() for launcher in launchers],
        logs=[(run / f"log-{host}").read_text(errors="replace") for host in range(len(launchers))],
        began_at=began_at,
        ended_s=[ended.get(host, until) - began_at for host in range(len(launchers))],
        steps=read_steps(run),
    )


def read_steps(run: Path, rank: int = 0) -> list[tuple[float, str, int]]:
    """Return the steps that a rank has noted: time, digest, and process."""
    path = run / f"steps-{rank}"
    if not path.exists():
        return []
    rows = [line.split() for line in path.read_text().splitlines()]
    return [(float(row[0]), row[1], int(row[2])) for row in rows if len(row) == 3]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
