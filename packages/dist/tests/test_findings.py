"""The states of a machine's ranks, as the launcher finds them."""

import argparse
from pathlib import Path

import pytest

from hocket.dist.launch.verdicts.findings import has_missed_deadline
from hocket.dist.ranks.failures import _record

WAITED = {"failed_at": 1.0, "waited_s": 8.0, "late": [1], "has_diverged": False}


@pytest.mark.parametrize(
    ("diagnosis", "expected"),
    [
        (WAITED, True),
        ({"failed_at": 1.0, "waited_s": 8.0}, True),
        ({**WAITED, "late": []}, False),
        ({**WAITED, "late": [], "has_diverged": True}, False),
        ({**WAITED, "waited_s": 0.0}, False),
        (None, False),
    ],
    ids=["late", "store lost", "nobody late", "diverged", "connection closed", "own error"],
)
def test_a_rank_that_waited_in_vain_is_seen_before_its_process_ends(
    tmp_path: Path, diagnosis: dict[str, object] | None, expected: bool
) -> None:
    files = {local_rank: tmp_path / f"{local_rank}.json" for local_rank in (0, 1)}
    context = argparse.Namespace(error_files={rank: str(path) for rank, path in files.items()})
    assert not has_missed_deadline(context)
    _record(files[1], "Traceback", "RuntimeError: x", is_secondary=True, diagnosis=diagnosis)
    assert has_missed_deadline(context) is expected
