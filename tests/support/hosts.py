"""A job over several launchers, as over several hosts: on loopback, or each in a network of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hocket.dist.drill.networks import Networks
from hocket.dist.launch.warm.starter import WarmProcess
from support import launches

JOB = """
import json, os, pathlib, signal, sys, time
import torch
from hocket.dist import provide

out, case = pathlib.Path(sys.argv[1]), sys.argv[2]
host, start = os.environ["HOST"], len(list(out.glob(f"start-{os.environ['HOST']}-*")))
(out / f"start-{host}-{start}").write_text(json.dumps({"pid": os.getpid()}))
if case == "dies twice" and host == "1" and start == 1:
    os.kill(os.getpid(), signal.SIGKILL)  # while its job restarts
with provide(None, device="cpu", timeout_s=float(os.environ.get("TIMEOUT_S", 20))) as parallelism:
    size = parallelism.data_parallel[1]
    for step in range(10**6):
        present = parallelism.reduce_async(torch.ones(1, dtype=torch.float64)).wait()
        if step == 3:
            (out / f"up-{host}-{start}-{size}").touch()
            if case.startswith("dies") and host == "1" and start == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        may_end = (out / "end").exists() or (case.startswith("dies") and start > 0 and step > 10)
        if parallelism.reduce_async(torch.tensor([float(may_end)])).wait() > 0:
            break
        time.sleep(0.02)
"""
"""A script `job.py DIR CASE` that trains until a file `end` exists, or until it has died as the case says."""
CONF = "last_call_timeout=1"
"""The wait of the elastic rendezvous for further hosts, once it has enough of them."""


@contextmanager
def hosts(
    tmp_path: Path,
    case: str,
    nodes: str,
    count: int,
    *,
    first: int = 0,
    ahead: int | None = None,
    conf: str = CONF,
    env: Mapping[str, str] | None = None,
    networks: Networks | None = None,
    script: str = JOB,
    place: Sequence[str] | None = None,
) -> Iterator[list[WarmProcess]]:
    """Start launchers, each with one rank, as on a number of hosts; yield their processes.

    Args:
        tmp_path: A folder for the job, which all hosts share.
        case: The case of the job.
        nodes: The value of `--nnodes`.
        count: Number of hosts.
        first: The number of the first host.
        ahead: A host whose clock is 10 minutes ahead.
        conf: The settings of the elastic rendezvous.
        env: Variables of all hosts.
        networks: A network with an address for each host; all are on loopback otherwise.
        script: The job.
        place: The options of the place at which the launchers meet; machine 0 by default.
    """
    path = tmp_path / "job.py"
    path.write_text(script)
    port_file = tmp_path / "port"
    if not port_file.exists():
        port_file.write_text(launches.free_port())
    host_0 = "127.0.0.1" if networks is None else networks.address(0)
    address = ["--master_addr", host_0, "--master_port", port_file.read_text()]
    made = []
    for node in range(first, first + count):
        options = ["-n", "1", "--nnodes", nodes, "--max-restarts", "3", "--shutdown-timeout", "3"]
        options += [] if nodes.isdecimal() else ["--rdzv-conf", conf]
        options += [
            "--node_rank",
            str(node),
            *(address if place is None else place),
            "--log-dir",
            str(tmp_path / f"logs-{node}"),
        ]
        own = {"HOST": str(node), **(env or {})}
        if networks is not None:
            own |= {"NETWORK": networks.name(node), "GLOO_SOCKET_IFNAME": networks.interface(node)}
        if node == ahead:
            own["CLOCK_AHEAD_S"] = "600"
        made.append(
            launches.fork_launcher(*options, path, tmp_path, case, env=own, log=tmp_path / f"log-{node}")
        )
    try:
        yield made
    finally:
        for launcher in made:
            if launcher.poll() is None:
                os.kill(launcher.pid, signal.SIGKILL)
            launcher.wait(20)


def wait_for(tmp_path: Path, pattern: str, timeout_s: float = 100) -> None:
    """Wait for a file that a rank writes."""
    deadline = time.monotonic() + timeout_s
    while not list(tmp_path.glob(pattern)):
        logs = "\n".join(log.read_text() for log in sorted(tmp_path.glob("log-*")))
        assert time.monotonic() < deadline, (
            f"no {pattern}: {sorted(p.name for p in tmp_path.iterdir())}\n{logs}"
        )
        time.sleep(0.1)


def check_ended(tmp_path: Path, launchers: list[WarmProcess]) -> None:
    """Wait for the launchers of a job that ends well."""
    for node, launcher in enumerate(launchers):
        status, log = launcher.wait(60), (tmp_path / f"log-{node}").read_text()
        assert status == 0, log
        assert "cold start" not in log
