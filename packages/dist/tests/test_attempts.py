"""Restarts of a job over several launchers, as over several hosts: failures, members, and clocks."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler

from hocket.dist.launch import attempts
from hocket.dist.launch.logs import RankLogs
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
with provide(None, device="cpu", timeout_s=20) as parallelism:
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
AHEAD = """
import datetime, sys
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
class Ahead(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.now(tz) + datetime.timedelta(minutes=10)
dynamic_rendezvous.datetime = Ahead
from hocket.dist.launch import main
sys.exit(main(sys.argv[1:]))
"""


@contextmanager
def hosts(tmp_path: Path, case: str, nodes: str, count: int, *, first: int = 0) -> Iterator[list]:
    """Start launchers that meet on loopback, one of them 10 minutes ahead where the case says so."""
    path = tmp_path / "job.py"
    path.write_text(JOB)
    port_file = tmp_path / "port"
    if not port_file.exists():
        port_file.write_text(launches.free_port())
    made = []
    for node in range(first, first + count):
        place = [
            "--node_rank",
            str(node),
            "--master_addr",
            "127.0.0.1",
            "--master_port",
            port_file.read_text(),
        ]
        options = ["-n", "1", "--nnodes", nodes, "--max-restarts", "3", "--shutdown-timeout", "3", *place]
        command = launches.command(*options, path, tmp_path, case)
        if case == f"host {node} ahead":
            command = [sys.executable, "-c", AHEAD, *command[3:]]
        log = (tmp_path / f"log-{node}").open("w")
        env = {**launches.environment(tmp_path), "GLOO_SOCKET_IFNAME": "lo", "HOST": str(node)}
        made.append(
            subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True, cwd=tmp_path)
        )
        log.close()
    try:
        yield made
    finally:
        for launcher in made:
            launcher.kill()
            launcher.wait()


def wait_for(tmp_path: Path, pattern: str, timeout_s: float = 100) -> None:
    deadline = time.monotonic() + timeout_s
    while not list(tmp_path.glob(pattern)):
        logs = "\n".join(log.read_text() for log in sorted(tmp_path.glob("log-*")))
        assert time.monotonic() < deadline, (
            f"no {pattern}: {sorted(p.name for p in tmp_path.iterdir())}\n{logs}"
        )
        time.sleep(0.1)


def check_ended(tmp_path: Path, launchers: list) -> None:
    for node, launcher in enumerate(launchers):
        assert launcher.wait(timeout=60) == 0, (tmp_path / f"log-{node}").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["2", "1:2"])
@pytest.mark.parametrize("case", ["dies", "dies twice"])
def test_a_rank_of_another_host_than_0_dies_and_the_job_goes_on(
    tmp_path: Path, nodes: str, case: str
) -> None:
    with hosts(tmp_path, case, nodes, 2) as launchers:
        check_ended(tmp_path, launchers)
    last = 1 if case == "dies" else 2
    assert (tmp_path / f"up-1-{last}-2").exists(), "host 1 did not train with host 0 again"


@pytest.mark.slow
def test_a_host_joins_and_one_comes_back(tmp_path: Path) -> None:
    with hosts(tmp_path, "joins", "1:3", 1) as first:
        wait_for(tmp_path, "up-0-*-1")
        with hosts(tmp_path, "joins", "1:3", 1, first=1) as second:
            wait_for(tmp_path, "up-0-*-2")
            pid = json.loads((tmp_path / "start-1-0").read_text())["pid"]
            second[0].kill()
            second[0].wait()
            deadline = time.monotonic() + 10
            while launches.is_alive(pid):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            (tmp_path / "up-0-0-1").unlink()
            for path in tmp_path.glob("up-0-*-2"):
                path.unlink()
        with hosts(tmp_path, "joins", "1:3", 1, first=1) as third:
            wait_for(tmp_path, "up-0-*-2")
            (tmp_path / "end").touch()
            check_ended(tmp_path, first + third)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_launchers_end_when_their_clocks_differ(tmp_path: Path, ahead: int) -> None:
    with hosts(tmp_path, f"host {ahead} ahead", "1:2", 2) as launchers:
        wait_for(tmp_path, "up-1-*-2")
        time.sleep(20)  # torch takes a host for dead after 15 s
        (tmp_path / "end").touch()
        check_ended(tmp_path, launchers)
    assert len(list(tmp_path.glob("start-0-*"))) <= 2


@pytest.mark.slow
def test_a_host_that_is_alone_says_for_whom_it_waits(tmp_path: Path) -> None:
    with hosts(tmp_path, "joins", "2", 1):
        deadline = time.monotonic() + 60
        while "If this machine is the only one, leave `--nnodes` out" not in (tmp_path / "log-0").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_a_restart_without_machine_0_fails_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Unused(RendezvousHandler):
        def next_rendezvous(self):
            raise AssertionError("a request over a dead connection waits for a quarter of an hour")

        get_backend = is_closed = set_closed = num_nodes_waiting = get_run_id = shutdown = next_rendezvous

    monkeypatch.setattr(attempts, "_ANSWER_S", 0.3)
    logs = RankLogs(str(tmp_path), local_world_size=1)
    logs.attempt = 0
    handler = attempts.SharedAttempts(Unused(), logs, ("127.0.0.1", int(launches.free_port())))
    with pytest.raises(RendezvousError, match=r"no answer within 0\.3 s"):
        handler.next_rendezvous()
