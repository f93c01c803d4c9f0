"""The launcher's report of a failed job: the rank that failed first, with its traceback, once."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support import launches


def _check_traceback(script: Path, tmp_path: Path) -> None:
    done = launches.run_forked(tmp_path, "-n", "2", script, tmp_path, "raise")
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("hocket-launch: ") :]
    assert report.startswith("hocket-launch: rank 1 (pid")
    assert "failed first, with exit code 1" in report
    assert done.stderr.count("ValueError: rank one failed") == 2, "in the verdict, and in the traceback"
    (logs,) = launches.forked_logs().glob("hocket-launch-*")
    (stdout,) = logs.glob("*/attempt_0/1/stdout.log")
    assert stdout.read_text() == "output of rank 1\n"
    assert str(logs) in done.stderr
    assert not launches.is_alive(json.loads((tmp_path / "rank-0").read_text())["pid"])


def _check_first_cause(script: Path, tmp_path: Path) -> None:
    done = launches.run_forked(tmp_path, "-n", "3", script, tmp_path, "follow")
    assert done.returncode == 1
    assert re.search(r"hocket-launch: rank 1 .pid \d+. failed first, with an error: `ValueError", done.stderr)
    assert "Ended because of it: rank" in done.stderr


def _check_killed_rank(script: Path, tmp_path: Path) -> None:
    done = launches.run_forked(tmp_path, "-n", "2", "--log-dir", tmp_path / "logs", script, tmp_path, "kill")
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 (pid" in done.stderr
    assert "failed first, by SIGKILL" in done.stderr
    assert list((tmp_path / "logs").glob("*/attempt_0/1/stdout.log"))


@pytest.mark.slow
@pytest.mark.parametrize("check", [_check_traceback, _check_first_cause, _check_killed_rank])
def test_the_rank_that_failed_first_ends_the_job_and_is_named(
    script: Path, tmp_path: Path, check: Callable[[Path, Path], None]
) -> None:
    check(script, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["1", "0"])
def test_a_failed_training_is_reported_once_and_first(tmp_path: Path, failing: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(launches.DIST_SCRIPT)
    done = launches.run_forked(tmp_path, "-n", "2", path, failing)
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    assert done.stderr.count("ValueError: a bad sample") == 2, "in the verdict, and in the traceback"
    assert f"hocket-launch: rank {failing}" in done.stderr
    assert f"at {path}:10 in" in done.stderr or f"at {path}:10, at" in done.stderr, "the line is missing"


LATE = """
import os, sys, time
import torch
import torch.distributed as dist
from hocket.dist import provide

def hang():
    time.sleep(300)

with provide(None, device="cpu", timeout_s=6):
    late_s = {"0": 0.0, "1": 3.0, "2": None}[os.environ["RANK"]]
    dist.all_reduce(torch.ones(3))
    time.sleep(late_s) if late_s is not None else hang()
    dist.all_reduce(torch.ones(3))
"""


@pytest.mark.slow
def test_of_a_rank_that_hangs_and_one_that_came_late_the_first_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(LATE)
    done = launches.run_forked(tmp_path, "-n", "3", path)
    assert done.returncode == 1
    (verdict,) = [line for line in done.stderr.splitlines() if line.startswith("hocket-launch: rank")]
    assert re.match(r"hocket-launch: rank 2 \(pid \d+\) did not take part in a collective; ", verdict)
    assert f"at {path}:8 in `hang`" in verdict
    assert "Ended because of it: ranks 0, 1. " in verdict
