"""Restarts are counted from the last progress on."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import pytest

from hocket.dist.launch.restarts import MEMORY_FOLDERS, Progress, memory_folders
from support import launches

SCRIPT = """
import json, os, pathlib, signal, sys
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if os.environ["RANK"] == "0":
    (pathlib.Path(sys.argv[1]) / f"attempt-{attempt}").touch()
    status = {"checkpoint": f"ba{min(attempt, 2)}", "folder": "f", "batch": min(attempt, 2)}
    pathlib.Path(os.environ["HOCKET_STATUS_FILE"]).write_text(json.dumps(status))
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


def test_a_checkpoint_is_progress_if_its_folder_has_none_as_late(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.write_text("{")
    progress = Progress(path)
    expected = []
    for folder, batch, has_advanced in [
        ("a", 4, True),
        ("a", 4, False),
        ("a", 2, False),  # a run that starts again at 0 each time
        ("b", 1, True),  # a second training of the same script
        ("a", 6, True),
    ]:
        path.write_text(json.dumps({"checkpoint": f"ba{batch}", "folder": folder, "batch": batch}))
        expected.append((progress.has_advanced(), has_advanced))
    assert all(found == wanted for found, wanted in expected), expected
    assert progress.checkpoint == "ba6"
    assert not Progress(path).has_advanced(), "the checkpoint of an earlier launcher counts"
    path.write_text('{"checkpoint": "s3://b/ep1"}')
    assert not progress.has_advanced()
    path.write_text('{"folder": "a", "batch": 7}')  # a copy in memory
    assert progress.has_advanced()
    assert progress.checkpoint == "s3://b/ep1"


def test_a_job_that_advances_restarts_more_often_than_max_restarts(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(SCRIPT)
    done = launches.run(tmp_path, "-n", "2", "--max-restarts", "2", script, tmp_path)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    # Attempts 0 to 2 get further than those before; two restarts follow the last of them.
    assert sorted(path.name for path in tmp_path.glob("attempt-*")) == [f"attempt-{n}" for n in range(5)]
    assert [line.rpartition("; ")[2] for line in done.stderr.splitlines() if "first, by SIGKILL" in line] == [
        "all ranks start again, restart 1 of 2 since the checkpoint ba0",
        "all ranks start again, restart 1 of 2 since the checkpoint ba1",
        "all ranks start again, restart 1 of 2 since the checkpoint ba2",
        "all ranks start again, restart 2 of 2 since the checkpoint ba2",
        "no restart is left of 2 since the checkpoint ba2",
    ], done.stderr


HOLDS_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_folders_for_copies_last_as_long_as_their_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, used = tmp_path / "hocket-memory-left", tmp_path / "hocket-memory-used"
    for folder in (left, used):
        (folder / "run" / "ba2").mkdir(parents=True)
        (folder / "lock").touch()
    (tmp_path / "other" / "run").mkdir(parents=True)
    (tmp_path / "other" / "lock").touch()
    (tmp_path / "hocket-memory-link").symlink_to("other")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS_LOCK, str(used / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with memory_folders(Namespace(max_restarts=1)):
            made = [Path(folder) for folder in os.environ[MEMORY_FOLDERS].split(os.pathsep)]
            assert [folder.parent for folder in made] == [Path("/dev/shm"), tmp_path]
            assert all((folder / "lock").exists() for folder in made)
            assert not left.exists(), "the folder of a launcher that has ended"
            assert (used / "run" / "ba2").exists(), "the folder of a launcher that runs"
            assert (tmp_path / "other" / "run").exists(), "a folder that a link leads to"
            with memory_folders(Namespace(max_restarts=0)):
                assert MEMORY_FOLDERS not in os.environ
        assert not any(folder.exists() for folder in made)
        assert MEMORY_FOLDERS not in os.environ
        holder.communicate(timeout=20)
