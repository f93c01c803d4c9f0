"""The examples run, and print what they say."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("own_algorithm", "size of the noise at the end: 0.097"),
        ("own_callback", "losses: 0."),
        ("own_train_step", "trained for 32ba"),
        ("evaluation", "often {"),
    ],
)
def test_an_example_runs(name: str, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, f"{name}.py"], cwd=EXAMPLES, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
