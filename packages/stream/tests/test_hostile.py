"""Runs `crates/hocket-stream/tests/hostile.rs`, which reads invalid files, with ten million cases."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.sampling import cases

REPOSITORY = Path(__file__).resolve().parents[3]
NUM_CASES = cases(full=10_000_000, sample=0)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_million_invalid_files_raise_typed_errors() -> None:
    cargo = shutil.which("cargo")
    if not NUM_CASES or cargo is None:
        pytest.skip("`cargo test` draws a few thousand cases; `-m slow`, with a Rust toolchain, ten million")
    command = [cargo, "test", "--release", "--quiet", "-p", "hocket-stream", "--test", "hostile"]
    # The cases are divided over four properties.
    env = os.environ | {"HOCKET_FUZZ_CASES": str(NUM_CASES // 4)}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=7000, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
