"""Starts ranks quickly: by forks of processes that have imported torch once, as `hocket-launch` does.

Importing torch takes a process at least three seconds of processor time. There are two servers, which hash
strings with different seeds, as the separately started interpreters of a job do.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support import leaks

if TYPE_CHECKING:
    from hocket.dist.launch.warm.starter import RankServer, WarmProcess

NUM_SERVERS = 2
OWN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_servers: dict[int, RankServer] = {}
_preloaded: list[str] = []


def preload(name: str) -> None:
    """Have servers that are started from now on import a module, too; unless it is not installed."""
    if name not in _preloaded and importlib.util.find_spec(name.partition(".")[0]) is not None:
        _preloaded.append(name)


def server_number(rank: int) -> int:
    """Return the number of the server of a rank; ranks whose numbers differ in one bit have different ones.

    They are the pairs that share data, matrices or positions on two, four and eight ranks.
    """
    return rank.bit_count() % NUM_SERVERS


class ForkedRank:
    """A process started by a `RankServer`, with the methods of `subprocess.Popen` that `Rank` uses."""

    def __init__(self, process: WarmProcess, stdin: Any) -> None:
        self.pid = process.pid
        self.poll = process.poll
        self.wait = process.wait
        self.stdin = stdin


def fork_rank(rank: int, arguments: list[str], *, env: Mapping[str, str], log: Path) -> ForkedRank | None:
    """Start `support.rank_main` with the arguments in a new session, and return when the session exists.

    Returns:
        None if the rank needs an interpreter of its own.
    """
    stdin, stdin_writer = os.pipe()
    try:
        with log.open("wb") as output:
            files = (stdin, output.fileno(), output.fileno())
            process = fork(server_number(rank), ["-m", "support.rank_main", *arguments], env=env, files=files)
    finally:
        os.close(stdin)
    if process is None:
        os.close(stdin_writer)
        return None
    return ForkedRank(process, os.fdopen(stdin_writer, "wb"))


def fork(
    number: int,
    arguments: list[str],
    *,
    env: Mapping[str, str],
    files: tuple[int, int, int],
    own: Collection[str] = (),
) -> WarmProcess | None:
    """Start `python -u ARGUMENTS` by a fork of a server, in a new session.

    Args:
        number: Number of the server.
        arguments: A script, or `-m` and a module, and its own arguments.
        env: The variables of the process.
        files: Its standard input, output and error.
        own: Names of variables that differ between its processes, on top of those of a rank.

    Returns:
        None if the program needs an interpreter of its own.
    """
    if sys.platform != "linux":
        return None
    try:
        from hocket.dist.launch.warm.rank_server import PRELOADED
        from hocket.dist.launch.warm.starter import ColdStartError, RankServer
    except ImportError:  # a test environment may lack the package
        return None
    # Torch reads pytest's variable of the present test on import.
    env = {name: value for name, value in env.items() if name != "PYTEST_CURRENT_TEST"}
    server = _servers.get(number)
    if server is None or not server.is_running():
        # An import that copies all variables would read those that differ between jobs.
        varying = {*OWN_VARIABLES, "GLOO_SOCKET_IFNAME", *own}
        shared = {name: value for name, value in env.items() if name not in varying}
        server = _servers[number] = RankServer.spawn(shared)
        leaks.keep_process(server.pid)
        leaks.keep_file(server.fileno())
        server.prepare([*PRELOADED, "hocket.dist.launch.command", *_preloaded])
    stdin, stdout, stderr = files
    try:
        return server.start(arguments, env=env, stdin=stdin, stdout=stdout, stderr=stderr)
    except ColdStartError:
        return None
