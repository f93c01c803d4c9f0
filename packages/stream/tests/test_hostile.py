"""The native readers on hostile files: `crates/hocket-stream/tests/hostile.rs`, by the million."""

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
def test_ten_million_files_that_lie() -> None:
    cargo = shutil.which("cargo")
    if not NUM_CASES or cargo is None:
        pytest.skip("`cargo test` draws some thousands; `-m slow`, with a Rust toolchain, ten millions")
    command = [cargo, "test", "--release", "--quiet", "-p", "hocket-stream", "--test", "hostile"]
    # Four properties share them.
    env = os.environ | {"HOCKET_FUZZ_CASES": str(NUM_CASES // 4)}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=7000, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
