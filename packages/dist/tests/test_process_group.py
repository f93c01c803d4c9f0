"""Joining a process group: the rank from the environment, absent ranks, and cleaning up."""

import gc
import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hocket.dist import AbsentRanksError, World, WorldError, join, provide, read_world
from hocket.dist.ranks import preflight
from support.ranks import run_ranks


def test_an_empty_environment_is_a_world_of_one_process() -> None:
    assert read_world({}) == World(rank=0, world_size=1, local_rank=0, local_world_size=1)


def test_the_launchers_variables_are_read() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert read_world(env) == World(rank=5, world_size=8, local_rank=1, local_world_size=4)
    assert read_world({"RANK": "1", "WORLD_SIZE": "2"}).local_rank == 1


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "1"}, "`WORLD_SIZE` is not"),
        ({"WORLD_SIZE": "2"}, "`RANK` is not"),
        ({"RANK": "two", "WORLD_SIZE": "2"}, "`RANK` is 'two'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "`RANK` is 2, expected 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "`WORLD_SIZE` is 0"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"}, "`LOCAL_RANK` is 3"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"},
            "more than `WORLD_SIZE`",
        ),
    ],
)
def test_an_invalid_environment_raises_with_the_variable(env: dict[str, str], message: str) -> None:
    with pytest.raises(WorldError, match=message):
        read_world(env)


def test_one_process_needs_no_group() -> None:
    with provide(None, device="cpu", timeout_s=10) as parallelism:
        assert parallelism.data_parallel == (0, 1)
        assert not dist.is_initialized()
        values = torch.tensor([2.0, 3.0], dtype=torch.float64)
        total = parallelism.reduce_async(values).wait()
        assert total.tolist() == [2.0, 3.0]
        assert total.data_ptr() != values.data_ptr()


def _held_after_layouts() -> list[tuple[int, int]]:
    """Return the open files and threads after each of several sharded models in one process."""
    gc.disable()  # a collection that happens to run would end the groups, too
    held = []
    for _ in range(5):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        with provide({}, device="cpu", timeout_s=10) as parallelism:
            model = parallelism.lay_out(model, [torch.optim.SGD(model.parameters())])
            model(torch.ones(2, 4)).sum().backward()
        held.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return held


def test_a_later_group_ends_the_threads_and_sockets_of_earlier_ones() -> None:
    (held,) = run_ranks(_held_after_layouts, 1)
    assert held[2:] == [held[-1]] * 3


LEFT_UP = """
import atexit
import torch
import torch.distributed as dist
from hocket.dist import join

atexit.register(lambda: print("up at the end:", dist.is_initialized()))
join(device=torch.device("cpu"), timeout_s=20, needs_group=True)
print("up:", dist.is_initialized())
{last}
"""


@pytest.mark.parametrize(("last", "is_up"), [("", False), ("raise KeyError", True)])
def test_a_group_left_up_is_destroyed_before_the_interpreter_shuts_down(last: str, is_up: bool) -> None:
    command = [sys.executable, "-c", LEFT_UP.format(last=last)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    printed = [line for line in ended.stdout.splitlines() if not line.startswith("[Gloo]")]  # from torch 2.9
    assert printed == ["up: True", f"up at the end: {is_up}"], ended.stderr
    assert ended.returncode == is_up


def test_close_keeps_a_group_that_it_did_not_make(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with provide({}, device="cpu", timeout_s=10):
            pass
        assert dist.is_initialized()
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with provide(None, device="cpu", timeout_s=10) as parallelism:
            assert parallelism.data_parallel == (0, 1), "the group is the truth, not the environment"
    finally:
        dist.destroy_process_group()
    monkeypatch.undo()
    with provide({}, device="cpu", timeout_s=10):
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_a_group_that_joins_an_existing_one_explains_failures_with_its_store() -> None:
    device = torch.device("cpu")
    with join(device=device, timeout_s=10, needs_group=True), join(device=device, timeout_s=10) as second:
        error = RuntimeError("gloo: Connection closed by peer")
        second.explain(error)
    assert [note[:9] for note in error.__notes__] == ["rank 0 of"]
    assert not dist.is_initialized()


def _exchange() -> list[dict[str, Any]]:
    """Join, communicate and leave twice, as two trainers in succession do."""
    return [_exchange_once() for _ in range(2)]


def _exchange_once() -> dict[str, Any]:
    parallelism = provide({}, device="cpu", timeout_s=30)
    rank, size = parallelism.data_parallel
    # A number beyond float32's integers, and two all-reduces at once.
    first = parallelism.reduce_async(torch.tensor([2.0**53 - 4, float(rank)], dtype=torch.float64) / size)
    values = torch.arange(3) + rank
    second = parallelism.reduce_async(values)
    sums = second.wait().tolist(), first.wait().tolist()
    left_alone = values.tolist()
    parallelism.close()
    parallelism.close()
    return {"sums": sums, "left": left_alone, "rank": rank, "initialized": dist.is_initialized()}


def test_ranks_can_join_reduce_and_leave_repeatedly() -> None:
    for rank, results in enumerate(run_ranks(_exchange, 2, timeout_s=60)):
        for result in results:
            assert result["rank"] == rank
            assert result["sums"] == ([1, 3, 5], [2.0**53 - 4, 0.5])
            assert result["left"] == [rank, rank + 1, rank + 2]
            assert not result["initialized"]


def _come_unless(absent: tuple[int, ...]) -> str | None:
    if read_world().rank in absent:
        time.sleep(4)  # the process stays alive, so only the roll call can notice its absence
        return None
    started = time.monotonic()
    with pytest.raises(AbsentRanksError) as caught:
        join(device=torch.device("cpu"), timeout_s=2)
    assert not dist.is_initialized()
    assert caught.value.ranks == absent
    assert time.monotonic() - started < 20
    return str(caught.value)


def _call_roll_in_vain() -> float | None:
    """Return the seconds until the roll call fails in a job whose collectives may take ten minutes."""
    assert preflight.PREFLIGHT_S == 60
    if read_world().rank == 1:
        time.sleep(8)
        return None
    preflight.PREFLIGHT_S = 1.5
    started = time.monotonic()
    with pytest.raises(AbsentRanksError, match=r"after 1\.5 s rank 1 of 2") as caught:
        join(device=torch.device("cpu"), timeout_s=600)
    for words in ("interface lo (127.0.0.1)", "127.0.0.1:", "`GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME`"):
        assert words in str(caught.value)
    return time.monotonic() - started


@pytest.mark.slow
def test_the_roll_call_ends_after_a_minute_whatever_the_timeout() -> None:
    """The test shortens the minute to 1.5 s."""
    seconds, _ = run_ranks(_call_roll_in_vain, 2, timeout_s=60)
    assert 1.4 < seconds < 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("absent", "words"),
    [(1, "after 2 s rank 1 of 2 had not appeared"), (0, "where rank 0 should listen, within 2 s")],
)
def test_an_absent_rank_is_named_by_the_present_one(absent: int, words: str) -> None:
    messages = run_ranks(_come_unless, 2, (absent,), timeout_s=60)
    assert messages[absent] is None
    assert words in messages[1 - absent]
