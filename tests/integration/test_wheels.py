"""Each package's wheel, installed with its declared dependencies only, works."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support.readme import blocks, console_lines
from support.sampling import plan
from support.tools import load_tool

ROOT = Path(__file__).resolve().parents[2]
TWO_STEPS = Path(__file__).with_name("two_step.py")

TOOL = load_tool("wheels")
run = TOOL.run

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv"),
    pytest.mark.skipif(shutil.which("cargo") is None, reason="needs a Rust toolchain"),
]


class Environment(TOOL.CleanEnvironment):
    """A clean environment that trains."""

    def train(self, *arguments: object) -> str:
        """Run `two_step.py`; return the line with the loss."""
        lines = self.python(TWO_STEPS, *arguments).splitlines()
        return next(line for line in lines if line.startswith("loss "))


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheels")
    assert len(TOOL.build(out, is_portable=False)) == len(TOOL.PACKAGES) == 7
    return out


@pytest.fixture
def clean(wheels: Path, tmp_path: Path) -> Environment:
    return Environment(tmp_path / "env", wheels).create()


def test_twine_accepts_each_wheel(wheels: Path) -> None:
    TOOL.check(sorted(wheels.glob("*.whl")))


def test_the_installed_packages_see_no_cargo() -> None:
    assert shutil.which("cargo", path=TOOL.outside()["PATH"]) is None


def test_wheels_contain_their_licences(wheels: Path) -> None:
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            licences = {Path(name).name: name for name in archive.namelist() if "/licenses/" in name}
            assert archive.read(licences["LICENSE"]) == (ROOT / "LICENSE").read_bytes(), wheel
            if wheel.name.startswith("hocket_native"):
                notices = archive.read(licences["THIRD_PARTY.txt"]).decode()
                for name in ("aws-lc-sys", "zstd-sys", "brotli", "object_store"):
                    assert re.search(rf"^{name} [0-9]", notices, re.MULTILINE), name


def test_a_wheel_without_its_notices_is_refused(tmp_path: Path) -> None:
    info = "hocket_native-1.dist-info"
    bom = {"components": [{"name": "zstd", "version": "1.2"}, {"name": "cc", "version": "1.0"}]}
    files = {
        "hocket/native/_native.abi3.so": "",
        f"{info}/licenses/LICENSE": "",
        f"{info}/sboms/hocket-py.cyclonedx.json": json.dumps(bom),
        f"{info}/licenses/THIRD_PARTY.txt": "Head.\n\nzstd 1.2: MIT  https://example.org\n",
    }
    wheel = tmp_path / "hocket_native-1-cp311-abi3-linux_x86_64.whl"

    def check_with(**changed: str | None) -> None:
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, text in files.items():
                new = changed.get(Path(name).suffix.lstrip(".") or "LICENSE", text)
                if new is not None:
                    archive.writestr(name, new)
        TOOL.check_notices(wheel)

    check_with()
    for changed, message in (
        ({"LICENSE": None}, "has no licence"),
        ({"json": None}, r"no list of its crates \(SBOM\)"),
        ({"txt": None}, "no notices"),
        ({"txt": "Nothing.\n"}, "names no crate"),
        ({"txt": "zstd 1.3: MIT\n"}, "the SBOM lacks zstd 1.3"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_with(**changed)


def test_wheels_contain_sources_and_sections_on_errors_and_no_bytecode(wheels: Path) -> None:
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
        assert any(name.endswith("/errors.md") for name in names), wheel
        assert not any("__pycache__" in name for name in names), wheel
        if wheel.name.startswith("hocket_native"):
            assert any("/sboms/" in name for name in names)


def test_native_works_alone(clean: Environment) -> None:
    clean.install("hocket-native")
    said = clean.python(
        "-c", "import hocket.native as n; s = n.Store('memory://x'); s.put('k', b'v'); print(s.get('k'))"
    )
    assert "b'v'" in said


def test_ckpt_works_alone(clean: Environment, tmp_path: Path) -> None:
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
    assert "HKT-CK03" in run(command, "explain", "HKT-CK03")
    script = f"import hocket.ckpt\nprint(hocket.ckpt.open({str(checkpoint)!r}).contents.step)"
    assert clean.python("-c", script) == "1000\n"


def test_stream_works_alone(clean: Environment, tmp_path: Path) -> None:
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
    command = clean.bin / "hocket-stream"
    assert "10 samples" in run(command, "inspect", tmp_path / "data")
    run(command, "verify", tmp_path / "data")
    assert "HKT-ST02" in run(command, "explain", "HKT-ST02")


def test_dist_and_trainer_work_alone_and_the_trainer_with_each_sibling(
    clean: Environment, tmp_path: Path
) -> None:
    clean.install("hocket-dist")
    assert clean.packages() == {"hocket-dist"}
    readme = (ROOT / "packages/dist/README.md").read_text()
    (script,) = re.findall(r"^## Without it\n\n```python\n(.*?)^```$", readme, re.M | re.S)
    (tmp_path / "loop.py").write_text(script)
    printed = run(clean.bin / "hocket-launch", "-n", "1", tmp_path / "loop.py")
    assert re.search(r"0 1 \d", printed)
    assert "cold start" not in printed
    run("uv", "pip", "uninstall", "-q", "--python", clean.bin / "python", "hocket-dist")

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


# The first Python that uv finds may be older than Hocket needs. `uv pip` must not see this variable.
THIS_PYTHON = f"UV_PYTHON={shlex.quote(sys.executable)}"


def shell(*lines: str, cwd: Path, **env: str) -> str:
    """Run lines in one shell, without cargo and outside this environment; return what they print."""
    done = subprocess.run(
        ["bash", "-euc", "\n".join(lines)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**TOOL.outside(), **env},
    )
    assert done.returncode == 0, f"{lines}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_the_readme_checks_the_wheels_in_a_folder(wheels: Path) -> None:
    (build,) = (line for line in console_lines("Install") if "tools/wheels.py" in line)
    said = shell(f"{build} --no-build --out {shlex.quote(str(wheels))}", cwd=ROOT)
    assert f"--find-links {wheels} hocket-ckpt" in said
    assert len(re.findall(r" MB  hocket", said)) == len(TOOL.PACKAGES)


def test_the_readme_installs_the_checkpoint_tool_from_a_folder(wheels: Path, tmp_path: Path) -> None:
    (tmp_path / "dist").symlink_to(wheels)
    (install,) = (line for line in console_lines("Install") if line.startswith("uv tool install"))
    bin_folder, tools = tmp_path / "bin", tmp_path / "tools"
    shell(f"{THIS_PYTHON} {install}", cwd=tmp_path, UV_TOOL_DIR=str(tools), UV_TOOL_BIN_DIR=str(bin_folder))
    path = f"{bin_folder}{os.pathsep}{TOOL.outside()['PATH']}"
    commands = console_lines("The checkpoint tool, without torch")
    assert len(commands) == 4
    said = shell(*(line.replace("/tmp", str(tmp_path)) for line in commands), cwd=tmp_path, PATH=path)
    assert "committed" in said
    assert not list(tools.glob("*/lib/*/site-packages/torch"))


def install_as_the_readme_says(wheels: Path, folder: Path) -> list[str]:
    """Make the environment `.venv` in a folder by the README's commands; return the commands after them."""
    (folder / "dist").symlink_to(wheels)
    lines = console_lines("Install")
    create = next(line for line in lines if line.startswith("uv venv"))
    install = next(line for line in lines if line.startswith("uv pip install"))
    assert "--torch-backend" not in install
    shell(f"{THIS_PYTHON} {create}", install, cwd=folder)
    return [f"source {folder}/.venv/bin/activate", *lines[lines.index(install) + 2 :]]


def test_the_readme_installs_all_packages_which_run_the_first_script(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_as_the_readme_says(wheels, tmp_path)
    clean = Environment(tmp_path / ".venv", wheels)
    assert clean.packages() == set(TOOL.PACKAGES)
    assert "demo" in run(clean.bin / "hocket", "--help")
    assert "--world_size" in run(clean.bin / "hocket-launch", "--help")
    assert json.loads(run(clean.bin / "hocket", "env", "--json"))["cpus"] > 0
    assert "HKT-TR09" in run(clean.bin / "hocket", "explain", "HKT-TR09")
    # The first script that the site shows, once, and then with nothing left to train.
    page = (ROOT / "packages/hocket/docs/start/1_trainer.md").read_text()
    scripts = re.findall(r'^```python title="train.py"\n(.*?)^```$', page, re.M | re.S)
    (tmp_path / "train.py").write_text(scripts[0])
    monkeypatch.chdir(tmp_path)
    assert "starts at 0ba" in clean.python("train.py")
    assert "starts at 48ba" in clean.python("train.py")
    assert "committed" in run(clean.bin / "hocket-ckpt", "ls", "run")


def skip_unless_asked() -> None:
    """Skip a test of several minutes in a plain run, which takes one case of each slow test."""
    if not plan().asks_for("slow"):
        pytest.skip("takes minutes: `-m slow`")


@pytest.mark.slow
def test_the_readme_runs_the_demo_of_installed_wheels(wheels: Path, tmp_path: Path) -> None:
    skip_unless_asked()
    activate, demo = install_as_the_readme_says(wheels, tmp_path)
    assert "Everything held" in shell(activate, demo, cwd=tmp_path)
    assert (tmp_path / "out/losses.png").exists()


def can_reach_the_index_for_cpus() -> bool:
    """Return whether uv can ask torch's own index for its build for CPUs."""
    command = ["uv", "pip", "install", "--dry-run", "--target", "none", "--torch-backend=cpu", "torch"]
    return subprocess.run(command, capture_output=True, check=False, timeout=120).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("block", [0, 1], ids=["as_it_is", "without_cuda"])
def test_the_readme_runs_the_demo_in_a_clone(block: int, tmp_path: Path) -> None:
    skip_unless_asked()
    commands = blocks("Work on a clone", "console")[block].replace("$ ", "").splitlines()
    if block == 1 and not can_reach_the_index_for_cpus():
        pytest.skip("torch's index of builds for CPUs cannot be reached")
    subprocess.run(["git", "clone", "--quiet", ROOT, "clone"], cwd=tmp_path, check=True, timeout=120)
    # A clone needs cargo; what it compiles goes where CARGO_TARGET_DIR says.
    said = shell(*commands, cwd=tmp_path / "clone", PATH=os.environ["PATH"])
    assert "Everything held" in said
    assert (tmp_path / "clone/out/losses.png").exists()
