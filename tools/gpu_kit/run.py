"""The runner of the GPU kit: unpacks the wheels, runs each part in its own process, and writes the results.

It needs Python and torch, and no network. Nothing is installed: the wheels are unpacked beside this file, and
a library that Python has already is left as it is.
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SKIPPED = 77
BUDGET_S = 530.0
"""Seconds for all parts together; what does not fit is skipped by name."""
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


def fits(wheel: str) -> bool:
    """Return whether a wheel's tags fit this Python on Linux x86-64 or this machine."""
    python, abi, system = wheel.removesuffix(".whl").split("-")[-3:]
    minor = sys.version_info.minor
    if not ("any" in system or platform.machine() in system):
        return False
    if any(re.fullmatch(r"py3|py2\.py3", tag) for tag in (python,)):
        return True
    versions = [int(found) for found in re.findall(r"cp3(\d+)", python)]
    return minor in versions if abi != "abi3" else any(minor >= version for version in versions)


def unpack(wheels: Iterable[Path], into: Path) -> list[str]:
    """Unpack the wheels that fit and whose modules Python lacks; return the names of those left out."""
    left_out = []
    into.mkdir(parents=True, exist_ok=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            tops = {
                name.split("/")[0].split(".")[0] for name in archive.namelist() if ".dist-info/" not in name
            }
            is_ours = wheel.name.startswith("hocket")
            is_present = any(importlib.util.find_spec(top) for top in tops if top.isidentifier())
            if (is_ours or not is_present) and fits(wheel.name):
                archive.extractall(into)
            elif not is_present:
                left_out.append(wheel.name)
    return left_out


def run_part(command: list[str], limit_s: float, env: dict[str, str]) -> dict[str, Any]:
    """Run a part in a session of its own, end it at its limit, and return what came of it."""
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=env, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        # Also what the part has started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        out.seek(0)
        err.seek(0)
        said, errors = out.read(), err.read()
    result: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1)}
    lines = said.strip().splitlines()
    if code == 0:
        try:
            return result | {"status": "passed", "figures": json.loads(lines[-1])}
        except (IndexError, ValueError):
            return result | {"status": "failed", "why": "the part printed no figures", "output": said[-4000:]}
    if code == SKIPPED:
        return result | {"status": "skipped", "why": lines[-1] if lines else "no reason given"}
    why = f"not done after {limit_s:.0f} s" if code is None else f"ended with {code}"
    return result | {"status": "failed", "why": why, "output": (said + errors)[-4000:]}


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
        lines.append(f"| {name} | {result['status']} | {result['seconds']} | {told.replace('|', '/')} |")
    for name, result in document["parts"].items():
        if "output" in result:
            lines += ["", f"## {name}", "", "```", result["output"].strip(), "```"]
    return "\n".join(lines) + "\n"


def shown(value: Any) -> str:
    """Return a figure as short text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + ", ".join(shown(one) for one in value[:6]) + ("…" if len(value) > 6 else "") + "]"
    return str(value)


def run_all(
    limits_s: dict[str, float], script: Path, *, has_cuda: bool, rehearse: bool, env: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Run the parts one after the other, whatever fails; return their results by name."""
    start, results = time.monotonic(), {}
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


def main() -> int:
    """Run the kit; return 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=HERE / "results", help="folder of results.json and gpu.md"
    )
    parser.add_argument("--only", nargs="+", metavar="PART", choices=list(LIMITS_S), help="these parts alone")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: run all on the CPU, small")
    arguments = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        sys.exit("torch is not installed for this Python; set PYTHON to one that has it")
    import torch

    start = time.monotonic()
    site = HERE / "site"
    left_out = unpack(sorted((HERE / "wheels").glob("*.whl")), site)
    if left_out:
        print(f"for another Python or machine: {', '.join(left_out)}")
    paths = [str(site), str(HERE / "repository" / "tests"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    chosen = {name: limit for name, limit in LIMITS_S.items() if name in (arguments.only or LIMITS_S)}
    has_cuda = torch.cuda.is_available()
    results = run_all(chosen, HERE / "parts.py", has_cuda=has_cuda, rehearse=arguments.rehearse, env=env)
    document = {
        "device": torch.cuda.get_device_name() if has_cuda else "no CUDA device",
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seconds": time.monotonic() - start,
        "left_out": left_out,
        "parts": results,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "results.json").write_text(json.dumps(document, indent=2) + "\n")
    (arguments.out / "gpu.md").write_text(page(document))
    print(f"{arguments.out / 'gpu.md'} has all of it")
    return any(result["status"] == "failed" for result in results.values())


if __name__ == "__main__":
    sys.exit(main())
