"""What the documents show runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1]


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)
    assert len(snippets) == 3
    names: dict[str, object] = {}
    exec("\n".join(snippets), names)
    assert names["state"]["epoch"] == 1  # type: ignore[index]


def test_the_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(PACKAGE / "examples" / "resume_elsewhere.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "448 samples on 4 ranks, then 552 on 2" in done.stdout
    assert "same order as without the stop: True" in done.stdout
