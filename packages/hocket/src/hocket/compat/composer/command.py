"""The `composer` command: Hocket's launcher for Composer scripts, unless Composer itself is installed."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from hocket.dist.launch import main as launch


def main() -> int:
    """Run `composer -n 2 script.py`: Composer's own launcher where it is installed, else `hocket-launch`."""
    for entry in entry_points(group="console_scripts", name="composer"):
        if not entry.value.startswith("hocket."):
            status: int = entry.load()() or 0
            return status
    return launch(["--compat", "composer", *sys.argv[1:]])
