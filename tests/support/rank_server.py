"""Starts ranks quickly: `python -m support.rank_server FD` imports torch once and forks a process per rank.

Importing torch takes a process at least three seconds of processor time. Each rank number has a server of its
own, so that the ranks of a job hash strings with different seeds, as separately started interpreters do.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support import leaks

_IMPORTED = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "hocket.trainer",
)
_MESSAGE_BYTES = 1 << 20
_START_TIMEOUT_S = 120.0
# Prefixes of variables that Python, torch or a package of Hocket may read on import.
_READ_AT_IMPORT = ("CUDA_", "HOCKET_", "LD_", "MKL_", "OMP_", "PYTHON", "TORCH_")

_servers: dict[int, RankServer] = {}


class RankServer:
    """The server of one rank number, for the whole test run.

    Args:
        env: The server's environment variables; `fork` gets those of each rank.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = _read_at_import(env)
        self._channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(_START_TIMEOUT_S)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.rank_server", str(other.fileno())],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        self._statuses: dict[int, int] = {}
        leaks.keep_process(self._process.pid)
        leaks.keep_file(self._channel.fileno())

    def fits(self, env: Mapping[str, str]) -> bool:
        """Return whether importing with these variables would have the same effect as in the server."""
        return self._process.poll() is None and _read_at_import(env) == self._env

    def fork(self, arguments: list[str], *, env: Mapping[str, str], log: Path) -> ForkedRank:
        """Start `rank_main` with the arguments in a new session, and return when the session exists."""
        stdin, stdin_writer = os.pipe()
        request = {"arguments": arguments, "env": dict(env), "cwd": os.getcwd()}
        with log.open("wb") as output:
            try:
                socket.send_fds(self._channel, [pickle.dumps(request)], [stdin, output.fileno()])
            finally:
                os.close(stdin)
        while (pid := self._receive()) is None:
            pass
        return ForkedRank(self, pid, os.fdopen(stdin_writer, "wb"))

    def status_of(self, pid: int) -> int | None:
        """Return a process's status in the form of `subprocess.Popen.returncode`, or None while it runs."""
        while pid not in self._statuses and select.select([self._channel], [], [], 0)[0]:
            self._receive()
        return self._statuses.get(pid)

    def _receive(self) -> int | None:
        """Receive a message; return the process if the message reports a started one."""
        message = self._channel.recv(_MESSAGE_BYTES)
        if not message:
            raise RuntimeError("the server that starts ranks has ended; its output is above")
        pid, status = pickle.loads(message)
        if status is None:
            self._statuses.pop(pid, None)
            return int(pid)
        self._statuses[pid] = status
        return None


class ForkedRank:
    """A process started by a `RankServer`, with the methods of `subprocess.Popen` that `Rank` uses."""

    def __init__(self, server: RankServer, pid: int, stdin: Any) -> None:
        self._server = server
        self.pid = pid
        self.stdin = stdin

    def poll(self) -> int | None:
        """Return the status, or None while the process runs."""
        return self._server.status_of(self.pid)

    def wait(self, timeout: float) -> int:
        """Wait for the process to end and return its status.

        Raises:
            subprocess.TimeoutExpired: The process runs longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("support.rank_main", timeout)
            time.sleep(0.005)
        return status


def server_of(rank: int, env: Mapping[str, str]) -> RankServer | None:
    """Return the server of a rank number, or None if the rank needs an interpreter of its own."""
    server = _servers.get(rank)
    if server is None:
        server = _servers[rank] = RankServer(env)
    return server if server.fits(env) else None


def _read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if name.startswith(_READ_AT_IMPORT) and not name.startswith(leaks.FREE_VARIABLES)
    }


def serve(channel: socket.socket) -> list[str]:
    """Fork for each request until the channel closes; the forked process returns the request's arguments."""
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):  # a test environment may lack one
            importlib.import_module(name)
    wakeup_reader, wakeup_writer = os.pipe()
    os.set_blocking(wakeup_writer, False)
    signal.set_wakeup_fd(wakeup_writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select([channel, wakeup_reader], [], [])[0]
        if wakeup_reader in ready:
            os.read(wakeup_reader, 4096)
            _report_ended(channel)
        if channel not in ready:
            continue
        message, files, *_ = socket.recv_fds(channel, _MESSAGE_BYTES, 2)
        if not message:
            os._exit(0)
        start_reader, start_writer = os.pipe()
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            channel.close()
            for number in (wakeup_reader, wakeup_writer, start_reader):
                os.close(number)
            return _become_rank(pickle.loads(message), files, start_writer)
        for number in (*files, start_writer):
            os.close(number)
        # The receiver of the message may end the process's session, so the session must exist by then.
        os.read(start_reader, 1)
        os.close(start_reader)
        channel.send(pickle.dumps((pid, None)))


def _report_ended(channel: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            channel.send(pickle.dumps((ended[0], os.waitstatus_to_exitcode(ended[1]))))


def _become_rank(request: dict[str, Any], files: list[int], start_writer: int) -> list[str]:
    """Take over the session, the files, the variables and the folder of a new process."""
    os.setsid()
    os.close(start_writer)
    stdin, log = files
    for number, target in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(number, target)
    for number in files:
        os.close(number)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    arguments: list[str] = request["arguments"]
    return arguments


if __name__ == "__main__":
    rank_arguments = serve(socket.socket(fileno=int(sys.argv[1])))
    from support import rank_main

    rank_main.main(*rank_arguments)
