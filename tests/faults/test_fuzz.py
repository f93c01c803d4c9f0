"""Ten million hostile inputs for the readers of foreign files, of which `cargo test` runs a sample."""

import os
import shutil
import subprocess

import pytest

from support.s3d import REPOSITORY
from support.sampling import cases


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_input_makes_a_reader_panic_or_take_much_memory() -> None:
    """Run `foreign/fuzz.rs` on pickles, safetensors headers, zip files and manifests, a quarter each."""
    num_cases = cases(full=10_000_000, sample=0)
    if not num_cases:
        pytest.skip("its sample is a part of `cargo test`; all of it: `-m slow`")
    if shutil.which("cargo") is None:
        pytest.skip("needs cargo")
    done = subprocess.run(
        ["cargo", "test", "--release", "-q", "-p", "hocket-ckpt", "--lib", "fuzz", "--", "--nocapture"],
        cwd=REPOSITORY,
        env={**os.environ, "HOCKET_FUZZ_CASES": str(num_cases)},
        capture_output=True,
        text=True,
        timeout=3500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f": {num_cases // 4} cases, ") == 4
