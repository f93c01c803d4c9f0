"""Ranks of one host exchange numbers over sockets, and name a rank that ends, is late or out of step."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hocket.trainer.errors import RankFailedError
from hocket.trainer.ranks import rank_sockets
from hocket.trainer.ranks.rank_sockets import RankSockets, connect_ranks


class Threads:
    """A rendezvous of ranks that are threads of one process."""

    def __init__(self, num_ranks):
        self.num_ranks = num_ranks
        self.box = [None] * num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=30)

    def exchange(self, rank, value):
        self.box[rank] = value
        self.barrier.wait()
        values = list(self.box)
        self.barrier.wait()
        return values


class Rank:
    def __init__(self, threads, rank):
        self.threads, self.rank, self.num_ranks = threads, rank, threads.num_ranks

    def gather(self, number):
        return self.threads.exchange(self.rank, number)

    def text_from_rank_0(self, text):
        return self.threads.exchange(self.rank, text)[0]


def on_ranks(num_ranks, function):
    threads = Threads(num_ranks)
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(lambda rank: function(Rank(threads, rank)), range(num_ranks)))


@pytest.fixture
def pair():
    ends = socket.socketpair()
    ranks = [RankSockets(rank, {1 - rank: ends[rank]}, num_numbers=2, timeout_s=0.2) for rank in (0, 1)]
    yield ranks
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_rank_gets_the_numbers_of_all_in_order(num_ranks, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def run(rank):
        sockets = connect_ranks(rank, num_numbers=2, timeout_s=30)
        first = sockets.send(rank.rank, 0.1)
        second = sockets.send(2.0**53 - rank.rank, -1)
        received = sockets.receive(first), sockets.receive(second)
        sockets.close()
        return received

    for first, second in on_ranks(num_ranks, run):
        assert first == [(float(rank), 0.1) for rank in range(num_ranks)]
        assert second == [(2.0**53 - rank, -1.0) for rank in range(num_ranks)]
    assert not list(tmp_path.iterdir())


def test_a_process_with_more_than_1024_open_files_waits_for_numbers():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"this process may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    try:
        ends = socket.socketpair()
        with ends[0]:
            high = socket.socket(fileno=fcntl.fcntl(ends[0].fileno(), fcntl.F_DUPFD, 1100))
        early = RankSockets(0, {1: high}, num_numbers=1, timeout_s=30)
        late = RankSockets(1, {0: ends[1]}, num_numbers=1, timeout_s=30)
        number = early.send(1.0)
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(early.receive, number)
            time.sleep(0.2)  # `early` waits by now
            late.send(2.0)
            assert received.result(30) == [(1.0,), (2.0,)]
        early.close()
        late.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_ranks_and_ranks_on_several_hosts_use_no_sockets(monkeypatch, tmp_path):
    assert on_ranks(9, lambda rank: connect_ranks(rank, num_numbers=1, timeout_s=30)) == [None] * 9
    numbers = iter(range(100))
    monkeypatch.setattr(rank_sockets, "_host_number", lambda: float(next(numbers)))
    assert on_ranks(2, lambda rank: connect_ranks(rank, num_numbers=1, timeout_s=30)) == [None] * 2


@pytest.mark.parametrize("step", ["_listen", "_connect"])
def test_no_rank_uses_sockets_if_one_cannot_connect(step, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(rank_sockets, "_SETUP_S", 0.2)
    function = getattr(rank_sockets, step)

    def fails_on_rank_1(listener, folder, rank, *others):
        if getattr(rank, "rank", rank) == 1:
            raise PermissionError("no")
        function(listener, folder, rank, *others)

    monkeypatch.setattr(rank_sockets, step, fails_on_rank_1)
    num_open = len(os.listdir("/proc/self/fd"))
    assert on_ranks(2, lambda rank: connect_ranks(rank, num_numbers=1, timeout_s=30)) == [None] * 2
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert not list(tmp_path.iterdir())


def test_a_rank_that_ended_is_named_and_its_sent_numbers_still_arrive(pair):
    one, other = pair
    number, _ = one.send(1, 2), other.send(3, 4)
    other.close()
    assert one.receive(number) == [(1.0, 2.0), (3.0, 4.0)]
    with pytest.raises(RankFailedError, match="rank 1 ended before the other ranks did"):
        one.receive(one.send(1, 2))


def test_a_rank_that_ended_before_it_sent_is_named(pair):
    one, other = pair
    number = one.send(1, 2)
    other.close()
    with pytest.raises(RankFailedError, match="rank 1 ended before the other ranks did"):
        one.receive(number)


def test_a_late_rank_is_named(pair):
    one, _ = pair
    with pytest.raises(RankFailedError, match=r"rank 1 sent nothing for 0.2 s"):
        one.receive(one.send(1, 2))


def test_a_rank_in_another_exchange_is_named(pair):
    one, other = pair
    other._num_sent = 7
    other.send(0, 0)
    with pytest.raises(RankFailedError, match="rank 1 is at exchange 8, and this rank at 1"):
        one.receive(one.send(1, 2))
