"""The kit for a GPU: its content, its runner, and, where the wheels are built, the whole on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support.sampling import plan
from support.tools import load_tool

KIT = load_tool("gpu_kit")
RUN = load_tool("gpu_kit/run")
PARTS = load_tool("gpu_kit/parts")

SCRIPT = """
import json, os, subprocess, sys, time
name, device = sys.argv[1], sys.argv[3]
if name == "skips":
    print("needs `x`, which is not installed")
    sys.exit(77)
if name == "raises":
    raise ValueError("an error of the part")
if name == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(sys.argv[0] + ".child", "w").write(str(child.pid))
    time.sleep(600)
if name == "silent":
    sys.exit(0)
if name == "crashes":
    os.kill(os.getpid(), 11)
if name == "leaves":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    open(sys.argv[0] + ".left", "w").write(str(child.pid))
if name == "bytes":
    os.write(1, bytes(range(128, 256)) * 5000)
    os.write(1, bytes([10]))
if name == "number":
    print(5)
    sys.exit(0)
if name == "nested":
    print("[" * 100000)
    sys.exit(0)
print("a line of the library")
print(json.dumps({"device": device, "value": 0.123456}))
"""


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_each_part_has_a_limit_and_the_runner_names_no_other() -> None:
    assert set(RUN.LIMITS_S) == set(PARTS.PARTS)
    assert next(iter(RUN.LIMITS_S)) == "imports"
    assert set(RUN.ON_CPU) < set(RUN.LIMITS_S)
    assert RUN.BUDGET_S < 540


def test_the_kit_has_every_file_with_a_test_that_needs_a_gpu() -> None:
    content = KIT.content()
    assert {"run.py", "parts.py", "repository/pyproject.toml", "repository/tests/support/plugin.py"} <= set(
        content
    )
    root = KIT.ROOT
    marked = [path for path in root.glob("packages/*/tests/*.py") if "pytest.mark.gpu" in path.read_text()]
    assert len(marked) > 5
    assert {f"repository/{path.relative_to(root)}" for path in marked} <= set(content)
    assert all(path.is_file() for path in content.values())


def write_wheel(path: Path, **files: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def test_libraries_are_taken_in_order_as_far_as_they_fit(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    sizes = {"a-1-py3-none-any.whl": 40_000, "b-1-py3-none-any.whl": 100_000, "c-1-py3-none-any.whl": 50_000}
    wheels = [write_wheel(tmp_path / "all" / name, file=b"x" * size) for name, size in sizes.items()]
    assert KIT.take([*wheels, wheels[0]], tmp_path, 100_000) == ["b-1-py3-none-any.whl"]
    assert [path.name[0] for path in sorted((tmp_path / "wheels").iterdir())] == ["a", "c"]


def test_files_that_wheels_of_a_library_share_are_taken_once(tmp_path: Path) -> None:
    """A file of another version, of another library, or with other bytes is not the same file."""
    (tmp_path / "wheels").mkdir()
    here, system = f"cp3{sys.version_info.minor}", f"manylinux_2_17_{os.uname().machine}"
    blas, first, second = os.urandom(50_000), os.urandom(100), os.urandom(100)
    files = {
        f"sharedlib-1-cp27-cp27-{system}.whl": {"sharedlib/blas": blas, "sharedlib/core": first},
        f"sharedlib-1-{here}-{here}-{system}.whl": {"sharedlib/blas": blas, "sharedlib/core": second},
        f"sharedlib-2-cp28-cp28-{system}.whl": {"sharedlib/blas": blas},
        f"otherlib-1-cp28-cp28-{system}.whl": {"sharedlib/blas": blas},
    }
    wheels = [write_wheel(tmp_path / "all" / name, **content) for name, content in files.items()]
    assert KIT.take(wheels, tmp_path, 160_000) == []
    (partial,) = (tmp_path / "partial_wheels").iterdir()
    assert partial.name == wheels[1].name
    assert partial.stat().st_size < 1000
    found = sorted(tmp_path.glob("*wheels/sharedlib-1-*.whl"))
    assert RUN.unpack(found, tmp_path / "site") == []
    assert (tmp_path / "site/sharedlib/blas").read_bytes() == blas
    assert (tmp_path / "site/sharedlib/core").read_bytes() == second


def test_a_partial_wheel_is_not_taken_without_the_wheel_that_has_its_files(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    blas = os.urandom(50_000)
    large = write_wheel(tmp_path / "all/lib-1-cp311-cp311-any.whl", blas=blas, core=os.urandom(9000))
    small = write_wheel(tmp_path / "all/lib-1-cp312-cp312-any.whl", blas=blas)
    assert KIT.take([large, small], tmp_path, 55_000) == [large.name]
    assert (tmp_path / "wheels" / small.name).read_bytes() == small.read_bytes()


def test_only_wheels_that_fit_and_are_missing_are_unpacked(tmp_path: Path) -> None:
    here = f"cp3{sys.version_info.minor}"
    names = {
        "hocket_first-1-py3-none-any.whl": "hocket/first.py",
        "absentlib-1-py3-none-any.whl": "absentlib.py",
        f"ownlib-1-{here}-{here}-manylinux_2_28_{os.uname().machine}.whl": "ownlib.py",
        f"stable-1-cp38-abi3-manylinux_2_28_{os.uname().machine}.whl": "stable.py",
        "otherlib-1-cp27-cp27-manylinux_2_28_x86_64.whl": "otherlib.py",
        "json-1-py3-none-any.whl": "json/new.py",
    }
    for name, member in names.items():
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(member, "")
    left_out = RUN.unpack(sorted(tmp_path.glob("*.whl")), tmp_path / "site")
    assert left_out == ["otherlib-1-cp27-cp27-manylinux_2_28_x86_64.whl"]
    found = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*.py")}
    assert found == {"hocket/first.py", "absentlib.py", "ownlib.py", "stable.py"}


def test_a_library_that_is_too_old_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest versions are those that the wheels name; settings of the tests add those of the tests."""
    for name, version in (("oldlib", "1.4.0"), ("newlib", "3.1")):
        folder = tmp_path / "python" / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (tmp_path / "python" / f"{name}.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "python"))
    wheels = {
        "hocket_first-1-py3-none-any.whl": "Requires-Dist: oldlib<4,>=1.10\nRequires-Dist: newlib>=3\n"
        "Requires-Dist: newlib>=9; extra == 'all'\n",
        "newlib-5.0-py3-none-any.whl": "",
        "oldlib-2.0-py3-none-any.whl": "",
    }
    for name, text in wheels.items():
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(f"{name.split('-')[0]}.py", "")
            archive.writestr(f"{name.split('-')[0]}-1.dist-info/METADATA", text)
    assert RUN.unpack(sorted(tmp_path.glob("*.whl")), tmp_path / "site") == []
    found = {path.name for path in (tmp_path / "site").glob("*.py")}
    assert found == {"hocket_first.py", "oldlib.py"}


def test_a_wheel_for_a_newer_c_library_is_left_out() -> None:
    machine = os.uname().machine
    assert RUN.fits(f"hocket_native-1-cp311-abi3-manylinux_2_17_{machine}.whl")
    assert not RUN.fits(f"hocket_native-1-cp311-abi3-manylinux_2_99_{machine}.whl")
    assert RUN.fits(f"x-1-cp311-abi3-manylinux_2_17_{machine}.manylinux_2_99_{machine}.whl")


def start_kit(tmp_path: Path, parts: str = SCRIPT, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a kit without wheels, with parts of the tests' own."""
    kit = tmp_path / "kit"
    kit.mkdir()
    shutil.copyfile(KIT.PARTS / "run.py", kit / "run.py")
    (kit / "run.sh").write_text(KIT.RUN)
    (kit / "parts.py").write_text(parts)
    given = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "PYTHONPATH")}
    return subprocess.run(
        ["bash", "run.sh"],
        cwd=kit,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**given, **env},
    )


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ('__version__ = "2.8.1+cu126"', "needs torch 2.9 or newer, and"),
        ("raise OSError('libcuda.so.1: invalid ELF header')", "libcuda.so.1: invalid ELF header"),
        ("import os; os.kill(os.getpid(), 11)", "cannot import torch: ended by signal 11"),
    ],
)
def test_a_torch_that_is_old_or_broken_is_refused_by_name(tmp_path: Path, torch: str, said: str) -> None:
    (tmp_path / "torch").mkdir()
    cuda = "class cuda:\n    is_available = staticmethod(bool)\n"
    (tmp_path / "torch" / "__init__.py").write_text(f"{torch}\n{cuda}")
    done = start_kit(tmp_path, PYTHON=sys.executable, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert said in done.stderr
    assert not (tmp_path / "kit" / "results").exists()


def test_an_old_python_is_refused_by_name(tmp_path: Path) -> None:
    old = tmp_path / "python"
    # What `python3` answers on a machine whose Python is 3.10.
    old.write_text('#!/bin/sh\ncase "$1" in -c) exit 1;; --version) echo Python 3.10.12;; *) exit 3;; esac\n')
    old.chmod(0o755)
    done = start_kit(tmp_path, PYTHON=str(old))
    assert done.returncode == 1
    assert "needs Python 3.11 or newer, and Python 3.10.12 was found" in done.stderr


def test_whatever_fails_the_next_part_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "part.py"
    script.write_text(SCRIPT)
    expected = {
        "skips": "skipped",
        "raises": "failed",
        "hangs": "failed",
        "silent": "failed",
        "crashes": "failed",
        "leaves": "passed",
        "bytes": "passed",
        "number": "failed",
        "nested": "failed",
        "works": "passed",
    }
    limits = dict.fromkeys(expected, 20.0) | {"hangs": 1.5}
    found = RUN.run_all(limits, script, has_cuda=False, rehearse=True, env=dict(os.environ))
    assert {name: result["status"] for name, result in found.items()} == expected
    assert found["skips"]["why"] == "needs `x`, which is not installed"
    assert "an error of the part" in found["raises"]["output"]
    assert found["hangs"]["why"] == "not done after 2 s"
    assert found["crashes"]["why"] == "ended by signal 11"
    assert found["number"]["why"] == found["nested"]["why"] == "the part printed no figures"
    assert not is_alive(int((tmp_path / "part.py.child").read_text()))
    assert found["works"]["figures"] == {"device": "cpu", "value": 0.123456}
    page = RUN.page({"device": "x", "date": "today", "seconds": 3.0, "parts": found})
    assert "| works | passed |" in page
    assert "value 0.1235" in page
    assert "an error of the part" in page
    assert "needs `x`" in capsys.readouterr().out


def test_the_kit_ends_what_its_parts_leave_and_keeps_their_results(tmp_path: Path) -> None:
    """`run.sh` as on a machine without a GPU, with parts of which one leaves a process in its own session."""
    (tmp_path / "torch").mkdir()
    cuda = "class cuda:\n    is_available = staticmethod(bool)\n"
    (tmp_path / "torch" / "__init__.py").write_text(f'__version__ = "2.9.0"\n{cuda}')
    parts = SCRIPT.replace('"leaves"', '"imports"')
    done = start_kit(tmp_path, parts, PYTHON=sys.executable, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not is_alive(int((tmp_path / "kit" / "parts.py.left").read_text()))
    results = json.loads((tmp_path / "kit" / "results" / "results.json").read_text())["parts"]
    assert list(results) == list(RUN.LIMITS_S)
    assert [name for name, one in results.items() if one["status"] == "passed"] == list(RUN.ON_CPU)
    skipped = [one["why"] for one in results.values() if one["status"] == "skipped"]
    assert skipped == ["needs a CUDA device"] * (len(results) - len(RUN.ON_CPU))


def test_without_a_gpu_parts_are_skipped_by_name(tmp_path: Path) -> None:
    script = tmp_path / "part.py"
    script.write_text(SCRIPT)
    found = RUN.run_all(
        {"imports": 20, "nccl": 20}, script, has_cuda=False, rehearse=False, env=dict(os.environ)
    )
    assert found["imports"]["status"] == "passed"
    assert found["nccl"] == {"status": "skipped", "seconds": 0, "why": "needs a CUDA device"}


@pytest.mark.parametrize(
    ("missing", "code", "said"),
    [("numpy", 77, "needs `numpy`, which is not installed"), ("hocket.native", 1, "hocket.native")],
)
def test_a_part_without_a_library_is_skipped_by_its_name(missing: str, code: int, said: str) -> None:
    parts = str(KIT.PARTS / "parts.py")
    script = (
        f"import runpy, sys; sys.modules[{missing!r}] = None; sys.argv = ['parts.py', 'imports']; "
        f"runpy.run_path({parts!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code
    assert said in (done.stdout if code == RUN.SKIPPED else done.stderr).splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("only", [["imports", "one_step"], []], ids=["first", "all"])
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv")
@pytest.mark.skipif(shutil.which("cargo") is None, reason="needs a Rust toolchain")
def test_the_whole_kit_runs_on_this_machine(tmp_path: Path, only: list[str]) -> None:
    if not plan().asks_for("slow"):
        pytest.skip("compiles the extension in the release profile: `-m slow`")
    wheels = tmp_path / "own"
    load_tool("wheels").build(wheels, is_portable=False)
    size = KIT.build(tmp_path / "kit", wheels, has_libraries=not only)
    assert size <= KIT.LIMIT_BYTES
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = ["bash", str(tmp_path / "kit" / "run.sh"), "--rehearse", *(["--only", *only] if only else [])]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=env | {"PYTHON": sys.executable},
    )
    results = json.loads((tmp_path / "kit" / "results" / "results.json").read_text())
    failed = {name: one for name, one in results["parts"].items() if one["status"] == "failed"}
    assert done.returncode == 0, failed
    assert list(results["parts"]) == (only or list(RUN.LIMITS_S))
    assert results["parts"]["one_step"]["status"] == "passed"
    assert (tmp_path / "kit" / "results" / "gpu.md").read_text().startswith("# Hocket on a GPU")
