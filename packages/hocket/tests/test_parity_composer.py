"""Short scripts give the same results with `hocket.compat.composer` as with Composer 0.32.1.

Run with `uv run pytest -m parity`: Composer lives in an environment of its own, which `uv` makes.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from support.composer_peer import PEER, run_peer

pytestmark = [pytest.mark.parity, pytest.mark.timeout(1800)]

SCRIPT = Path(__file__).parent / "composer_scripts" / "oracle.py"

#: Results that differ by design, for reasons in `docs/coming_from_composer.md`.
DIFFERING = {
    "clipping_by_norm": {"logged"},
    "sam": {"events", "rates"},
    "swa": {"parameters"},
}


def run_here(script: Path, *arguments: Path) -> None:
    """Run a script through the layer."""
    done = subprocess.run(
        [sys.executable, "-m", "hocket.compat.composer", str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("oracle")
    run_peer(SCRIPT, folder / "theirs.pt")
    run_here(SCRIPT, folder / "ours.pt")
    theirs, ours = (torch.load(folder / f"{name}.pt", weights_only=False) for name in ("theirs", "ours"))
    return theirs, ours


def test_scripts_give_the_same_results_as_with_composer(
    answers: tuple[dict[str, Any], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = answers
    assert len(theirs) >= 20
    assert theirs.keys() == ours.keys()
    differing = {name: _differing(theirs[name], ours[name]) for name in theirs}
    with capsys.disabled():
        same = sum(not found for found in differing.values())
        print(f"\n{same} of {len(theirs)} scripts give the same as on {PEER} in everything that is compared")
    assert {name: found for name, found in differing.items() if found} == DIFFERING


def test_sams_second_pass_fires_two_more_events_in_composer(
    answers: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    theirs, ours = (found["sam"] for found in answers)
    more = Counter(theirs["events"]) - Counter(ours["events"])
    assert more == {"before_train_batch": 6, "after_train_batch": 6}
    assert not Counter(ours["events"]) - Counter(theirs["events"])
    # The rates are recorded at `AFTER_TRAIN_BATCH`.
    assert theirs["rates"] == [rate for rate in ours["rates"] for _ in range(2)]


def test_swa_by_epochs_never_ends_at_the_end_of_a_batch_in_composer(
    answers: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    theirs, ours = answers
    assert _is_close(theirs["swa"]["parameters"], theirs["four_epochs"]["parameters"])
    assert _is_close(ours["swa"]["parameters"], ours["swa_in_batches"]["parameters"])


def test_a_run_resumes_from_a_file_saved_by_composer(tmp_path: Path) -> None:
    script = SCRIPT.with_name("saved.py")
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    run_peer(script, theirs)
    run_here(script, ours, theirs / "checkpoints" / "ep1-rank0.pt")
    whole, resumed = (torch.load(folder / "final.pt") for folder in (theirs, ours))
    assert (whole["batches"], resumed["batches"]) == ((0, 6), (3, 6))
    assert _is_close(resumed["trained"], whole["trained"])
    for folder in (whole, resumed):
        del folder["averaged"]["module.1.num_batches_tracked"]  # an integer count, which Composer averages
    assert _is_close(resumed["averaged"], whole["averaged"])
    assert not _is_close(whole["averaged"], whole["trained"])


def _differing(theirs: dict[str, Any], ours: dict[str, Any]) -> set[str]:
    if "error" in theirs or "error" in ours:
        return {f"theirs: {theirs.get('error')}, ours: {ours.get('error')}"}
    assert theirs.keys() == ours.keys()
    return {name for name in theirs if not _is_close(theirs[name], ours[name])}


def _is_close(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one.float(), other.float(), rtol=1e-4, atol=1e-5)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_close(one[name], other[name]) for name in one)
    if isinstance(one, list) and one and isinstance(one[0], float):
        return len(one) == len(other) and one == pytest.approx(other, abs=1e-9)
    return bool(one == other)
