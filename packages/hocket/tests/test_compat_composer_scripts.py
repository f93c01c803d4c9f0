"""Whole scripts in Composer's style, unchanged, by the launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def launch(num_ranks: int, script: str, *arguments: object) -> str:
    """Run a script by the `composer` command; return what rank 0 printed."""
    command = "import sys; from hocket.compat.composer.command import main; sys.exit(main())"
    file = HERE / "composer_scripts" / script
    done = subprocess.run(
        [sys.executable, "-c", command, "-n", str(num_ranks), str(file), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_a_causal_model_is_trained_with_alibi() -> None:
    pytest.importorskip("transformers")
    printed = launch(1, "causal.py")
    assert "ranks=1 batches=16" in printed
    assert "better=True no_positions=True" in printed
