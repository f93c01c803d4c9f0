"""The runner of the GPU kit: unpacks the wheels, runs each part in its own process, and writes the results.

It needs Python 3.11 and torch 2.9 or newer, and no network. Nothing is installed: the wheels are unpacked
beside this file. A library that Python has already is left as it is, unless it is older than Hocket needs.
A wheel in `partial_wheels` takes the files that it lacks from one in `wheels`, which its `shared.json` names.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PYTHON, TORCH = (3, 11), (2, 9)
"""The oldest versions that Hocket works with."""
SKIPPED = 77
BUDGET_S = 520.0
"""Seconds for everything, unpacking too; a part that does not fit is skipped by name."""
PROBE_S = 90
OUTPUT_BYTES = 100_000
"""The end of a part's output that is kept."""
LIMITS_S = {
    "imports": 60,
    "environment": 40,
    "one_step": 60,
    "bf16": 40,
    "nccl": 80,
    "staging": 40,
    "compiled": 90,
    "cuda_graphs": 100,
    "fp8": 60,
    "fp8_transformer_engine": 60,
    "qlora": 60,
    "fp16": 40,
    "mfu_300m": 70,
    "mfu_1b": 90,
    "save_stall": 60,
    "loader": 60,
    "gpu_tests": 150,
}
"""The time limit of each part, in the order in which they run: first what is most likely broken."""
ON_CPU = ("imports", "environment")
"""The parts that run without a GPU; `--rehearse` runs the others too, at a small size."""
PROBE = """
import json, torch
has_cuda = torch.cuda.is_available()
name = torch.cuda.get_device_name() if has_cuda else "no CUDA device"
print(json.dumps({"torch": torch.__version__, "has_cuda": has_cuda, "device": name}))
"""


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 9, 1) for `2.9.1+cu130`."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def normal(name: str) -> str:
    """Return the normalised name of a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def oldest_versions(wheels: list[Path]) -> dict[str, str]:
    """Return the oldest version of each library that the wheels and the tests accept."""
    needs = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".dist-info/METADATA"):
                    lines = archive.read(name).decode("utf-8", "replace").splitlines()
                    needs += [line for line in lines if re.match(r"Requires-Dist:(?!.*extra *==)", line)]
    settings = HERE / "repository" / "pyproject.toml"
    if settings.exists():
        needs += re.findall(r'"[\w.-]+>=[\d.]+"', settings.read_text("utf-8"))
    found: dict[str, str] = {}
    for need in needs:
        match = re.match(r'(?:Requires-Dist: *|")([\w.-]+)[^;]*?>= *([\d.]+)', need)
        if match and numbers(match[2]) > numbers(found.get(normal(match[1]), "")):
            found[normal(match[1])] = match[2]
    return found


def fits(wheel: str) -> bool:
    """Return whether a wheel's tags fit this Python, this machine and its C library."""
    python, abi, system = wheel.removesuffix(".whl").split("-")[-3:]
    minor = sys.version_info.minor
    if not ("any" in system or platform.machine() in system):
        return False
    needed = [numbers(version.replace("_", ".")) for version in re.findall(r"manylinux_(\d+_\d+)_", system)]
    library, version = platform.libc_ver()
    if needed and library == "glibc" and min(needed) > numbers(version)[:2]:
        return False
    if python in ("py3", "py2.py3"):
        return True
    versions = [int(found) for found in re.findall(r"cp3(\d+)", python)]
    return minor in versions if abi != "abi3" else any(minor >= version for version in versions)


def installed(modules: set[str], package: str) -> str | None:
    """Return the version of an installed library; `""` if that is unknown, None without the library."""
    for module in modules:
        with contextlib.suppress(ImportError, ValueError):
            if module.isidentifier() and importlib.util.find_spec(module):
                with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                    return importlib.metadata.version(package)
                return ""
    return None


def unpack(wheels: list[Path], into: Path) -> list[str]:
    """Unpack the wheels that fit if their library is missing or too old.

    Returns:
        The wheels of libraries that are wanted and of which no wheel fits.
    """
    left_out: dict[str, list[str]] = {}
    unpacked = set()
    into.mkdir(parents=True, exist_ok=True)
    oldest = oldest_versions(wheels)
    for wheel in wheels:
        package = normal(wheel.name.split("-")[0])
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            lists = [name for name in names if name.endswith(".dist-info/shared.json")]
            shared: dict[str, str] = json.loads(archive.read(lists[0])) if lists else {}
            tops = {
                name.split("/")[0].split(".")[0] for name in (*names, *shared) if ".dist-info/" not in name
            }
            version = installed(tops, package)
            is_old = bool(version) and numbers(version or "") < numbers(oldest.get(package, ""))
            is_wanted = wheel.name.startswith("hocket") or version is None or is_old
            if is_wanted and fits(wheel.name):
                archive.extractall(into)
                unpacked.add(package)
                for owner in set(shared.values()):
                    with zipfile.ZipFile(wheel.parents[1] / "wheels" / owner) as source:
                        source.extractall(into, [name for name in shared if shared[name] == owner])
            elif is_wanted:
                left_out.setdefault(package, []).append(wheel.name)
    return [name for package, names in left_out.items() if package not in unpacked for name in names]


def descendants() -> list[int]:
    """Return the processes that this one has started or adopted, and theirs."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = stat.read_text("utf-8", "replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found, waiting = [], [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def end_part(process: subprocess.Popen[bytes], before: set[int]) -> None:
    """End a part and all processes that it has started, also those in sessions of their own.

    Args:
        process: The part.
        before: The descendants that ran before the part, which are left alone.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for _ in range(20):
        left = set(descendants()) - before - {process.pid}
        if not left:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    # A process that waits in the kernel for a device cannot be ended; the next part does not wait for it.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)


def end_of(file: Any) -> str:
    """Return the last `OUTPUT_BYTES` of a file as text; bytes that are not UTF-8 are replaced."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_BYTES))
    text: str = file.read().decode("utf-8", "replace").replace("\0", "\ufffd")
    return text


def run_part(command: list[str], limit_s: float, env: dict[str, str]) -> dict[str, Any]:
    """Run a part in a session of its own, end it at its limit, and return what came of it."""
    start, before = time.monotonic(), set(descendants())
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, start_new_session=True
            )
        except OSError as error:
            return {"seconds": 0.0, "status": "failed", "why": f"cannot be started: {error}"}
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        finally:
            end_part(process, before)
        said, errors = end_of(out), end_of(err)
    result: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1)}
    lines = said.strip().splitlines()
    if code == 0:
        figures = None
        with contextlib.suppress(IndexError, ValueError, RecursionError):
            figures = json.loads(lines[-1])
        if isinstance(figures, dict):
            return result | {"status": "passed", "figures": figures}
        return result | {"status": "failed", "why": "the part printed no figures", "output": said[-4000:]}
    if code == SKIPPED:
        return result | {"status": "skipped", "why": lines[-1][:400] if lines else "no reason given"}
    why = f"ended with {code}"
    if code is None:
        why = f"not done after {limit_s:.0f} s"
    elif code < 0:
        why = f"ended by signal {-code}"
    return result | {"status": "failed", "why": why, "output": (said[-2000:] + errors)[-4000:]}


def page(document: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        "# Hocket on a GPU",
        "",
        f"{document['device']}, {document['date']}, {document['seconds']:.0f} s.",
        "",
    ]
    lines += ["| part | result | seconds | what came of it |", "|---|---|---|---|"]
    for name, result in document["parts"].items():
        figures = {key: value for key, value in result.get("figures", {}).items() if name != "environment"}
        told = result.get("why") or ", ".join(f"{key} {shown(value)}" for key, value in figures.items())
        told = " ".join(told.replace("|", "/").split())
        lines.append(f"| {name} | {result['status']} | {result['seconds']} | {told} |")
    for name, result in document["parts"].items():
        if "output" in result:
            lines += ["", f"## {name}", "", "```", result["output"].strip().replace("```", "` ` `"), "```"]
    return "\n".join(lines) + "\n"


def shown(value: Any) -> str:
    """Return a figure as short text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + ", ".join(shown(one) for one in value[:6]) + ("…" if len(value) > 6 else "") + "]"
    return str(value)[:400]


def run_all(
    limits_s: dict[str, float],
    script: Path,
    *,
    has_cuda: bool,
    rehearse: bool,
    env: dict[str, str],
    start: float | None = None,
    results: dict[str, dict[str, Any]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Run the parts one after the other, whatever fails; return their results by name.

    Args:
        limits_s: The time limit of each part.
        script: The file with the parts.
        has_cuda: Whether they run on a GPU.
        rehearse: Whether all of them run without one.
        env: The variables of their environment.
        start: When the whole began, by `time.monotonic()`; now if None.
        results: The results so far, to which each part adds its own; none if None.
    """
    start = time.monotonic() if start is None else start
    results = {} if results is None else results
    for name, limit_s in limits_s.items():
        left_s = BUDGET_S - (time.monotonic() - start)
        if not (has_cuda or rehearse or name in ON_CPU):
            results[name] = {"status": "skipped", "seconds": 0, "why": "needs a CUDA device"}
        elif left_s < 5:
            results[name] = {"status": "skipped", "seconds": 0, "why": f"the {BUDGET_S:.0f} s are over"}
        else:
            command = [sys.executable, str(script), name, "--device", "cuda" if has_cuda else "cpu"]
            results[name] = run_part(command, min(limit_s, left_s), env)
        result = results[name]
        print(f"{result['status']:8} {name:24} {result['seconds']:6} s  {result.get('why', '')}", flush=True)
    return results


def probe() -> dict[str, Any]:
    """Import torch in a process of its own, where it may hang or crash; return its version and the device.

    Raises:
        SystemExit: Python or torch is too old, or torch cannot be imported.
    """
    if sys.version_info < PYTHON:
        sys.exit(
            f"Hocket needs Python {'.'.join(map(str, PYTHON))} or newer, and {sys.executable} is "
            f"{platform.python_version()}; set PYTHON to a newer one that has torch"
        )
    if importlib.util.find_spec("torch") is None:
        sys.exit(f"torch is not installed for {sys.executable}; set PYTHON to one that has it")
    found = run_part([sys.executable, "-c", PROBE], PROBE_S, dict(os.environ))
    if found["status"] != "passed":
        sys.exit(f"{sys.executable} cannot import torch: {found['why']}\n{found.get('output', '')}")
    figures: dict[str, Any] = found["figures"]
    if numbers(figures["torch"])[:2] < TORCH:
        sys.exit(
            f"Hocket needs torch {'.'.join(map(str, TORCH))} or newer, and {sys.executable} has "
            f"{figures['torch']}; set PYTHON to one with a newer torch"
        )
    return figures


def main() -> int:
    """Run the kit; return 1 if a part failed."""
    home = HERE if os.access(HERE, os.W_OK) else Path(tempfile.mkdtemp(prefix="hocket-kit-"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=home / "results", help="folder of results.json and gpu.md"
    )
    parser.add_argument("--only", nargs="+", metavar="PART", choices=list(LIMITS_S), help="these parts alone")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: run all on the CPU, small")
    arguments = parser.parse_args()
    start, found = time.monotonic(), probe()
    if sys.platform == "linux":
        # PR_SET_CHILD_SUBREAPER: what a part leaves behind becomes a child of this process, which ends it.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    # A folder for each version of Python: compiled libraries of one break those of another.
    site = home / f"site-{sys.version_info.major}.{sys.version_info.minor}"
    left_out = unpack(sorted(HERE.glob("*wheels/*.whl")), site)
    if left_out:
        print(f"for another Python, machine or C library: {', '.join(left_out)}")
    paths = [str(site), str(HERE / "repository" / "tests"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    chosen = {name: limit for name, limit in LIMITS_S.items() if name in (arguments.only or LIMITS_S)}
    results: dict[str, dict[str, Any]] = {}
    has_cuda, out = bool(found["has_cuda"]), arguments.out
    try:
        run_all(
            chosen,
            HERE / "parts.py",
            has_cuda=has_cuda,
            rehearse=arguments.rehearse,
            env=env,
            start=start,
            results=results,
        )
    finally:
        # After Ctrl-C too: the results so far.
        document = {
            "device": found["device"],
            "date": time.strftime("%Y-%m-%d"),
            "python": platform.python_version(),
            "torch": found["torch"],
            "seconds": time.monotonic() - start,
            "left_out": left_out,
            "parts": results,
        }
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.json").write_text(json.dumps(document, indent=2) + "\n", "utf-8")
        (out / "gpu.md").write_text(page(document), "utf-8")
        print(f"{out / 'gpu.md'} has all of it")
    return int(any(result["status"] == "failed" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
