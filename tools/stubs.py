"""Compares the extension with its stub: the parts of `_native.pyi`, joined to one file for mypy's stubtest.

The parts are joined because stubtest skips names that a stub imports from another stub.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from hocket import native

ROOT = Path(__file__).resolve().parents[1]
STUBS = ROOT / "packages/native/src/hocket/native"
PARTS = ("_store", "_stream", "_ckpt")
OTHERS = tuple(f"from hocket.native.{name} import" for name in PARTS)


def joined() -> str:
    """Return the stub in one piece, without the imports of its parts from each other."""
    texts = [(STUBS / f"{name}.pyi").read_text() for name in ("_native", *PARTS)]
    lines = [line for text in texts for line in text.splitlines() if not line.startswith(OTHERS)]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run stubtest and return its exit status."""
    installed = Path(native.__file__).parent
    with tempfile.TemporaryDirectory(prefix="hocket-stub-") as folder:
        package = Path(folder, "hocket/native")
        package.mkdir(parents=True)
        # stubtest finds the extension and the stub by the same path, so both are in one folder.
        for path in installed.iterdir():
            if path.suffix != ".pyi":
                (package / path.name).symlink_to(path)
        (package / "_native.pyi").write_text(joined())
        command = [sys.executable, "-m", "mypy.stubtest", "hocket.native._native"]
        env = {**os.environ, "PYTHONPATH": folder, "MYPYPATH": folder}
        return subprocess.run(command, cwd=folder, env=env, check=False, timeout=300).returncode


if __name__ == "__main__":
    sys.exit(main())
