"""Importing `hocket.stream` is light: no torch, and the loader only on first access."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json, sys
import hocket.stream
print(json.dumps(sorted(sys.modules)))
"""


def test_importing_the_package_imports_no_heavy_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert "numpy" in loaded
    assert not loaded & {"torch", "rich", "typer", "boto3", "botocore", "pandas", "scipy", "asyncio"}


def test_the_loader_is_imported_on_first_access() -> None:
    import hocket.stream
    import hocket.stream.torch

    assert hocket.stream.StreamingDataLoader is hocket.stream.torch.StreamingDataLoader
    assert sorted(hocket.stream.__all__) == hocket.stream.__all__
