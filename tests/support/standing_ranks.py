"""Ranks that several tests share, because importing torch takes each process seconds."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support import leaks
from support.ranks import Rank, collect, describe_task, environment, held_port

START_TIMEOUT_S = 120
"""Timeout of the start, and of the collectives of the default group."""

MOST_THREADS = 30
"""Threads of a rank, about five groups' worth, beyond which `renew` starts the ranks anew."""

MOST_THREADS_OF_ALL = 800
"""Threads of all ranks together beyond which `run` does the same, within a module.

Eight ranks of 270 threads each used both cores of a machine by looking for work.
"""


class StandingRanks:
    """Processes with a gloo group that run one function after the other.

    For functions that do not change the process or its default group; a function that ends the group, changes
    the environment or is meant to fail belongs in `run_ranks`. After a failure the processes are restarted.
    """

    def __init__(self, world_size: int, folder: Path) -> None:
        self.world_size = world_size
        self._folder = folder
        self._numbers = itertools.count()
        self._ranks: list[Rank] = []

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
        """Call `fn(*args)` on every rank and return the results in the order of the ranks.

        Args:
            fn: A top-level function.
            *args: Picklable arguments of `fn`.
            timeout_s: Deadline of this call.

        Raises:
            RankError: A rank failed; the error has the traceback of the first one.
            RankTimeoutError: The deadline passed.
        """
        try:
            results = self._run(fn, args, timeout_s)
            self.renew(MOST_THREADS_OF_ALL // self.world_size)
            return results
        except BaseException:
            # Restart now, because processes started during the next test would count as its leaks.
            self.close()
            self.start()
            raise

    def renew(self, most_threads: int = MOST_THREADS) -> None:
        """Start the processes anew if they have gathered threads; for the time between tests.

        torch's caches of sharding decisions keep the groups of all meshes that they saw, and each gloo group
        has a thread that looks for work a hundred times a second: with 80 groups each rank used a minute of
        processor time.
        """
        if max(rank.thread_count() for rank in self._ranks) > most_threads:
            self.close()
            self.start()

    def close(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            rank.kill()
            leaks.release_process(rank.process.pid)
        self._ranks = []

    def start(self) -> None:
        """Start the processes and return when their group is up."""
        folder = self._folder / f"start-{next(self._numbers)}"
        folder.mkdir()
        with held_port() as port:
            for rank in range(self.world_size):
                variables = environment(rank, self.world_size, port.getsockname()[1], None)
                self._ranks.append(standing := Rank(rank, folder, variables, is_standing=True))
                # `run` starts the processes anew within a test.
                leaks.keep_process(standing.process.pid)
                if standing.process.stdin is not None:
                    leaks.keep_file(standing.process.stdin.fileno())
            # The port is held until rank 0 listens there.
            self._run(_join, (), START_TIMEOUT_S)

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        number = next(self._numbers)
        task = self._folder / f"task-{number}"
        task.write_bytes(pickle.dumps(describe_task(fn, args, "gloo", START_TIMEOUT_S)))
        for rank in self._ranks:
            rank.give(task, self._folder / f"result-{number}-{rank.rank}")
        return collect(self._ranks, fn.__name__, timeout_s=timeout_s)


def _join() -> None:
    """Do nothing; when this function runs, the process group exists."""


@contextlib.contextmanager
def standing_ranks(world_size: int) -> Iterator[StandingRanks]:
    """Yield standing ranks and end their processes at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = StandingRanks(world_size, Path(folder))
        try:
            ranks.start()
            yield ranks
        finally:
            ranks.close()
