"""The README's script runs unchanged."""

from __future__ import annotations

import re
from pathlib import Path


def test_the_script_in_the_readme_trains():
    text = Path(__file__).parents[1].joinpath("README.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in script.splitlines() if line.strip()]) <= 10
    names = {}
    exec(compile(script, "README.md", "exec"), names)  # executes only the repository's own README
    assert names["trainer"].state.timestamp.sample == "1280sp"
