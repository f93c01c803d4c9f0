"""Writes `tools/constraints.txt`, names, versions and hashes of everything that uv resolves, or compares it.

`uv.lock` is not committed, because it records download addresses; `tools/constraints.txt` is, and records the
tested versions. `--check` resolves with these versions and writes them to `uv.lock`, so a version that a
registry publishes late, although it is older than `exclude-newer`, changes nothing.
"""

from __future__ import annotations

import argparse
import difflib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tools" / "constraints.txt"


def pins(constraints: str) -> list[str]:
    """Return the requirements of a constraints file, with their versions and markers and without hashes."""
    lines = re.findall(r"^[a-z0-9].*==.*$", constraints, re.MULTILINE)
    return [line.rstrip("\\ ") for line in lines]


def resolved(pinned: list[str]) -> str:
    """Return the constraints that uv resolves, and write them to `uv.lock`.

    Args:
        pinned: Requirements whose versions are kept.

    Raises:
        SystemExit: uv could not resolve, with its message.
    """
    command = [
        "uv",
        "export",
        "--quiet",
        "--no-header",
        "--all-groups",
        "--all-packages",
        "--no-emit-workspace",
        *(f"--upgrade-package={one}" for one in pinned),
    ]
    completed = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=300)
    if completed.returncode:
        sys.exit(
            f"uv cannot resolve{' the versions of tools/constraints.txt' * bool(pinned)}: {completed.stderr}"
        )
    return completed.stdout


def main() -> int:
    """Write the file, or with `--check` compare it and return 1 if it differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if not parser.parse_args().check:
        FILE.write_text(resolved([]))
        return 0
    current = FILE.read_text() if FILE.exists() else ""
    now = resolved(pins(current))
    if current == now:
        return 0
    difference = difflib.unified_diff(
        current.splitlines(), now.splitlines(), "tools/constraints.txt", "uv export", n=0
    )
    print("\n".join(list(difference)[:40]))
    print("tools/constraints.txt is not what uv resolves: run `python tools/constraints.py` and commit it")
    return 1


if __name__ == "__main__":
    sys.exit(main())
