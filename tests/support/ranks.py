"""Runs a function on several ranks, each in its own process, as a launcher would start them."""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from support.rank_server import ForkedRank, fork_rank

POLL_S = 0.02
# Time for a rank to write the stacks of its threads.
STACKS_S = 10.0
# Time for the other ranks, which fail or hang in a collective, to report their errors after a rank failed.
FAREWELL_S = 1.0
KEPT_OUTPUT = 8_000
OPTIONAL_GROUPS = frozenset({"transformers"})
"""Modules without which a test is skipped, by the names of the groups that install them."""


class RankError(RuntimeError):
    """A rank failed: `rank` is its number, `__cause__` the exception that it raised, if it can be pickled."""

    def __init__(self, message: str, *, rank: int):
        super().__init__(message)
        self.rank = rank


class RankTimeoutError(RankError, TimeoutError):
    """A rank was not done by the deadline; the message holds the stacks of all its threads."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result that a rank writes to its file when it ends."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    failed_at: float = 0.0
    """`time.time()` of the failure, because the first failure may cause others; 0 without a failure."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120,
    env: Mapping[str, str] | None = None,
    init: Literal["gloo"] | None = None,
) -> list[Any]:
    """Call `fn(*args)` on each of `world_size` ranks and return their results in the order of the ranks.

    Every rank is a process of its own, which `rank_server` forks, with `RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
    `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` set and one computing thread. A process group that is
    up when `fn` ends is destroyed. No process outlives the call.

    Args:
        fn: A top-level function; found again by its file and name, so a test module is fine.
        world_size: Number of ranks.
        *args: Picklable arguments of `fn`.
        timeout_s: Deadline of the whole call, including the start of the interpreters.
        env: Variables on top of this process's; one that acts on import makes each rank a new interpreter.
        init: `"gloo"` initialises torch's process group before `fn` is called.

    Raises:
        RankError: A rank failed; the error has the traceback of the first one, and its exception as cause.
        RankTimeoutError: The deadline passed.
        ValueError: `fn` is not a top-level function, or `world_size` is below 1.
    """
    if world_size < 1:
        raise ValueError(f"`world_size` is {world_size}; expected at least 1")
    task = describe_task(fn, args, init, timeout_s)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, held_port() as port:
        Path(folder, "task").write_bytes(pickle.dumps(task))
        ranks: list[Rank] = []
        try:
            for rank in range(world_size):
                ranks.append(
                    Rank(
                        rank,
                        Path(folder),
                        environment(rank, world_size, port.getsockname()[1], env),
                    )
                )
            return _wait(ranks, fn.__name__, timeout_s)
        finally:
            for running in ranks:
                running.kill()


class Rank:
    """A child process with its files and its process group."""

    def __init__(
        self,
        rank: int,
        folder: Path,
        env: dict[str, str],
        *,
        is_standing: bool = False,
    ):
        self.rank = rank
        self.result = folder / f"result-{rank}"
        self.log = folder / f"log-{rank}"
        arguments = [] if is_standing else [str(folder / "task"), str(self.result)]
        # The rank gets its own session, so that `kill` also reaches processes that `fn` started. Its standard
        # input closes when this process dies, which ends the rank.
        self.process: subprocess.Popen[bytes] | ForkedRank
        if (forked := fork_rank(rank, arguments, env=env, log=self.log)) is not None:
            self.process = forked
            return
        command = [sys.executable, "-m", "support.rank_main", *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )

    def give(self, task: Path, result: Path) -> None:
        """Start a task on a standing rank, whose outcome is read from `result` from now on."""
        self.result = result
        if self.process.stdin is None or self.process.poll() is not None:
            return  # `outcome` reports how the process ended
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{task}\t{result}\n".encode())
            self.process.stdin.flush()

    def outcome(self) -> Outcome | None:
        """Return the rank's outcome, or None while it runs; a rank that died without one has failed."""
        status = self.process.poll()
        if self.result.exists():
            outcome: Outcome = pickle.loads(self.result.read_bytes())
            return outcome
        if status is None:
            return None
        ending = (
            f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        )
        return Outcome(traceback=f"the process {ending} without a result", failed_at=time.time())

    def output(self) -> str:
        return self.log.read_bytes()[-KEPT_OUTPUT:].decode(errors="replace").strip()

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, number)

    def thread_count(self) -> int:
        """Return how many threads the process has; 1 where the system does not list them."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        return len(list(tasks.iterdir())) if tasks.exists() else 1

    def show_stacks(self, *, by: float) -> None:
        """Let `rank_main` append the stacks of all threads to the log, and wait until they are there."""
        before = self.log.stat().st_size
        self.signal(signal.SIGUSR1)
        written = before
        while (written == before or written != self.log.stat().st_size) and time.monotonic() < by:
            if self.process.poll() is not None:
                return  # it ended, or had no handler yet
            written = self.log.stat().st_size
            time.sleep(0.1)

    def end(self, *, by: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=max(by - time.monotonic(), 0))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=60)
        if self.process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()


def collect(ranks: list[Rank], name: str, *, timeout_s: float) -> list[Any]:
    """Return the results that the ranks write to their files, in the order of the ranks.

    Raises:
        RankError: A rank failed; the error is that of the first one.
        RankTimeoutError: A rank wrote no result within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    outcomes: dict[int, Outcome] = {}
    failed_by = None
    while len(outcomes) < len(ranks):
        for rank in ranks:
            if rank.rank not in outcomes and (outcome := rank.outcome()):
                outcomes[rank.rank] = outcome
                if outcome.failed_at and failed_by is None:
                    failed_by = time.monotonic() + FAREWELL_S
        if failed_by is not None and time.monotonic() > failed_by:
            break
        if time.monotonic() > deadline:
            raise _late(ranks, outcomes, name, timeout_s)
        time.sleep(POLL_S)
    failures = sorted((outcome.failed_at, rank) for rank, outcome in outcomes.items() if outcome.failed_at)
    if failures:
        for ended in outcomes:  # ranks that failed or returned may run their exit handlers
            ranks[ended].end(by=time.monotonic() + FAREWELL_S)
        error = outcomes[failures[0][1]].error
        skip_without_group(error)
        raise _failed(ranks, outcomes, name, [n for _, n in failures]) from error
    return [outcomes[rank.rank].value for rank in ranks]


def skip_without_group(error: BaseException | None) -> None:
    """Skip the test if the error says that a module of an optional group is not installed."""
    if isinstance(error, ModuleNotFoundError) and error.name in OPTIONAL_GROUPS:
        import pytest

        pytest.skip(f"needs `uv sync --group {error.name}`")


def _wait(ranks: list[Rank], name: str, timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    values = collect(ranks, name, timeout_s=timeout_s)
    for rank in ranks:
        # The result is written before the interpreter ends; a hang or crash after that is a failure.
        try:
            status = rank.process.wait(timeout=max(deadline - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            raise _late(ranks, {}, name, timeout_s) from None
        if status != 0:
            raise RankError(
                f"`{name}` returned on rank {rank.rank}, whose process then ended with status {status}\n"
                f"{rank.output()}",
                rank=rank.rank,
            )
    return values


def _failed(ranks: list[Rank], outcomes: dict[int, Outcome], name: str, failed: list[int]) -> RankError:
    first = failed[0]
    lines = [f"`{name}` failed on rank {first} of {len(ranks)}", outcomes[first].traceback.rstrip()]
    if output := ranks[first].output():
        lines.append(f"--- output of rank {first}\n{output}")
    for rank in failed[1:]:
        # Below the message stands the code of the error's class.
        told = outcomes[rank].traceback.rstrip().splitlines()
        last = next(line for line in reversed(told) if not line.startswith("[HKT-"))
        lines.append(f"--- then rank {rank}: {last}")
    return RankError("\n".join(lines), rank=first)


def _late(ranks: list[Rank], outcomes: dict[int, Outcome], name: str, timeout_s: float) -> RankTimeoutError:
    late = [rank for rank in ranks if rank.rank not in outcomes]
    for rank in late:
        rank.show_stacks(by=time.monotonic() + STACKS_S)
    lines = [
        f"`{name}` was not done after {timeout_s} s on rank(s) {[rank.rank for rank in late]} of {len(ranks)}"
    ]
    lines += [f"--- rank {rank.rank}\n{rank.output()}" for rank in late]
    return RankTimeoutError("\n".join(lines), rank=late[0].rank)


def describe_task(
    fn: Callable[..., Any], args: tuple[Any, ...], init: str | None, timeout_s: float
) -> dict[str, Any]:
    name = getattr(fn, "__qualname__", "")
    if not inspect.isfunction(fn) or "<" in name:
        raise ValueError(
            f"`fn` is {fn!r}; expected a top-level function, which another process can find by its name"
        )
    file = inspect.getsourcefile(fn)
    if file is None:
        raise ValueError(f"`fn` is {fn!r}, which has no source file; expected a function of a module")
    return {
        "file": os.path.abspath(file),
        "module": fn.__module__,
        "qualname": name,
        "path": sys.path,
        "init": init,
        "timeout_s": timeout_s,
        "args": pickle.dumps(args),
    }


def environment(rank: int, world_size: int, port: int, env: Mapping[str, str] | None) -> dict[str, str]:
    support = str(Path(__file__).resolve().parents[1])
    paths = [support, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **(env or {}),
    }
    if sys.platform == "linux":
        # Otherwise gloo resolves this host's name, which fails in some containers.
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return variables


def held_port() -> socket.socket:
    """Return a socket that reserves a port for rank 0's store; it never listens, so the store can bind it."""
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder
