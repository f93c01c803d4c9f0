"""The time of a stranger's first runs, from nothing but the wheels, uv and a Python to a first result.

`PYTHONPATH=tests python tests/bench/first_run.py --wheels dist` takes some four minutes on two quiet cores.
The commands are those of the README's section *Install*, in a folder of their own, without cargo, and with a
cache of uv that is empty: first the checkpoint tool and its demo, then all of Hocket and `hocket demo`. It
prints the seconds of each command, the downloads that uv names (files of a MiB or more), the largest of them,
and the size on disk.

`--torch-backend cpu` installs torch's build for CPUs, whose index must be reachable; `--keep-cache` takes
uv's cache as it is, which leaves out the downloads; `--python` is the Python of the environments. It exits
with 1 if a command fails, or if a part takes longer than its limit.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from support.readme import console_lines
from support.tools import load_tool

LIMITS_S = {"the checkpoint tool": 120, "all of Hocket": 240}
"""The longest time of each part: two minutes to a first result, four from nothing to the end of the demo."""
ANY_PYTHON = '">=3.11"'
"""The Python in the README's commands."""
DOWNLOAD = re.compile(r"Downloading (\S+) \(([\d.]+)([KMG])iB\)")
MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}


@dataclass
class Part:
    """The commands of a part, with their seconds and the downloads in MiB.

    Attributes:
        folder: The folder in which the commands run.
        env: The variables of their environment.
    """

    folder: Path
    env: dict[str, str]
    seconds: dict[str, float] = field(default_factory=dict)
    downloads: dict[str, float] = field(default_factory=dict)

    def run(self, command: str, *, before: str = "true") -> None:
        """Run a command of the README in a shell, after `before`, and note its seconds and downloads.

        Raises:
            SystemExit: The command failed; its output has been shown.
        """
        start = time.monotonic()
        done = subprocess.run(
            ["bash", "-euc", f"{before}\n{command}"],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        seconds = time.monotonic() - start
        if done.returncode:
            said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            sys.exit(f"`{command}` ended with {done.returncode}\n{said}")
        self.seconds[command] = seconds
        # uv lists its downloads on standard error, which is no terminal here.
        for name, size, unit in DOWNLOAD.findall(done.stderr):
            self.downloads[name] = float(size) * MIB[unit]
        print(f"{seconds:8.1f} s  {command}", flush=True)

    def show(self, title: str) -> bool:
        """Print the sums of the part; return whether it kept its limit."""
        total, limit_s = sum(self.seconds.values()), LIMITS_S[title]
        print(f"{total:8.1f} s  {title}, of at most {limit_s} s")
        if self.downloads:
            largest = max(self.downloads, key=lambda name: self.downloads[name])
            print(
                f"{sum(self.downloads.values()):8.0f} MiB downloaded in {len(self.downloads)} files of a MiB "
                f"or more, the largest {largest} with {self.downloads[largest]:.0f} MiB"
            )
        size = subprocess.run(
            ["du", "-sm", "--apparent-size", self.folder],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        print(f"{size.stdout.split()[0]:>8} MiB on disk, without uv's cache\n", flush=True)
        return total <= limit_s


def measure(title: str, folder: Path, wheels: Path, arguments: argparse.Namespace) -> Part:
    """Run the commands of a part in a new folder beside the wheels."""
    folder.mkdir()
    (folder / "dist").symlink_to(wheels)
    env = load_tool("wheels").outside() | {
        "UV_TOOL_DIR": str(folder / "tools"),
        "UV_TOOL_BIN_DIR": str(folder / "bin"),
        "UV_NO_PROGRESS": "1",
        "UV_PYTHON_DOWNLOADS": "never",
        # If it were set, each of the ranks would compile torch again.
        "PYTHONDONTWRITEBYTECODE": "",
    }
    if not arguments.keep_cache:
        env["UV_CACHE_DIR"] = str(folder.parent / f"{folder.name}-cache")
    part, lines = Part(folder, env), console_lines("Install")
    if title == "the checkpoint tool":
        (install,) = (line for line in lines if line.startswith("uv tool install"))
        part.run(install.replace(ANY_PYTHON, arguments.python))
        for command in console_lines("The checkpoint tool, without torch"):
            part.run(command.replace("/tmp", str(folder)), before=f'export PATH="{folder}/bin:$PATH"')
        return part
    create = next(line for line in lines if line.startswith("uv venv"))
    part.run(create.replace(ANY_PYTHON, arguments.python))
    install = next(line for line in lines if line.startswith("uv pip install"))
    if arguments.torch_backend:
        install += f" --torch-backend={arguments.torch_backend}"
    activate = "source .venv/bin/activate"
    part.run(install, before=activate)
    part.run(lines[-1], before=activate)
    return part


def main() -> int:
    """Measure both parts; return 1 if one of them exceeds its limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, default=Path("dist"), help="as tools/wheels.py writes them")
    parser.add_argument("--parts", nargs="+", choices=list(LIMITS_S), default=list(LIMITS_S))
    parser.add_argument(
        "--torch-backend", metavar="NAME", help="torch's build, such as `cpu`; see uv's manual"
    )
    parser.add_argument("--keep-cache", action="store_true", help="take uv's cache as it is")
    parser.add_argument("--python", default=sys.executable, help="version or path; default: this one")
    arguments = parser.parse_args()
    wheels = arguments.wheels.resolve()
    if not list(wheels.glob("hocket-0*.whl")):
        sys.exit(f"no wheels in {wheels}: `python tools/wheels.py --no-try` writes them")
    load = f"load {os.getloadavg()[0]:.1f}"
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python of {arguments.python}, {load}\n", flush=True)
    is_within = True
    for title in arguments.parts:
        with tempfile.TemporaryDirectory(prefix="hocket-first-") as temporary:
            start = time.monotonic()
            part = measure(title, Path(temporary) / "new", wheels, arguments)
            is_within &= part.show(title)
            print(f"{time.monotonic() - start:8.1f} s  as a whole\n")
    return int(not is_within)


if __name__ == "__main__":
    sys.exit(main())
