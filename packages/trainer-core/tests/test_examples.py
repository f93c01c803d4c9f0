"""The examples run on one rank and on two, and print the expected lines."""

import contextlib
import importlib.util
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

from support.launches import run_alone
from support.ranks import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS = {"fine_tune": "transformers"}
PRINTED = {
    "own_algorithm": "size of the noise at the end: 0.097",
    "own_callback": "losses: 0.",
    "own_train_step": "trained for 32ba",
    "evaluation": "often {",
    "fine_tune": "gets the label 1",
}
# Two ranks have half as many batches in an epoch.
PRINTED_ON_TWO = PRINTED | {
    "own_algorithm": "size of the noise at the end: 0.220",
    "own_train_step": "trained for 16ba",
}


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PRINTED, "data"}


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs(name: str) -> None:
    pytest.importorskip(NEEDS.get(name, "torch"))
    done = run_alone(f"{name}.py", cwd=EXAMPLES)
    assert done.returncode == 0, done.stderr
    assert PRINTED[name] in done.stdout


def _run_all(names, folder):
    """Run the examples one after the other on this rank; return what each printed."""
    sys.path.insert(0, str(EXAMPLES))
    printed = {}
    for name in names:
        sys.argv = [f"{name}.py"] if name != "fine_tune" else [f"{name}.py", folder]
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        printed[name] = output.getvalue()
    return printed


def test_every_example_runs_on_two_ranks(tmp_path) -> None:
    names = [name for name in PRINTED if importlib.util.find_spec(NEEDS.get(name, "torch"))]
    first, second = run_ranks(_run_all, 2, names, str(tmp_path), timeout_s=240)
    for name in names:
        assert PRINTED_ON_TWO[name] in first[name]
    # The ranks print equal values for metrics over all ranks.
    assert first["evaluation"] == second["evaluation"]
    assert re.search(r"accuracy: (0\.[89]|1\.)", first.get("fine_tune", "accuracy: 1."))
