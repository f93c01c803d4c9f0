from __future__ import annotations

import importlib.metadata
import subprocess
import sys


def test_version_and_help_do_not_import_torch() -> None:
    script = """
import sys
from hocket.recipes.cli import app
try:
    app(["--version"] if sys.argv[1] == "version" else ["--help"])
except SystemExit as ended:
    assert not ended.code
assert "torch" not in sys.modules
"""
    said = {
        what: subprocess.run(
            [sys.executable, "-c", script, what], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        for what in ("version", "help")
    }
    assert said["version"] == f"hocket {importlib.metadata.version('hocket')}\n"
    assert "--install-completion" in said["help"]
    command = [sys.executable, "-m", "hocket.recipes", "--version"]
    module = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert module.stdout == said["version"]
