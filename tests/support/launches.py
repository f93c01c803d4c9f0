"""Helpers for the tests of `hocket-launch`, and scripts that several of these tests start."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from support.rank_server import OWN_VARIABLES, fork

if TYPE_CHECKING:
    from hocket.dist.launch.warm.starter import WarmProcess

_LAUNCHERS = -1
"""The number of the server of launchers that run on; that of `run_forked` has another `TMPDIR`."""
_FORKED = -2

TESTS = Path(__file__).resolve().parents[1]

SCRIPT = """
import json, os, pathlib, signal, sys, time, traceback
rank, out, what = int(os.environ["RANK"]), pathlib.Path(sys.argv[1]), sys.argv[2]
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "OMP_NUM_THREADS"]
print("output of rank", rank)
if what == "raise" and rank == 1:
    raise ValueError("rank one failed")
if what == "follow":
    written = out / "written"
    if rank == 1:
        try:
            raise ValueError("rank one failed")
        except ValueError:
            traceback.print_exc()
        written.touch()
    else:
        while not written.exists():
            time.sleep(0.05)
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4155")
if what == "kill" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if what == "wait":
    def stop(number, frame):
        (out / f"stopped-{rank}").write_text(signal.Signals(number).name)
        sys.exit(0)
    for each in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(each, stop)
(out / f"rank-{rank}").write_text(json.dumps({
    "env": {name: os.environ[name] for name in names}, "argv": sys.argv, "pid": os.getpid(),
    "address": bool(os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])),
}))
if what != "end":
    time.sleep(60)
"""
"""A script `job.py DIR CASE` that runs a case and writes what each rank found to the folder."""

DIST_SCRIPT = """
import sys, torch
from torch import nn
from hocket.dist import provide
with provide({}, device="cpu", timeout_s=20) as parallelism:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model = parallelism.lay_out(model, [torch.optim.SGD(model.parameters())])
    for step in range(5):
        if step == 2 and str(parallelism.data_parallel[0]) == sys.argv[1]:
            raise ValueError("a bad sample")
        model(torch.ones(2, 4)).sum().backward()
        parallelism.reduce_async(torch.ones(1)).wait()
"""
"""A script that trains on two ranks; the rank given as its argument fails in step 2."""

NOTES_SCRIPT = """
import os, pathlib, sys, time
from hocket.dist.errors import CollectiveError
from hocket.dist.ranks.failures import install_excepthook
install_excepthook()
first = pathlib.Path(sys.argv[1], "first")
if os.environ["RANK"] == "0":
    error = CollectiveError("the exchange failed")
    for note in ("raised by `Monitor`", "while it waited", "for the other ranks", "of the group"):
        error.add_note(note)
    first.touch()
    raise error
while not first.exists():
    time.sleep(0.02)
time.sleep(0.2)
raise ValueError("a bad sample")
"""
"""A script whose rank 0 reports the end of rank 1 before rank 1 does, with notes below its error."""

SLURM = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "PATH": "/nonexistent",
}
"""Slurm's variables on the second node of a two-node step, without the number of tasks."""


def command(*arguments: str | Path) -> list[str]:
    """Return the command line of a launcher with these arguments."""
    return [sys.executable, "-m", "hocket.dist.launch", *map(str, arguments)]


def environment(tmp_path: Path) -> dict[str, str]:
    """Return this process's environment without a rank's variables; the launcher's logs go to `tmp_path`."""
    unset = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    return {**variables, "TMPDIR": str(tmp_path)}


def run(tmp_path: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a launcher in `tmp_path` to its end."""
    return subprocess.run(
        command(*arguments),
        env=environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
    )


@functools.cache
def forked_logs() -> Path:
    """Return the folder of the logs of `run_forked`, which are there until the next launch.

    It is the same for all launches: imports read `TMPDIR`, so a fork must have that of its server.
    """
    folder = Path(tempfile.mkdtemp(prefix="launches-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def run_forked(tmp_path: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a launcher as `run` does, but as a fork of a process that has imported torch, which is quicker."""
    for earlier in forked_logs().iterdir():
        shutil.rmtree(earlier)
    variables = {**environment(forked_logs()), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    program = ["-m", "hocket.dist.launch", *map(str, arguments)]
    done = run_python(program, cwd=tmp_path, env=variables, server=_FORKED)
    assert done is not None, "the launcher would have to import torch by itself"
    return done


def run_python(
    program: list[str], *, cwd: Path, env: Mapping[str, str], server: int = 0, timeout_s: float = 150
) -> subprocess.CompletedProcess[str] | None:
    """Run `python PROGRAM` to its end, as a fork of a process that has imported torch.

    Args:
        program: A script, or `-m` and a module, and its arguments.
        cwd: Its working directory.
        env: Its variables; `tests` is added to the path.
        server: The number of the server, whose processes have the same variables on import.
        timeout_s: Deadline.

    Returns:
        None if the program needs an interpreter of its own.
    """
    paths = [str(TESTS), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    variables = {**env, "PYTHONPATH": os.pathsep.join(paths)}
    with (
        open(os.devnull) as stdin,
        tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr,
        contextlib.chdir(cwd),
    ):
        files = (stdin.fileno(), stdout.fileno(), stderr.fileno())
        process = fork(server, program, env=variables, files=files)
        if process is None:
            return None
        try:
            code = process.wait(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess(program, code, stdout.read(), stderr.read())


def run_alone(
    *program: str, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python PROGRAM` on one computing thread, by a fork where it can be, to its end."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **(env or {})}
    if sys.platform == "linux":
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")  # as ranks have it, with which it shares a server
    if (done := run_python(list(program), cwd=cwd, env=variables)) is not None:
        return done
    command = [sys.executable, *program]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=150)


def fork_launcher(*arguments: str | Path, env: Mapping[str, str], log: Path) -> WarmProcess:
    """Start a launcher as `run_forked` does, and return at once.

    Args:
        *arguments: Those of `hocket-launch`.
        env: Variables on top of those of this process.
        log: The file of its output.
    """
    paths = [str(TESTS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(paths)
    variables = {**os.environ, **threads, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", **env}
    for name in OWN_VARIABLES:
        variables.pop(name, None)
    program = ["-m", "support.launcher_main", *map(str, arguments)]
    with open(os.devnull) as stdin, log.open("wb") as output:
        files = (stdin.fileno(), output.fileno(), output.fileno())
        started = fork(_LAUNCHERS, program, env=variables, files=files, own=env)
    assert started is not None, "the launcher would have to import torch by itself"
    return started


def is_alive(pid: int) -> bool:
    """Return whether the process runs; a zombie, which waits to be reaped, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def free_port() -> str:
    """Return a TCP port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
