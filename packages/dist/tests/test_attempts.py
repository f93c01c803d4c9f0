"""Restarts of a job over several launchers, as over several hosts: failures, members, and clocks."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler

from hocket.dist.drill.networks import Networks
from hocket.dist.launch import attempts
from hocket.dist.launch.logs import RankLogs
from support import launches
from support.hosts import CONF, check_ended, hosts, wait_for

TIMEOUT_S = 6.0
"""The deadline of a collective where a rank has stopped or is cut off."""
SLACK_S = 15.0
"""Time for processes that a loaded machine runs late."""


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
            os.kill(second[0].pid, signal.SIGKILL)
            second[0].wait(20)
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
def test_a_stopped_rank_is_replaced_within_the_deadline(tmp_path: Path) -> None:
    """A rank that SIGSTOP has stopped answers nobody, and its own launcher takes it for healthy."""
    with hosts(tmp_path, "stops", "1:3", 3, env={"TIMEOUT_S": str(TIMEOUT_S)}) as launchers:
        wait_for(tmp_path, "up-0-*-3")
        started = len(list(tmp_path.glob("start-1-*")))
        os.kill(json.loads((tmp_path / f"start-1-{started - 1}").read_text())["pid"], signal.SIGSTOP)
        stopped_at = time.monotonic()
        wait_for(tmp_path, f"up-1-{started}-3")
        assert time.monotonic() - stopped_at < TIMEOUT_S + 5 + SLACK_S
        (tmp_path / "end").touch()
        check_ended(tmp_path, launchers)
    assert "had been stopped, as by SIGSTOP, and was killed" in (tmp_path / "log-1").read_text()


@pytest.fixture
def networks() -> Iterator[Networks]:
    found = Networks(3)
    if reason := found.open():
        pytest.skip(reason)
    yield found
    found.close()


@pytest.mark.slow
def test_hosts_whose_network_is_cut_are_left_behind_and_end(tmp_path: Path, networks: Networks) -> None:
    env = {"TIMEOUT_S": str(TIMEOUT_S), "LOST_S": "8"}
    with hosts(tmp_path, "cut", "1:3", 3, env=env, networks=networks) as launchers:
        wait_for(tmp_path, "up-0-*-3")
        networks.cut(2)
        cut_at = time.monotonic()
        wait_for(tmp_path, "up-1-*-2")
        assert time.monotonic() - cut_at < TIMEOUT_S + 5 + SLACK_S
        networks.cut(0)
        for host in (2, 1):
            assert launchers[host].wait(60) == 1
            log = (tmp_path / f"log-{host}").read_text()
            assert "ended, since the launcher of machine 0 at 10.213.7.1:" in log
            assert "Start the job again" in log


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_launchers_end_when_their_clocks_differ(tmp_path: Path, ahead: int) -> None:
    conf = f"{CONF},keep_alive_interval=1"
    with hosts(tmp_path, "ends", "1:2", 2, ahead=ahead, conf=conf) as launchers:
        wait_for(tmp_path, "up-1-*-2")
        time.sleep(4)  # torch takes a host for dead after three intervals
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
