"""Checks that a test leaves no threads, processes, files, variables, shared memory or signal handlers."""

from __future__ import annotations

import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

OURS = "hocket-"
GRACE_S = 20.0
# pytest changes its own variables; torch and other libraries set theirs on import, and keep them.
FREE_VARIABLES = (
    "PYTEST_",
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "TRITON_",
    "KINETO_",
    "KMP_",
    "CUDA_MODULE_LOADING",
    "PYTORCH_NVML_",
)
# multiprocessing's helpers live as long as the interpreter, by design.
FREE_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")

_kept_processes: set[int] = set()
_kept_files: set[str] = set()


def keep_process(pid: int) -> None:
    """Allow child `pid` to outlive the test that started it, as a server of the whole session does."""
    _kept_processes.add(pid)


def release_process(pid: int) -> None:
    """Undo `keep_process`; an unknown `pid` is ignored."""
    _kept_processes.discard(pid)


def keep_file(number: int) -> None:
    """Allow a file descriptor to outlive the test that opened it."""
    _kept_files.add(os.readlink(f"/proc/self/fd/{number}"))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The threads, processes, files and other resources of the process at one moment."""

    threads: frozenset[int]
    children: frozenset[int]
    files: dict[int, str]
    shared_memory: frozenset[str]
    handlers: dict[signal.Signals, object]
    environment: dict[str, str] = field(repr=False)


def snapshot() -> Snapshot:
    """Return the current resources of this process."""
    return Snapshot(
        threads=frozenset(thread.ident or 0 for thread in threading.enumerate()),
        children=frozenset(_children()),
        files=_files(),
        shared_memory=frozenset(_shared_memory()),
        handlers={number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)},
        environment=dict(os.environ),
    )


def leaks(before: Snapshot) -> list[str]:
    """Return one sentence for each resource that is held now and was not `before`."""
    return _held(before) + _changed_variables(before.environment, dict(os.environ))


def _held(before: Snapshot) -> list[str]:
    """Return the sentences on resources that a thread or process may give back as it ends."""
    now = snapshot()
    messages = [
        f"thread {thread.name!r} is still running"
        for thread in threading.enumerate()
        if (thread.ident or 0) not in before.threads
        and not thread.daemon
        and thread.is_alive()
        and not thread.name.startswith(OURS)
    ]
    messages += [
        f"child process {pid} is still there: {_command(pid) or 'ended, and never waited for'}"
        for pid in sorted(now.children - before.children - _kept_processes)
        if not any(name in _command(pid) for name in FREE_CHILDREN)
    ]
    messages += [
        f"file descriptor {number} is still open: {target}"
        for number, target in sorted(now.files.items())
        if before.files.get(number) != target and target not in _kept_files
    ]
    messages += [
        f"/dev/shm/{name} is still there" for name in sorted(now.shared_memory - before.shared_memory)
    ]
    messages += [
        f"the handler of {number.name} is still {handler!r}"
        for number, handler in now.handlers.items()
        # A checkpoint store that was not closed keeps its handler by design.
        if handler is not before.handlers[number] and not getattr(handler, "ends_process", False)
    ]
    return messages


def check(before: Snapshot) -> None:
    """Raise if there are more resources than `before`; threads and processes get `GRACE_S` to end.

    Raises:
        AssertionError: Something was left, each thing named on a line of its own.
    """
    deadline = time.monotonic() + GRACE_S
    held = _held(before)
    while held and time.monotonic() < deadline:
        gc.collect()
        held = _held(before)
        if held:
            time.sleep(0.05)
    if messages := held + _changed_variables(before.environment, dict(os.environ)):
        raise AssertionError("the test left behind:\n  " + "\n  ".join(messages))


def restore(before: Snapshot) -> None:
    """Restore environment and signal handlers, so that a leak does not fail the following tests, too."""
    for number, handler in before.handlers.items():
        if signal.getsignal(number) is not handler and handler is not None:
            signal.signal(number, handler)
    if dict(os.environ) != before.environment:
        os.environ.clear()
        os.environ.update(before.environment)


def _children() -> list[int]:
    # Twice for each test, and in functions of `os`, which take a third of pathlib's time.
    pids: list[int] = []
    try:
        tasks = os.listdir("/proc/self/task")
    except FileNotFoundError:
        return pids
    for task in tasks:
        try:
            with open(f"/proc/self/task/{task}/children") as children:
                pids += [int(pid) for pid in children.read().split()]
        except OSError:  # the thread has ended
            continue
    return pids


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _files() -> dict[int, str]:
    """Return open files, pipes and sockets; no sockets if Hocket's Rust runtime runs, which keeps a pool."""
    kinds = ("/", "pipe:") if _has_native_threads() else ("/", "pipe:", "socket:")
    helpers = {
        getattr(multiprocessing.resource_tracker._resource_tracker, "_fd", None),
        getattr(multiprocessing.forkserver._forkserver, "_forkserver_alive_fd", None),
    }
    files: dict[int, str] = {}
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except FileNotFoundError:
        return files
    for number in numbers:
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the descriptor that listed the folder, which is closed now
            continue
        is_device = target.startswith("/dev/") and not target.startswith("/dev/shm/")
        if target.startswith(kinds) and number not in helpers and not is_device:
            files[number] = target
    return files


def _has_native_threads() -> bool:
    for name in Path("/proc/self/task").glob("*/comm"):
        try:
            if name.read_text().startswith(OURS):
                return True
        except OSError:
            continue
    return False


def _shared_memory() -> list[str]:
    # Only segments named with this process's id, because other programs create segments, too.
    folder = Path("/dev/shm")
    return [path.name for path in folder.glob(f"torch_{os.getpid()}_*")] if folder.is_dir() else []


def _changed_variables(before: dict[str, str], now: dict[str, str]) -> list[str]:
    # Names only: a value may be a secret.
    changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    verbs = {(True, True): "changed", (False, True): "set", (True, False): "removed"}
    return [
        f"environment variable `{name}` {verbs[name in before, name in now]}"
        for name in changed
        if not name.startswith(FREE_VARIABLES)
    ]
