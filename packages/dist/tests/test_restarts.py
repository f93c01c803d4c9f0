"""Restarts are counted from the last progress on."""

import json
import signal
from pathlib import Path

from hocket.dist.launch.restarts import Progress
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
