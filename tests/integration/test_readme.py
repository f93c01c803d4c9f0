"""The commands and scripts of the front page run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from support.readme import blocks, console_lines

BIN = Path(sys.executable).parent


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_commands_of_the_checkpoint_section_run(tmp_path: Path) -> None:
    commands = console_lines("The checkpoint tool, without torch")
    assert len(commands) == 4
    said = [run(*shlex.split(line.replace("/tmp", str(tmp_path))), cwd=tmp_path) for line in commands]
    assert "committed" in said[-1]


def test_the_training_script_runs_on_one_process_and_then_on_two(tmp_path: Path) -> None:
    (script,) = blocks("A training script", "python")
    (tmp_path / "train.py").write_text(script)
    run(
        "python",
        "-c",
        'from hocket.recipes.corpus import write_corpus; write_corpus("data", 129)',
        cwd=tmp_path,
    )
    run("python", "train.py", cwd=tmp_path)
    assert list((tmp_path / "checkpoints").rglob("checkpoint.json.zst"))

    longer = script.replace('max_duration="12ba"', 'max_duration="14ba", fsdp_config={}')
    assert longer != script
    (tmp_path / "train.py").write_text(longer)
    assert "going on from" in run("hocket-launch", "-n", "2", "train.py", cwd=tmp_path)
