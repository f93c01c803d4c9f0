"""The start of a rank: it ends with its launcher, and expands variables such as `$RANK` in its arguments."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hocket.dist.ranks import rank_command
from support import launches


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("log-$RANK-of-${WORLD_SIZE}", "log-3-of-8"),
        ("$HOME ~ $RANKS ${LOCAL_RANK $", "$HOME ~ $RANKS ${LOCAL_RANK $"),
        ("$MASTER_PORT", "$MASTER_PORT"),
    ],
)
def test_other_words_with_a_dollar_are_not_changed(
    monkeypatch: pytest.MonkeyPatch, argument: str, expected: str
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert rank_command.expand(argument) == expected


def test_ranks_end_with_a_launcher_that_is_killed(script: Path, tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        launches.command("-n", "2", script, tmp_path, "wait"), env=launches.environment(tmp_path)
    )
    try:
        reports = [tmp_path / f"rank-{rank}" for rank in range(2)]
        deadline = time.monotonic() + 60
        while not all(report.exists() and report.read_text() for report in reports):
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.05)
        pids = [json.loads(report.read_text())["pid"] for report in reports]
        assert all(map(launches.is_alive, pids))
    finally:
        launcher.kill()
        launcher.wait(10)
    deadline = time.monotonic() + 10
    while any(map(launches.is_alive, pids)):
        assert time.monotonic() < deadline, "a rank outlived its launcher"
        time.sleep(0.05)


WRAPPED = """
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("rank_command", sys.argv[1])
rank_command = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rank_command)
rank_command.end_with_wrapper()
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_rank_ends_with_the_shell_that_started_it() -> None:
    wrapper = subprocess.Popen(
        ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", WRAPPED, rank_command.__file__],
        env={**os.environ, rank_command.LAUNCHER: str(os.getpid())},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert wrapper.stdout is not None
    pid = int(wrapper.stdout.readline())
    wrapper.kill()
    wrapper.wait(10)
    wrapper.stdout.close()
    deadline = time.monotonic() + 10
    try:
        while launches.is_alive(pid):
            assert time.monotonic() < deadline, "the rank outlived its shell"
            time.sleep(0.05)
    finally:
        if launches.is_alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("is_slurm", [False, True])
def test_variables_of_the_rank_in_arguments_are_expanded(tmp_path: Path, is_slurm: bool) -> None:
    """Composer's launcher expands the same variables."""
    path = tmp_path / "job.py"
    path.write_text("import sys; print(*sys.argv[1:])")
    arguments = ["log-$RANK-of-${WORLD_SIZE}", "$HOME"]
    if is_slurm:
        environment = {
            **launches.environment(tmp_path),
            **launches.SLURM,
            "SLURM_NTASKS": "8",
            "SLURM_PROCID": "6",
        }
        done = subprocess.run(
            launches.command(path, *arguments), env=environment, capture_output=True, text=True, timeout=150
        )
        assert done.stdout == "log-6-of-8 $HOME\n", done.stderr
        return
    done = launches.run_forked(tmp_path, "-n", "2", "--stdout", tmp_path / "{rank}.out", path, *arguments)
    assert done.stdout == "log-0-of-2 $HOME\n", done.stderr
    assert (tmp_path / "1.out").read_text() == "log-1-of-2 $HOME\n"
