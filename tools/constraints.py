"""Writes `tools/constraints.txt`, names, versions and hashes of everything that uv resolves, or compares it.

`uv.lock` is not kept, because it records download addresses; this file is, and says which versions were
tested.
"""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tools" / "constraints.txt"


def resolved() -> str:
    """What uv resolves now.

    Raises:
        subprocess.CalledProcessError: uv could not resolve.
    """
    command = [
        "uv",
        "export",
        "--quiet",
        "--no-header",
        "--all-groups",
        "--all-packages",
        "--no-emit-workspace",
    ]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300).stdout


def main() -> int:
    """Writes the file, or with `--check` compares it and returns 1 where it differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    now = resolved()
    if not parser.parse_args().check:
        FILE.write_text(now)
        return 0
    kept = FILE.read_text() if FILE.exists() else ""
    if kept == now:
        return 0
    difference = difflib.unified_diff(
        kept.splitlines(), now.splitlines(), "tools/constraints.txt", "uv export", n=0
    )
    print("\n".join(list(difference)[:40]))
    print("tools/constraints.txt is not what uv resolves: run `python tools/constraints.py` and commit it")
    return 1


if __name__ == "__main__":
    sys.exit(main())
