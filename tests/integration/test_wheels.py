"""Each package's wheel, installed with its declared dependencies only, works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TWO_STEPS = Path(__file__).with_name("two_step.py")
WHEELS = (
    "hocket",
    "hocket_algos",
    "hocket_ckpt",
    "hocket_dist",
    "hocket_native",
    "hocket_stream",
    "hocket_trainer_core",
)

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv"),
    pytest.mark.skipif(shutil.which("cargo") is None, reason="needs a Rust toolchain"),
]


def run(*command: object, timeout_s: float = 900, code: int = 0) -> str:
    """Run a command outside this environment; return its output."""
    env = {name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=env,
        check=False,
    )
    assert done.returncode == code, f"{command} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@dataclass
class CleanEnvironment:
    """A virtual environment with the installed packages only."""

    folder: Path
    wheels: Path

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    def install(self, *requirements: str) -> None:
        run(
            "uv",
            "pip",
            "install",
            "-q",
            "--python",
            self.bin / "python",
            "--find-links",
            self.wheels,
            *requirements,
        )

    def packages(self) -> set[str]:
        lines = run("uv", "pip", "list", "--python", self.bin / "python", "--format", "freeze").splitlines()
        return {line.split("==")[0] for line in lines if line.startswith("hocket")}

    def train(self, *arguments: object) -> str:
        """Run `two_step.py`; return the line with the loss."""
        lines = self.python(TWO_STEPS, *arguments).splitlines()
        return next(line for line in lines if line.startswith("loss "))

    def python(self, *arguments: object, code: int = 0) -> str:
        return run(self.bin / "python", *arguments, timeout_s=120, code=code)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheels")
    run("uv", "build", "-q", "--all-packages", "--wheel", "--out-dir", out, ROOT)
    assert {path.name.split("-")[0] for path in out.glob("*.whl")} == set(WHEELS)
    return out


@pytest.fixture
def clean(wheels: Path, tmp_path: Path) -> CleanEnvironment:
    run("uv", "venv", "-q", tmp_path / "env")
    return CleanEnvironment(tmp_path / "env", wheels)


def test_wheels_contain_their_licences(wheels: Path) -> None:
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            licences = {Path(name).name: name for name in archive.namelist() if "/licenses/" in name}
            assert archive.read(licences["LICENSE"]) == (ROOT / "LICENSE").read_bytes(), wheel
            if wheel.name.startswith("hocket_native"):
                notices = archive.read(licences["THIRD_PARTY.txt"]).decode()
                for name in ("aws-lc-sys", "zstd-sys", "brotli", "object_store"):
                    assert re.search(rf"^{name} [0-9]", notices, re.MULTILINE), name


def test_native_works_alone(clean: CleanEnvironment) -> None:
    clean.install("hocket-native")
    said = clean.python(
        "-c", "import hocket.native as n; s = n.Store('memory://x'); s.put('k', b'v'); print(s.get('k'))"
    )
    assert "b'v'" in said


def test_ckpt_works_alone(clean: CleanEnvironment, tmp_path: Path) -> None:
    clean.install("hocket-ckpt")
    assert clean.packages() == {"hocket-ckpt", "hocket-native"}
    clean.python("-c", "import torch", code=1)
    command = clean.bin / "hocket-ckpt"
    assert "inspect" in run(command, "--help")
    checkpoint = tmp_path / "checkpoints" / "first"
    run(command, "demo", checkpoint)
    assert "committed" in run(command, "ls", checkpoint.parent)
    assert "data/" in run(command, "inspect", checkpoint)
    run(command, "verify", checkpoint)


def test_stream_works_alone(clean: CleanEnvironment, tmp_path: Path) -> None:
    clean.install("hocket-stream")
    assert clean.packages() == {"hocket-native", "hocket-stream"}
    script = (
        "from hocket.stream import MDSWriter, StreamingDataset\n"
        f"with MDSWriter(columns={{'n': 'int', 's': 'str'}}, out={str(tmp_path / 'data')!r}) as writer:\n"
        "    for n in range(10): writer.write({'n': n, 's': str(n)})\n"
        f"data = StreamingDataset(local={str(tmp_path / 'data')!r}, batch_size=4)\n"
        "print(sum(int(sample['n']) for sample in data))\n"
    )
    assert clean.python("-c", script).strip().endswith("45")


def test_trainer_works_alone_and_with_each_sibling(clean: CleanEnvironment, tmp_path: Path) -> None:
    clean.install("hocket-trainer-core")
    assert clean.packages() == {"hocket-trainer-core"}
    alone = clean.train()
    assert "pip install hocket-dist" in clean.python(TWO_STEPS, "--fsdp", code=1)
    assert "pip install hocket-ckpt" in clean.python(TWO_STEPS, "--save-folder", tmp_path / "none", code=1)

    clean.install("hocket-dist")
    assert clean.train() == alone
    assert clean.train("--fsdp") == alone

    clean.install("hocket-ckpt[torch]")
    assert clean.train("--save-folder", tmp_path / "saved") == alone
    assert list((tmp_path / "saved").rglob("checkpoint.json.zst"))

    clean.install("hocket-stream[torch]")
    assert clean.train("--stream", tmp_path / "shards") == alone

    clean.install("hocket-algos")
    assert clean.train("--clip")


def test_the_hocket_package_installs_all_others(clean: CleanEnvironment) -> None:
    clean.install("hocket")
    assert clean.packages() == {name.replace("_", "-") for name in WHEELS}
    assert "demo" in run(clean.bin / "hocket", "--help")
    assert "--world_size" in run(clean.bin / "hocket-launch", "--help")
