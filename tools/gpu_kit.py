"""Builds a folder that runs Hocket on a bare machine with Python, torch and a GPU, without a network.

```console
$ python tools/gpu_kit.py build /tmp/kit
$ scp -r /tmp/kit machine: && ssh machine bash kit/run.sh
```

The folder has the wheels of all packages, those of the libraries that they need as far as `LIMIT_BYTES`
allows, the tests that are marked `gpu`, and the parts in `tools/gpu_kit`. `run.sh` runs them in turn, each
with a time limit, and writes `results/results.json` and `results/gpu.md`. `partial_wheels` has the wheels of
libraries for a second version of Python, without the files that they share with the first.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
PARTS = Path(__file__).with_name("gpu_kit")
LIMIT_BYTES = 60 * 2**20
PYTHONS = ("3.12", "3.11", "3.13", "3.14")
"""The versions of Python whose wheels of compiled libraries are taken, the most likely first."""
PURE = (
    "rich",
    "markdown-it-py",
    "mdurl",
    "pygments",
    "typer",
    "shellingham",
    "click",
    "annotated-doc",
    "torchmetrics",
    "lightning-utilities",
    "packaging",
    "pytest",
    "pluggy",
    "iniconfig",
    "pytest-timeout",
    "sortedcontainers",
)
COMPILED = ("numpy", "ml-dtypes", "safetensors", "psutil", "pyyaml", "hypothesis", "xxhash", "zstandard")
"""Libraries with a wheel for each version of Python, by how much depends on them."""
SHARED = "shared.json"
"""The file in a partial wheel's `.dist-info` that names the wheel which has the rest of its files."""
RUN = """\
#!/usr/bin/env bash
# Runs the kit with the Python of $PYTHON, or python3; takes the arguments of run.py.
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "Hocket needs Python 3.11 or newer, and $("$python" --version 2>&1 | tail -n 1) was found:" \\
        "set PYTHON to the path of a newer one that has torch" >&2
    exit 1
fi
exec "$python" "$(dirname "${BASH_SOURCE[0]}")/run.py" "$@"
"""


def gpu_tests() -> list[Path]:
    """Return the test files with a test that is marked `gpu`, relative to the root."""
    files = sorted(ROOT.glob("packages/*/tests/test_*.py"))
    return [path.relative_to(ROOT) for path in files if "@pytest.mark.gpu" in path.read_text()]


def content() -> dict[str, Path]:
    """Return the files of the kit but for the wheels, by their name in it."""
    files = {path.name: path for path in sorted(PARTS.glob("*.py"))}
    tests = gpu_tests()
    folders = sorted({path.parent for path in tests})
    # What the test files import beside them, and the package `support`.
    helpers = [
        path for folder in folders for path in (ROOT / folder).glob("*.py") if path.name[:5] != "test_"
    ]
    support = (ROOT / "tests" / "support").glob("*.py")
    relative = [*tests, *(path.relative_to(ROOT) for path in (*helpers, *support)), Path("pyproject.toml")]
    return files | {f"repository/{path}": ROOT / path for path in relative}


def download(names: Iterable[str], python: str, into: Path) -> list[Path]:
    """Download the wheels of libraries for a version of Python; return those that are there.

    Args:
        names: The libraries; their versions are those of `tools/constraints.txt` that fit.
        python: The version, such as `3.12`.
        into: The folder.
    """
    text = (ROOT / "tools/constraints.txt").read_text()
    pins: dict[str, str] = {}
    for name, version in re.findall(r"^([a-z0-9._-]+)==([^ ;\\]+)", text, re.MULTILINE):
        # The first of several is that of the oldest Python; newer Pythons take it too, and share its files.
        pins.setdefault(name, version)
    command = ["uv", "tool", "run", "-q", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(into)]
    for system in ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"):
        command += ["--platform", system]
    into.mkdir(parents=True, exist_ok=True)
    wanted = {name: f"{name}=={pins[name]}" for name in names if name in pins}
    if subprocess.run([*command, *wanted.values()], capture_output=True, check=False, timeout=600).returncode:
        # One after the other; the pinned version may have no wheel for an older Python.
        for name, pinned in wanted.items():
            if all(
                subprocess.run([*command, one], capture_output=True, check=False, timeout=300).returncode
                for one in (pinned, name)
            ):
                print(f"left out: {name} has no wheel for Python {python}", file=sys.stderr)
    return sorted(into.glob("*.whl"))


def take(wheels: Iterable[Path], out: Path, limit_bytes: int) -> list[str]:
    """Copy the wheels that fit into a size, the first before the later ones; return the names of the others.

    A wheel is copied without the files that one before it has, of the same library and version. It is then
    in `partial_wheels`, because pip would install it, incomplete, without an error.

    Args:
        wheels: The wheels.
        out: The folder of the kit.
        limit_bytes: The size.
    """
    owners: dict[tuple[str, str, bytes], str] = {}
    left_out = []
    for wheel in {wheel.name: wheel for wheel in wheels}.values():
        target = out / "wheels" / wheel.name
        library = "-".join(wheel.name.split("-")[:2])
        with zipfile.ZipFile(wheel) as archive:
            content = {info.filename: archive.read(info) for info in archive.infolist() if not info.is_dir()}
        keys = {name: (library, name, hashlib.sha256(data).digest()) for name, data in content.items()}
        shared = {name: owners[key] for name, key in keys.items() if key in owners}
        if shared:
            target = out / "partial_wheels" / wheel.name
            target.parent.mkdir(exist_ok=True)
            with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
                for name in sorted(content.keys() - shared.keys()):
                    archive.writestr(name, content[name])
                archive.writestr(f"{library}.dist-info/{SHARED}", json.dumps(shared))
        else:
            shutil.copyfile(wheel, target)
        limit_bytes -= target.stat().st_size
        if limit_bytes < 0:
            limit_bytes += target.stat().st_size
            target.unlink()
            left_out.append(wheel.name)
        elif not shared:
            owners |= dict.fromkeys(keys.values(), wheel.name)
    return left_out


def build(
    out: Path, wheels: Path | None, *, has_libraries: bool = True, pythons: Sequence[str] = PYTHONS
) -> int:
    """Write the kit into a new folder; return its size in bytes.

    Args:
        out: The folder.
        wheels: A folder with the wheels of all packages; None to build them.
        has_libraries: Whether to download what Hocket needs beyond Python and torch.
        pythons: The versions of Python whose wheels are taken, the most likely first.

    Raises:
        FileExistsError: The folder exists.
        SystemExit: The kit is larger than `LIMIT_BYTES` without any library.
    """
    out.mkdir(parents=True)
    for name, source in content().items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, out / name)
    (out / "run.sh").write_text(RUN)
    (out / "wheels").mkdir()
    with tempfile.TemporaryDirectory(prefix="hocket-kit-") as folder:
        if wheels is None:
            wheels = Path(folder) / "own"
            _builder().build(wheels, is_portable=True)
        for wheel in wheels.glob("hocket*.whl"):
            shutil.copyfile(wheel, out / "wheels" / wheel.name)
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        if size > LIMIT_BYTES:
            sys.exit(f"the kit takes {size / 2**20:.1f} MiB without libraries, more than the limit")
        found = download(PURE, pythons[0], Path(folder) / "pure") if has_libraries else []
        for python in pythons if has_libraries else ():
            found += download(COMPILED, python, Path(folder) / python)
        libraries = [*PURE, *COMPILED]
        found.sort(key=lambda wheel: libraries.index(wheel.name.split("-")[0].replace("_", "-").lower()))
        left_out = take(found, out, LIMIT_BYTES - size)
        for name in left_out:
            print(f"left out, because the kit would be too large: {name}")
        if left_out and len(pythons) > 1:
            print("`--python VERSION`, once or more, takes the libraries of these versions of Python alone")
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


def _builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wheels", ROOT / "tools" / "wheels.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    sys.modules["wheels"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Build the kit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("build", help="write the folder")
    command.add_argument("out", type=Path, help="the folder; it must not exist")
    command.add_argument("--wheels", type=Path, help="a folder of wheels, as tools/wheels.py writes it")
    command.add_argument(
        "--python",
        choices=PYTHONS,
        action="append",
        help="the machine's Python, if it is known; may be given more than once; default: all of these",
    )
    arguments = parser.parse_args()
    size = build(arguments.out, arguments.wheels, pythons=arguments.python or PYTHONS)
    print(f"{arguments.out}: {size / 2**20:.1f} MiB; run it with `bash {arguments.out}/run.sh`")


if __name__ == "__main__":
    main()
