"""Tests of the test support: ranks, deadlines, leak checks, and the sampling of slow tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import leaks, ranks, sampling
from support.ranks import RankError, RankTimeoutError, run_ranks
from support.standing_ranks import standing_ranks


@dataclass(frozen=True)
class Point:
    x: int
    y: int


def swap(point: Point) -> tuple[str, Point]:
    return os.environ["RANK"], Point(x=point.y, y=point.x)


def environment(names: list[str]) -> list[str]:
    return [os.environ[name] for name in names]


def fail_on_last() -> None:
    if os.environ["RANK"] == "2":
        raise KeyError("no such shard")
    time.sleep(60)


CHILD = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(300)
"""


def sleep_forever(folder: str) -> None:
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    if os.environ["RANK"] == "0":
        return
    subprocess.run([sys.executable, "-c", CHILD, Path(folder, "child")], check=False)


def own_pid() -> int:
    return os.getpid()


def gather_threads() -> int:
    for _ in range(60):
        threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
    return os.getpid()


def die_at_once() -> None:
    os.kill(os.getpid(), 9)


def sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    assert torch.get_num_threads() == 1
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    return value.item()


def group_at_exit(folder: str, should_fail: bool) -> None:
    import atexit

    import torch.distributed as dist

    rank, was_up = os.environ["RANK"], dist.is_initialized()
    atexit.register(lambda: Path(folder, rank).write_text(f"{was_up} {dist.is_initialized()}"))
    if should_fail:
        raise ValueError("after the group came up")


def hash_and_draw() -> tuple[int, float]:
    import numpy as np

    return hash("a text"), float(np.random.rand())


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_ranks_return_in_order_and_results_may_be_of_the_modules_classes() -> None:
    point = Point(x=1, y=2)
    assert run_ranks(swap, 2, point) == [("0", Point(x=2, y=1)), ("1", Point(x=2, y=1))]


def test_ranks_have_the_environment_that_a_launcher_sets() -> None:
    names = ["WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "EXTRA"]
    assert run_ranks(environment, 2, names, env={"EXTRA": "yes"}) == [
        ["2", "0", "2", "127.0.0.1", "yes"],
        ["2", "1", "2", "127.0.0.1", "yes"],
    ]
    assert "RANK" not in os.environ


def is_forked() -> bool:
    return "hocket.dist.launch.warm.main_module" in sys.modules


def test_ranks_are_forked_unless_a_variable_acts_on_import() -> None:
    assert run_ranks(is_forked, 2) == [True, True]
    assert run_ranks(is_forked, 2, env={"EXTRA": "yes"}) == [True, True]
    assert run_ranks(is_forked, 2, env={"OMP_NUM_THREADS": "2"}) == [False, False]


def test_ranks_are_as_different_as_separate_interpreters() -> None:
    drawn = [one for _ in range(2) for one in run_ranks(hash_and_draw, 2)]
    assert len({hashed for hashed, _ in drawn}) == 2, "each rank number has a seed of its own"
    assert len({number for _, number in drawn}) == 4
    # A variable that Python reads at startup takes effect only in a new interpreter.
    (first, _), (second, _) = run_ranks(hash_and_draw, 2, env={"PYTHONHASHSEED": "0"})
    assert first == second


def test_a_failure_names_its_rank_and_carries_its_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(
        RankError, match=r"(?s)failed on rank 2 of 3.*fail_on_last.*KeyError: 'no such shard'"
    ) as caught:
        run_ranks(fail_on_last, 3, timeout_s=50)
    assert caught.value.rank == 2
    assert isinstance(caught.value.__cause__, KeyError)
    assert time.monotonic() - start < 40, "the call waited for the other ranks"


def test_a_rank_killed_without_a_result_raises() -> None:
    with pytest.raises(RankError, match="killed by SIGKILL without a result"):
        run_ranks(die_at_once, 1)


class PassesWhenRank0HasEnded:
    """A clock that jumps by an hour once rank 0 has ended and rank 1 hangs, regardless of the real time."""

    sleep = staticmethod(time.sleep)

    def __init__(self, folder: Path) -> None:
        self._pids = [folder / name for name in ("0", "1", "child")]
        self._was_reached = False

    def monotonic(self) -> float:
        # Jump one call late, so that `run_ranks` has read the result of rank 0 before.
        hour = 3600.0 * self._was_reached
        if all(path.exists() and path.read_text() for path in self._pids):
            self._was_reached = not is_running(int(self._pids[0].read_text()))
        return time.monotonic() + hour


def test_the_deadline_shows_the_stacks_and_kills_every_descendant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "time", PassesWhenRank0HasEnded(tmp_path))
    with pytest.raises(
        RankTimeoutError, match=r"(?s)not done after 100 s on rank\(s\) \[1\] of 2.*sleep_forever"
    ):
        run_ranks(sleep_forever, 2, str(tmp_path), timeout_s=100)
    assert not any(is_running(int((tmp_path / name).read_text())) for name in ("0", "1", "child"))


@pytest.mark.parametrize("fn", [lambda: None, print, len])
def test_functions_that_are_not_top_level_raise(fn: object) -> None:
    with pytest.raises(ValueError, match="expected a top-level function"):
        run_ranks(fn, 1)  # type: ignore[arg-type]


def test_gloo_starts_with_one_computing_thread_a_rank() -> None:
    assert run_ranks(sum_of_ranks, 2, init="gloo") == [3.0, 3.0]


@pytest.mark.parametrize("should_fail", [False, True])
def test_the_process_group_is_always_destroyed(tmp_path: Path, should_fail: bool) -> None:
    if should_fail:
        with pytest.raises(RankError, match="after the group came up"):
            run_ranks(group_at_exit, 1, str(tmp_path), True, init="gloo")
    else:
        run_ranks(group_at_exit, 1, str(tmp_path), False, init="gloo")
    assert (tmp_path / "0").read_text() == "True False"


def test_standing_ranks_start_anew_once_they_have_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.standing_ranks.MOST_THREADS_OF_ALL", 120)

    with standing_ranks(2) as standing:
        before = leaks.snapshot()
        first = standing.run(own_pid)
        assert standing.run(gather_threads) == first
        assert not {*standing.run(own_pid)} & {*first}
        leaks.check(before)


def test_threads_files_children_and_environment_count_as_leaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "GRACE_S", 0.1)
    before = leaks.snapshot()
    assert leaks.leaks(before) == []
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left-behind")
    ours = threading.Thread(target=stop.wait, name="hocket-pool")
    file = (tmp_path / "open").open("w")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setenv("LEFT_BEHIND", "secret")
    try:
        thread.start()
        ours.start()
        found = "\n".join(leaks.leaks(before))
    finally:
        stop.set()
        thread.join()
        ours.join()
        file.close()
        child.communicate(b"\n")
    assert re.search(r"thread 'left-behind' is still running", found)
    assert str(tmp_path / "open") in found
    assert f"child process {child.pid} is still there" in found
    assert "`LEFT_BEHIND` set" in found
    assert "secret" not in found
    assert "hocket-pool" not in found
    monkeypatch.delenv("LEFT_BEHIND")
    assert leaks.leaks(before) == []


SUITE = """
import os
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("n", range(20))
def test_many(n, cases):
    print(f"ran many {n} cases {cases(full=10_000, sample=50)}")

@pytest.mark.slow
def test_alone():
    print("ran alone")

@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize("n", range(5))
def test_rare(n):
    print(f"ran rare {n}")

def test_quick():
    print("ran quick")

@pytest.mark.parity
def test_parity():
    print("ran parity")

def test_leaves_a_variable():
    if "LEAK" in os.environ:
        os.environ["LEFT_BEHIND"] = "1"
"""


def run_suite(folder: Path, *arguments: str, seed: int | None = 7, **env: str) -> str:
    """Run the suite above in a separate pytest, and return its output."""
    (folder / "conftest.py").write_text('pytest_plugins = ["support.plugin"]\n')
    (folder / "test_suite.py").write_text(SUITE)
    markers = "".join(f"    {name}: as in the workspace\n" for name in ("slow", "parity", "stores", "gpu"))
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = --strict-markers\nmarkers =\n{markers}")
    variables = {**os.environ, **env, "PYTHONPATH": str(Path(sampling.__file__).parents[1])}
    variables.pop(sampling.SEED_VARIABLE, None)
    variables.pop(sampling.EXPRESSION_VARIABLE, None)
    if seed is not None:
        variables[sampling.SEED_VARIABLE] = str(seed)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "-q", "-rs", "-p", "no:cacheprovider", *arguments],
        cwd=folder, env=variables, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def test_a_plain_run_draws_one_parameter_set_of_each_slow_test_by_the_seed(tmp_path: Path) -> None:
    first, again = run_suite(tmp_path), run_suite(tmp_path)
    drawn = re.findall(r"ran many (\d+) cases (\d+)", first)
    assert len(drawn) == 1
    assert drawn[0][1] == "50"
    assert drawn == re.findall(r"ran many (\d+) cases (\d+)", again)
    assert "ran alone" in first
    assert "ran quick" in first
    assert "24 deselected" in first
    assert drawn != re.findall(r"ran many (\d+) cases (\d+)", run_suite(tmp_path, seed=8))


def test_a_plain_run_takes_a_function_that_is_due_once_in_four_runs_with_some_seeds(tmp_path: Path) -> None:
    found = [len(re.findall(r"ran rare \d", run_suite(tmp_path, seed=seed))) for seed in (0, 4)]
    assert found == [0, 1]


def test_marker_slow_runs_all_parameter_sets(tmp_path: Path) -> None:
    printed = run_suite(tmp_path, "-m", "slow")
    assert [int(n) for n in re.findall(r"ran many (\d+) cases 10000", printed)] == list(range(20))
    assert "ran alone" in printed
    assert len(re.findall(r"ran rare \d", printed)) == 5
    assert "ran quick" not in printed


def test_not_slow_runs_no_slow_test_and_draws_few_cases(tmp_path: Path) -> None:
    printed = run_suite(tmp_path, "-m", "not slow")
    assert "ran quick" in printed
    assert "ran many" not in printed
    assert not sampling.Plan(seed=0, expression="not slow and gpu").asks_for("slow")
    assert sampling.Plan(seed=0, expression="slow or not slow").asks_for("slow")


def test_a_marked_test_is_skipped_with_the_command_that_runs_it(tmp_path: Path) -> None:
    printed = run_suite(tmp_path)
    assert "ran parity" not in printed
    assert "run with `uv run pytest -m parity`" in printed
    assert "ran parity" in run_suite(tmp_path, "-m", "parity")


def test_a_seed_that_is_no_integer_raises(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setenv(sampling.SEED_VARIABLE, "tuesday")
    with pytest.raises(pytest.UsageError, match="`HOCKET_TEST_SEED` is 'tuesday'; expected an integer"):
        sampling.start(pytestconfig)


def test_a_leaking_test_fails(tmp_path: Path) -> None:
    printed = run_suite(tmp_path, "-k", "leaves", LEAK="1")
    assert "environment variable `LEFT_BEHIND` set" in printed
    assert "1 error" in printed
