"""Builds the wheel of each package, checks it, and installs it alone into a clean environment without cargo.

```console
$ python tools/wheels.py
$ uv tool install --find-links dist hocket-ckpt
```

It needs uv and a Rust toolchain. zig compiles the wheel of hocket-native in the release profile, for every
Linux with the glibc of `MANYLINUX` or newer, and Python 3.11 or newer. On macOS, and with `--plain`, the
compiler of the machine builds it, for the machine's own C library.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "hocket",
    "hocket-algos",
    "hocket-ckpt",
    "hocket-dist",
    "hocket-native",
    "hocket-stream",
    "hocket-trainer-core",
)
MATURIN = "maturin>=1.9,<2"
ZIG = "ziglang>=0.13,<0.16"
TWINE = "twine>=6"
MANYLINUX = "manylinux_2_28"

_STORE = "import hocket.native as n; s = n.Store('memory://x'); s.put('k', b'v'); assert s.get('k') == b'v'"
_SHARDS = """
from hocket.stream import MDSWriter, StreamingDataset
with MDSWriter(columns={"n": "int"}, out="data") as writer:
    for n in range(10):
        writer.write({"n": n})
assert sum(int(sample["n"]) for sample in StreamingDataset(local="data", batch_size=4)) == 45
"""
# What each package does once it is installed alone.
TRIES: dict[str, tuple[tuple[str, ...], ...]] = {
    "hocket": (("hocket", "--version"), ("hocket-ckpt", "--version"), ("hocket-launch", "--help")),
    "hocket-algos": (("python", "-c", "import hocket.algos"),),
    "hocket-ckpt": (("hocket-ckpt", "demo", "first"), ("hocket-ckpt", "verify", "first")),
    "hocket-dist": (("hocket-launch", "--help"),),
    "hocket-native": (("python", "-c", _STORE),),
    "hocket-stream": (("python", "-c", _SHARDS), ("hocket-stream", "verify", "data")),
    "hocket-trainer-core": (("python", str(ROOT / "tests" / "integration" / "two_step.py")),),
}


def outside() -> dict[str, str]:
    """Return the environment variables for commands that must find neither this environment nor cargo."""
    env = {name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    folders = [Path(folder) for folder in env["PATH"].split(os.pathsep) if folder]
    kept = [folder for folder in folders if not any((folder / name).exists() for name in ("cargo", "rustc"))]
    return env | {"PATH": os.pathsep.join(map(str, kept))}


def run(*command: object, timeout_s: float = 900, code: int = 0, cwd: Path | None = None) -> str:
    """Run a command outside this environment and without cargo; return its output.

    Raises:
        AssertionError: It exited with another code; the message has its output.
    """
    program = shutil.which(str(command[0])) or str(command[0])
    done = subprocess.run(
        [program, *(str(part) for part in command[1:])],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=outside(),
        cwd=cwd,
        check=False,
    )
    if done.returncode != code:
        raise AssertionError(
            f"{command} exited with {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}"
        )
    return done.stdout + done.stderr


@dataclass
class CleanEnvironment:
    """A virtual environment with the installed packages only.

    Attributes:
        folder: The environment's folder.
        wheels: The folder of wheels that are installed from; nothing is built.
        options: More options of `uv pip install`.
    """

    folder: Path
    wheels: Path
    options: tuple[str, ...] = ()

    @property
    def bin(self) -> Path:
        """The folder of its commands."""
        return self.folder / "bin"

    def create(self) -> CleanEnvironment:
        """Make the environment; return it."""
        run("uv", "venv", "-q", "--python", sys.executable, self.folder)
        return self

    def install(self, *requirements: str) -> None:
        """Install from the folder of wheels and the registry."""
        given = ("--find-links", self.wheels, "--no-build", *self.options)
        run("uv", "pip", "install", "-q", "--python", self.bin / "python", *given, *requirements)

    def packages(self) -> set[str]:
        """Return the names of the installed packages of Hocket."""
        lines = run("uv", "pip", "list", "--python", self.bin / "python", "--format", "freeze").splitlines()
        return {line.split("==")[0] for line in lines if line.startswith("hocket")}

    def python(self, *arguments: object, code: int = 0) -> str:
        """Run its Python; return the output."""
        return run(self.bin / "python", *arguments, timeout_s=120, code=code)


def build(out: Path, *, is_portable: bool) -> list[Path]:
    """Write the wheel of each package into a folder; return them in the order of `PACKAGES`.

    Args:
        out: The folder; wheels of Hocket in it are replaced.
        is_portable: Whether zig compiles the extension, for `MANYLINUX`; else the machine's compiler does.

    Raises:
        subprocess.CalledProcessError: A build failed; its output has been shown.
    """
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("hocket*.whl"):
        old.unlink()
    names = [name for name in PACKAGES if not (is_portable and name == "hocket-native")]
    for name in names:
        _build(["uv", "build", "-q", "--wheel", "--package", name, "--out-dir", str(out.resolve())], ROOT)
    if is_portable:
        with_zig = ["uv", "tool", "run", "-q", "--with", ZIG, "--from", MATURIN, "maturin", "build", "-q"]
        options = ["--release", "--locked", "--zig", "--compatibility", MANYLINUX]
        _build([*with_zig, *options, "--out", str(out.resolve())], ROOT / "packages" / "native")
    wheels = {path.name.split("-")[0].replace("_", "-"): path for path in out.glob("hocket*.whl")}
    return [wheels[name] for name in PACKAGES]


def _build(command: list[str], cwd: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    subprocess.run(command, cwd=cwd, env=env, check=True, timeout=3600)


def check(wheels: list[Path]) -> None:
    """Have twine check the metadata and the README of each wheel.

    Raises:
        AssertionError: It found something; the message has twine's words.
    """
    run("uv", "tool", "run", "-q", "--from", TWINE, "twine", "check", "--strict", *wheels)
    for wheel in wheels:
        check_notices(wheel)


def check_notices(wheel: Path) -> None:
    """Check that a wheel has its licence and, if it links crates, their licences and their list (SBOM).

    Raises:
        AssertionError: A notice is missing, or the list lacks a crate whose licence is given.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = {name.split(".dist-info/")[-1]: name for name in archive.namelist()}
        assert "licenses/LICENSE" in names, f"{wheel.name} has no licence"
        if not any(name.endswith((".so", ".pyd")) for name in names):
            return
        boms = [name for name in names if name.startswith("sboms/") and name.endswith(".cyclonedx.json")]
        assert boms, f"{wheel.name} has a compiled extension and no list of its crates (SBOM)"
        assert "licenses/THIRD_PARTY.txt" in names, f"{wheel.name} has a compiled extension and no notices"
        components = json.loads(archive.read(names[boms[0]]))["components"]
        listed = {f"{one['name']} {one['version']}" for one in components}
        notices = archive.read(names["licenses/THIRD_PARTY.txt"]).decode()
    # The list has crates of other systems and of the build too, so it may be longer.
    linked = set(re.findall(r"^([A-Za-z0-9_-]+ \d[^:\s]*): ", notices, re.MULTILINE))
    assert linked, f"{wheel.name}: THIRD_PARTY.txt names no crate"
    lacking = sorted(linked - listed)
    assert not lacking, f"{wheel.name}: the SBOM lacks {', '.join(lacking)}, whose licences are given"


def try_alone(name: str, wheels: Path, options: tuple[str, ...] = ()) -> float:
    """Install a package alone and use it; return the seconds of the installation.

    Args:
        name: The package.
        wheels: The folder of all wheels.
        options: More options of `uv pip install`, such as `--torch-backend=cpu`.

    Raises:
        AssertionError: A command failed; the message has its output.
    """
    with tempfile.TemporaryDirectory(prefix="hocket-wheel-") as temporary:
        environment = CleanEnvironment(Path(temporary) / "env", wheels.resolve(), options).create()
        start = time.monotonic()
        environment.install(name)
        seconds = time.monotonic() - start
        for program, *arguments in TRIES[name]:
            run(environment.bin / program, *arguments, timeout_s=300, cwd=Path(temporary))
    return seconds


def main() -> int:
    """Build, check and try all wheels; print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels; default: dist")
    parser.add_argument(
        "--plain", action="store_true", help="compile for this machine's C library, not by zig"
    )
    parser.add_argument("--no-build", action="store_true", help="take the wheels that are in the folder")
    parser.add_argument("--no-try", action="store_true", help="do not install the wheels")
    parser.add_argument(
        "--torch-backend", metavar="NAME", help="torch's build for the trials, such as `cpu`; see uv's manual"
    )
    arguments = parser.parse_args()
    out: Path = arguments.out
    start = time.monotonic()
    if not arguments.no_build:
        build(out, is_portable=sys.platform == "linux" and not arguments.plain)
    wheels = sorted(out.glob("hocket*.whl"))
    check(wheels)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:8.2f} MB  {wheel.name}", flush=True)
    print(f"built and checked in {time.monotonic() - start:.0f} s", flush=True)
    if not arguments.no_try:
        options = (f"--torch-backend={arguments.torch_backend}",) if arguments.torch_backend else ()
        for name in PACKAGES:
            print(
                f"{try_alone(name, out, options):8.1f} s   to install {name} alone, which works", flush=True
            )
    print(f"use them: uv tool install --find-links {out} hocket-ckpt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
