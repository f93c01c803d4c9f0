"""The commands that the front page shows."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def blocks(heading: str, language: str) -> list[str]:
    """Return the code blocks of a language under a heading of the README."""
    section = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", README.read_text(), re.M | re.S)
    assert section is not None, heading
    return re.findall(rf"^```{language}\n(.*?)^```", section[1], re.M | re.S)


def console_lines(heading: str) -> list[str]:
    """Return the commands under a heading of the README, in their order."""
    lines = "".join(blocks(heading, "console")).splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
