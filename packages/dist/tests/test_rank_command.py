"""The start of a rank: it ends with its launcher, and expands variables such as `$RANK` in its arguments."""

import json
import subprocess
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
