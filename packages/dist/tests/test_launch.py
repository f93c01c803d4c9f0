"""`hocket-launch`, run as a command on real scripts."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hocket.dist import launch

SCRIPT = """
import json, os, pathlib, signal, sys, time, traceback
rank, out, what = int(os.environ["RANK"]), pathlib.Path(sys.argv[1]), sys.argv[2]
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"]
print("a word of rank", rank)
if what == "raise" and rank == 1:
    raise ValueError("rank one is unwell")
if what == "follow":
    told = out / "told"
    if rank == 1:
        try:
            raise ValueError("rank one is unwell")
        except ValueError:
            traceback.print_exc()
        told.touch()
    else:
        while not told.exists():
            time.sleep(0.05)
        raise RuntimeError("Connection closed by peer")
if what == "kill" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if what == "wait":
    def stop(number, frame):
        (out / f"stopped-{rank}").write_text(signal.Signals(number).name)
        sys.exit(0)
    for each in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(each, stop)
(out / f"rank-{rank}").write_text(json.dumps({
    "env": {name: os.environ[name] for name in names}, "argv": sys.argv, "pid": os.getpid(),
    "address": bool(os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])),
}))
if what != "end":
    time.sleep(60)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    return path


def _command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "hocket.dist.launch", *map(str, arguments)]


def _environment(tmp_path: Path) -> dict[str, str]:
    unset = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return {**kept, "TMPDIR": str(tmp_path)}


def _run(tmp_path: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(*arguments),
        env=_environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
    )


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ranks_find_their_places_and_arguments(script: Path, tmp_path: Path) -> None:
    done = _run(tmp_path, "-n", "2", "-m", "job", tmp_path, "end", "--their=own", "-n", "7")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"rank-{rank}").read_text())
        assert found["env"] == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
        }
        assert found["argv"][1:] == [str(tmp_path), "end", "--their=own", "-n", "7"]
        assert found["address"]
    assert done.stdout == "a word of rank 0\n"
    assert not list(tmp_path.glob("hocket-launch-*")), "the logs of a job that went well were left"


def test_the_rank_that_failed_is_named_with_its_traceback(script: Path, tmp_path: Path) -> None:
    done = _run(tmp_path, "-n", "2", script, tmp_path, "raise")
    assert done.returncode == 1
    assert "hocket-launch: rank 1 (pid" in done.stderr
    assert "ended first, with exit code 1" in done.stderr
    assert "ValueError: rank one is unwell" in done.stderr
    (logs,) = tmp_path.glob("hocket-launch-*")
    (stdout,) = logs.glob("*/attempt_0/1/stdout.log")
    assert stdout.read_text() == "a word of rank 1\n"
    assert str(logs) in done.stderr
    assert not _is_alive(json.loads((tmp_path / "rank-0").read_text())["pid"])


def test_the_cause_is_shown_where_a_rank_that_lost_it_was_quicker_to_end(
    script: Path, tmp_path: Path
) -> None:
    done = _run(tmp_path, "-n", "2", script, tmp_path, "follow")
    assert done.returncode == 1
    assert "hocket-launch: rank 0 (pid" in done.stderr
    assert (
        "ValueError: rank one is unwell" in done.stderr.partition("Another rank's error may be the cause")[2]
    )


def test_a_killed_rank_ends_the_job_with_its_signal(script: Path, tmp_path: Path) -> None:
    done = _run(tmp_path, "-n", "2", "--log-dir", tmp_path / "logs", script, tmp_path, "kill")
    assert done.returncode == 128 + signal.SIGKILL
    assert "ended first, by SIGKILL" in done.stderr
    assert list((tmp_path / "logs").glob("*/attempt_0/1/stdout.log"))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_a_signal_reaches_every_rank_and_leaves_none(
    script: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with subprocess.Popen(
        _command("-n", "2", script, tmp_path, "wait"),
        env=_environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            deadline = time.monotonic() + 60
            while len(list(tmp_path.glob("rank-*"))) < 2:
                assert time.monotonic() < deadline
                assert launcher.poll() is None
                time.sleep(0.05)
            time.sleep(0.2)
            launcher.send_signal(number)
            _, stderr = launcher.communicate(timeout=60)
        finally:
            launcher.kill()
    assert launcher.returncode == 128 + number
    assert f"ended all ranks after {number.name}" in stderr
    for rank in range(2):
        assert (tmp_path / f"stopped-{rank}").read_text() == number.name
        assert not _is_alive(json.loads((tmp_path / f"rank-{rank}").read_text())["pid"])


def test_help_is_ours_and_torchruns_is_there_too(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-h", "--help"):
        with pytest.raises(SystemExit) as ended:
            launch.main([flag])
        assert ended.value.code == 0
        ours = capsys.readouterr().out
        assert ours.startswith("usage: hocket-launch -n N [options] script.py")
    with pytest.raises(SystemExit):
        launch.main(["--help-torchrun"])
    theirs = capsys.readouterr().out
    for flag in ("--rdzv-backend", "--max-restarts", "--tee"):
        assert flag in theirs
    with pytest.raises(SystemExit) as ended:
        launch.main(["-n", "2"])
    assert ended.value.code == 2
    assert "training_script" in capsys.readouterr().err
