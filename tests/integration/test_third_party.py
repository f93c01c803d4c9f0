"""The packages contain the licences of Hocket and of the Rust crates that are linked."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_package_has_the_licence_file() -> None:
    packages = [path.parent for path in ROOT.glob("packages/*/pyproject.toml")]
    assert len(packages) > 5
    for package in packages:
        assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes(), package


needs_cargo = pytest.mark.skipif(shutil.which("cargo") is None, reason="needs a Rust toolchain")


@needs_cargo
def test_the_third_party_notices_match_the_linked_crates() -> None:
    subprocess.run(["cargo", "fetch", "--quiet", "--locked"], cwd=ROOT, check=True, timeout=300)
    command = [sys.executable, ROOT / "tools" / "third_party.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@needs_cargo
def test_the_declared_rust_version_builds_every_linked_crate() -> None:
    spec = importlib.util.spec_from_file_location("third_party", ROOT / "tools" / "third_party.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    declared = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["rust-version"]

    def numbers(version: str) -> tuple[int, ...]:
        return tuple(int(number) for number in version.split("."))[:2]

    needed = {package["name"]: package["rust_version"] or "1.0" for package in tool.linked_packages()}
    assert max(map(numbers, needed.values())) == numbers(declared), needed
