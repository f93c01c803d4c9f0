"""Restarts of a job over several launchers, as over several hosts: failures, members, and clocks."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from hocket.dist.drill.networks import Networks
from hocket.dist.launch import attempts
from hocket.dist.launch.elastic_answers import frequent_polls, poll_interval
from hocket.dist.launch.logs import RankLogs
from support import launches
from support.hosts import CONF, check_ended, hosts, wait_for
from support.ranks import run_ranks
from support.sampling import cases

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
    trained = [int(path.name.split("-")[2]) for path in tmp_path.glob("up-1-*-2")]
    assert max(trained, default=0) >= last, "host 1 did not train with host 0 again"


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
        for path in tmp_path.glob("up-1-*-3"):
            path.unlink()
        # Two hosts may start first, if the launcher of the third comes late.
        wait_for(tmp_path, "up-1-*-3")
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


TRAIN = """
import os, pathlib, signal, sys, time
import torch
from torch import nn
from hocket.trainer import Callback, ComposerModel, Trainer

out, case = pathlib.Path(sys.argv[1]), sys.argv[2]
host, rank, size = os.environ["HOST"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))

    def forward(self, batch):
        return self.layers(batch[0])

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()


class Loader:
    data_parallel = (rank, size)

    def __len__(self):
        return 16

    def __iter__(self):
        for step in range(16):
            generator = torch.Generator().manual_seed(step)
            rows = slice(rank * 6 // size, (rank + 1) * 6 // size)
            yield [torch.randn(6, 6, generator=generator)[rows] for _ in range(2)]


class Steps(Callback):
    def batch_end(self, state, logger):
        batch = state.timestamp.batch.value
        with (out / f"{case}-steps-{host}").open("a") as file:
            print(time.time(), batch, size, float(state.loss).hex(), file=file)
        if case == "killed" and host == "1" and batch == 8 and not (out / "killed-at").exists():
            (out / "killed-at").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "outage" and batch == 8:
            (out / f"waits-{host}").touch()
            while not (out / "is-cut").exists():
                time.sleep(0.05)


with Trainer(
    model=Model(),
    train_dataloader=Loader(),
    max_duration="16ba",
    callbacks=Steps(),
    fsdp_config={},
    save_folder=str(out / f"{case}-checkpoints"),
    save_interval="5ba",
    autoresume=True,
    progress_bar=False,
    device="cpu",
    dist_timeout=20,
) as trainer:
    trainer.fit()
"""
"""A script `train.py DIR CASE` of 16 batches.

After 8, the rank of host 1 ends in the case `killed`, and all ranks wait for a file in the case `outage`.
"""


def _steps(tmp_path: Path, case: str) -> list[tuple[float, int, int, str]]:
    """Return the steps of all hosts: time, batch, number of ranks, and loss in full."""
    rows = [
        line.split() for path in tmp_path.glob(f"{case}-steps-*") for line in path.read_text().splitlines()
    ]
    return [(float(at), int(batch), int(size), loss) for at, batch, size, loss in rows]


def _losses(steps: list[tuple[float, int, int, str]]) -> dict[int, set[str]]:
    """Return the losses of all ranks by batch."""
    by_batch: dict[int, set[str]] = {}
    for _, batch, _, loss in steps:
        by_batch.setdefault(batch, set()).add(loss)
    return by_batch


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["3", "1:3"])
def test_three_hosts_train_again_with_equal_losses(tmp_path: Path, networks: Networks, nodes: str) -> None:
    if not cases(full=1, sample=0):
        pytest.skip("two trainings of three hosts each: `-m slow`")
    # The first round begins at once when all hosts have come, however late one of them is.
    conf = "last_call_timeout=60"
    for case, count in (("undisturbed", "3"), ("killed", nodes)):
        with hosts(tmp_path, case, count, 3, conf=conf, networks=networks, script=TRAIN) as launchers:
            for host, launcher in enumerate(launchers):
                assert launcher.wait(100) == 0, (tmp_path / f"log-{host}").read_text()
        (tmp_path / "port").unlink()
    expected, steps = _losses(_steps(tmp_path, "undisturbed")), _steps(tmp_path, "killed")
    killed_at = float((tmp_path / "killed-at").read_text())
    # The other hosts may end batch 8 after the kill.
    again = [(at - killed_at, batch, size) for at, batch, size, _ in steps if at > killed_at and batch < 8]
    next_step_s, first_batch, size = min(again)
    print(f"--nnodes {nodes}: from the kill to the next trained step {next_step_s:.1f} s")
    assert (first_batch, size) == (6, 3), "all three hosts go on from the checkpoint of batch 5"
    assert sorted(expected) == list(range(1, 17))
    assert all(len(losses) == 3 for losses in expected.values())
    assert _losses(steps) == expected


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_a_link_that_is_away_for_8_s_costs_nothing_else(
    tmp_path: Path, networks: Networks, nodes: str
) -> None:
    if not cases(full=1, sample=0):
        pytest.skip("two trainings of two hosts each, and 8 s without a link: `-m slow`")
    for case, count in (("undisturbed", "2"), ("outage", nodes)):
        with hosts(
            tmp_path, case, count, 2, conf="last_call_timeout=60", networks=networks, script=TRAIN
        ) as launchers:
            if case == "outage":
                for host in (0, 1):
                    wait_for(tmp_path, f"waits-{host}")
                networks.cut(1)
                (tmp_path / "is-cut").touch()
                time.sleep(8)
                networks.restore(1)
                restored_at = time.time()
            for host, launcher in enumerate(launchers):
                assert launcher.wait(100) == 0, (tmp_path / f"log-{host}").read_text()
        (tmp_path / "port").unlink()
    steps = _steps(tmp_path, "outage")
    assert sorted(batch for _, batch, _, _ in steps) == sorted([*range(1, 17)] * 2), "no batch comes twice"
    assert min(at for at, batch, _, _ in steps if batch == 9) > restored_at
    assert _losses(steps) == _losses(_steps(tmp_path, "undisturbed"))


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


LATE = """
import os, pathlib, sys, time
out, host = pathlib.Path(sys.argv[1]), os.environ["HOST"]
is_first = not (out / f"up-{host}").exists()
(out / f"up-{host}").touch()
if host == "1" and is_first:
    time.sleep(600)
"""
"""A script whose ranks end at once; the first one of host 1 runs on until its launcher ends it."""


@pytest.mark.slow
def test_a_host_that_comes_when_another_has_finished_keeps_no_launcher_waiting(tmp_path: Path) -> None:
    with hosts(tmp_path, "late", "2:3", 2, script=LATE) as first:
        wait_for(tmp_path, "up-1")
        # Host 0 waits for host 1 at the end of their round, and host 1 begins another one with host 2.
        with hosts(tmp_path, "late", "2:3", 1, first=2, script=LATE) as late:
            check_ended(tmp_path, first + late)


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


def meet_twice(port: int) -> list[int]:
    """Return the ranks of a host in two rounds, of which host 0 begins the second."""
    host = int(os.environ["RANK"])
    os.environ[attempts._OWN_STORE] = "1"
    store = TCPStore("127.0.0.1", port, 3, is_master=host == 0)
    delay, sync = dynamic_rendezvous._delay, dynamic_rendezvous._BackendRendezvousStateHolder.sync
    with frequent_polls(3):
        backend = C10dRendezvousBackend(store, "job")
        handler = DynamicRendezvousHandler.from_backend("job", store, backend, 1, 3, "localhost")
        met = [handler.next_rendezvous().rank]
        deadline = time.monotonic() + 60
        while host and not handler.num_nodes_waiting():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        met.append(handler.next_rendezvous().rank)
        handler._stop_heartbeats()
    assert dynamic_rendezvous._delay is delay
    assert dynamic_rendezvous._BackendRendezvousStateHolder.sync is sync
    store.set(f"done/{host}", b"")
    if host == 0:
        store.wait([f"done/{one}" for one in range(3)])
    return met


def test_hosts_that_look_often_meet_round_after_round() -> None:
    met = run_ranks(meet_twice, 3, int(launches.free_port()))
    assert [sorted(one) for one in zip(*met, strict=True)] == [[0, 1, 2]] * 2


def test_many_hosts_look_no_more_often_than_torch_has_them_look() -> None:
    assert poll_interval(2) < 0.2
    assert [poll_interval(count) for count in (90, 1000)] == [1.0, 1.0]
