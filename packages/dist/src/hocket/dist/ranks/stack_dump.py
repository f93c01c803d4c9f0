"""The line at which a rank is: on a signal of the launcher, a rank writes its stack to a file."""

import contextlib
import faulthandler
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Literal

FILE = "stack.txt"
"""The name of the file, in the folder of the rank's error record."""

_NUMBER = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else None
"""A signal that neither schedulers nor libraries use; the default action of it would end a process."""
_FRAME = re.compile(r'^\s*File "(.+?)", line (\d+),? in (\S+)', re.MULTILINE)
_TRACE = "Traceback (most recent call last)"
_CRASH = "Fatal Python error"
_STACK = "(most recent call first)"
_OF_HOCKET = re.compile(
    r"[/\\]hocket[/\\](trainer|algos|dist|ckpt|stream|native|recipes|compat)[/\\]|^<"
    r"|[/\\]lib[/\\]python3\.\d+[/\\](?!site-packages)|[/\\]site-packages[/\\]torch[/\\]"
)
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_CALLERS = re.compile(r"[/\\]torch[/\\]_ops\.py$|[/\\]lib[/\\]python3\.\d+[/\\](?!(site|dist)-packages[/\\])")
"""Files whose functions wait for what another one has begun: of Python's library, and one of torch."""
_COLLECTIVES = re.compile(
    r"[/\\]torch[/\\]distributed[/\\](distributed_c10d|_functional_collectives|(fsdp|pipelining)[/\\].+)\.py$"
    r"|[/\\]torch[/\\]nn[/\\]parallel[/\\]distributed\.py$"
    r"|[/\\]hocket[/\\]dist[/\\]ranks[/\\](process_group|diagnosis)\.py$"
)
"""Files whose functions start collectives, wait for them, or for the other ranks after one has failed."""

_file: int | None = None


def write_on_request(folder: Path) -> None:
    """Have this process write the stacks of its threads to a file, if the launcher asks or it crashes."""
    global _file
    if _NUMBER is None or _file is not None:
        return
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        # It stays open: the handler of the signal writes to it.
        _file = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if not faulthandler.is_enabled():
            faulthandler.enable(_file)
        faulthandler.register(_NUMBER, file=_file, all_threads=True)


def read_stack(pid: int, folder: Path, *, timeout_s: float = 0.5) -> str:
    """Return the stack of a rank, resumed for a moment if it is stopped; empty if it does not answer.

    Args:
        pid: The rank's process.
        folder: The folder of its error record.
        timeout_s: Seconds to wait for the answer.
    """
    path = folder / FILE
    if _NUMBER is None or not path.exists():
        return ""
    before, deadline, text = path.stat().st_size, time.monotonic() + timeout_s, ""
    is_stopped = process_state(pid) == "T"
    try:
        os.kill(pid, _NUMBER)
        if is_stopped:
            os.kill(pid, signal.SIGCONT)
        while time.monotonic() < deadline:
            time.sleep(0.02)
            with path.open(errors="replace") as file:
                file.seek(before)
                newest = file.read()
            if newest and newest == text:
                break
            text = newest
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
    except OSError:
        return ""
    return text


def read_crash(folder: Path) -> str:
    """Return the stack that a rank wrote as it crashed, such as by SIGSEGV or SIGABRT; empty without one."""
    try:
        text = (folder / FILE).read_text(errors="replace")
    except OSError:
        return ""
    return text[text.index(_CRASH) :] if _CRASH in text else ""


def process_state(pid: int) -> str:
    """Return the letter of a process's state, such as T for stopped; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        if Path("/proc/self/stat").exists():
            return ""
    # Systems without `/proc`, such as macOS.
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        words = ["ps", "-o", "state=", "-p", str(pid)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=5, check=False)
        return done.stdout.strip()[:1]
    return ""


def find_activity(stack: str) -> Literal["collective", "backward", "other"]:
    """Return whether the main thread of a stack is in a collective of torch, its layouts or Hocket.

    In the backward pass of autograd a rank computes, or waits for DDP's all-reduce: the two look alike. A
    rank that calls `wait` of a collective in code of its own is not told from one that computes there.
    """
    frames = _FRAME.findall(stack.rpartition(_STACK)[2])
    path, _, function = next((frame for frame in frames if not _CALLERS.search(frame[0])), ("", "", ""))
    if _COLLECTIVES.search(path):
        return "collective"
    return "backward" if function == "_engine_run_backward" else "other"


def find_line(text: str) -> str | None:
    """Return the line of the user's code in a traceback or a stack, as `train.py:12 in step`.

    The innermost frame of the user's own files counts, else that of an installed package, else any.
    """
    is_trace = _TRACE in text
    # The main thread stands last.
    frames = _FRAME.findall(text.rpartition(_TRACE if is_trace else _STACK)[2])
    if not is_trace:
        frames.reverse()  # a stack begins with the innermost frame
    for is_library in (
        lambda path: _OF_HOCKET.search(path) or _INSTALLED.search(path),
        _OF_HOCKET.search,
        lambda _: None,
    ):
        own = [frame for frame in frames if not is_library(frame[0])]
        if own:
            path, number, function = own[-1]
            place = "" if function == "<module>" else f" in `{function}`"
            return f"{path}:{number}{place}"
    return None
