"""The start of ranks by forks of a prepared process, or cold where a fork would not be the same."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hocket.dist.launch.warm import main_module
from hocket.dist.launch.warm.fork_safety import ImportRecord
from hocket.dist.launch.warm.rank_server import (
    MESSAGE_BYTES,
    PRELOADED,
    PRELOADED_FOR,
    Server,
    begin_record,
    own_path_entry,
)
from hocket.dist.ranks import rank_command

_PR_SET_CHILD_SUBREAPER = 36  # of `prctl`, in linux/prctl.h
_FAREWELL_S = 1.0
_UNREACHABLE = "the prepared process has ended"


class ColdStartError(RuntimeError):
    """A rank has to be started as a new interpreter; the message is the reason."""


class WarmProcess:
    """A forked rank, with the methods of `subprocess.Popen` that torch's agent uses.

    Attributes:
        pid: Its process id; it is a child of this process.
        returncode: As that of `Popen`, None while it runs.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end and return its exit code.

        Raises:
            subprocess.TimeoutExpired: It runs longer than `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        pause_s = 0.0005
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank, process {self.pid}", timeout or 0)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
        assert self.returncode is not None
        return self.returncode


class RankServer:
    """The client of a `rank_server`: starts programs of Python by forks of it. Linux only.

    Args:
        channel: The socket to the server.
        process: The server, to be ended by `close`.
    """

    def __init__(self, channel: socket.socket, process: WarmProcess | subprocess.Popen[bytes]) -> None:
        self._channel = channel
        self._process = process
        self._folders: list[str] = []

    @classmethod
    def spawn(cls, env: Mapping[str, str]) -> RankServer:
        """Start a new interpreter as the server, with the variables that its ranks have on import."""
        own_end, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other_end:
            command = [sys.executable, "-m", "hocket.dist.launch.warm.rank_server", str(other_end.fileno())]
            process = subprocess.Popen(
                command, env=dict(env), stdin=subprocess.DEVNULL, pass_fds=[other_end.fileno()]
            )
        return cls(own_end, process)

    def prepare(self, preload: Sequence[str] = PRELOADED) -> None:
        """Have the server import modules; returns at once."""
        self._channel.send(pickle.dumps({"preload": list(preload)}))

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._process.pid

    def is_running(self) -> bool:
        """Return whether the server can fork."""
        return self._process.poll() is None

    def fileno(self) -> int:
        """Return the number of the socket."""
        return self._channel.fileno()

    def start(
        self, arguments: Sequence[str], *, env: Mapping[str, str], stdin: int, stdout: int, stderr: int
    ) -> WarmProcess:
        """Start `python -u ARGUMENTS` in a new session, and return once the process runs.

        Raises:
            ColdStartError: A fork would differ from a new interpreter, or the server has ended.
        """
        request = {
            "arguments": list(arguments),
            "env": dict(env),
            "cwd": os.getcwd(),
            "client": os.getpid(),
        }
        prctl = ctypes.CDLL(None).prctl
        if prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
            raise ColdStartError("this system does not pass forked processes to the launcher")
        try:
            socket.send_fds(self._channel, [pickle.dumps(request)], [stdin, stdout, stderr])
            message = self._channel.recv(MESSAGE_BYTES)
        except OSError as error:
            raise ColdStartError(f"{_UNREACHABLE} ({error})") from error
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if not message:
            raise ColdStartError(_UNREACHABLE)
        answer = pickle.loads(message)
        self._folders = answer["folders"]
        if "problem" in answer:
            raise ColdStartError(answer["problem"])
        return WarmProcess(answer["pid"])

    def close(self) -> None:
        """End the server, and remove the temporary folders of its imports; what it has started runs on."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


def fork_server(imported: str) -> RankServer | str:
    """Fork this process, which is the launcher's own and has just begun, as a server of its ranks.

    Args:
        imported: A module of the launcher that imports torch; the fork has it without a second import.

    Returns:
        The client; a reason for cold starts where this process is not as one that starts a rank.
    """
    if sys.platform != "linux":
        return "the system is not Linux"
    if options := _interpreter_options():
        return f"the launcher runs with the options {options} of Python, and ranks run without"
    record, ImportRecord.inherited = ImportRecord.inherited, None
    has_imported = record is None and ("torch" in sys.modules or "numpy" in sys.modules)
    if threading.active_count() > 1 or has_imported:
        return "the program that calls the launcher has imported torch or started a thread"
    own_entry = own_path_entry()
    if record is None:
        record = begin_record()
    else:
        record.resume()
    importlib.import_module(imported)
    launcher = os.getpid()
    own_end, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sys.stdout.flush()
    sys.stderr.flush()
    if (pid := os.fork()) == 0:
        own_end.close()
        rank_command.end_with_parent(launcher)
        Server(other_end, record, own_entry).serve()
    other_end.close()
    record.stop()
    return RankServer(own_end, WarmProcess(pid))


def _interpreter_options() -> list[str]:
    options: list[str] = []
    for word in sys.orig_argv[1:]:
        if not word.startswith("-") or word[:2] in ("-m", "-c"):
            break
        options += [word] if word != "-u" else []
    return options


class Starter:
    """The start of each rank for torch's agent: warm if possible, else cold, with the reason said once.

    Args:
        server: The server of ranks, or a reason for cold starts.
        preload: Modules of `--preload`, imported on top of those that a training needs.
    """

    def __init__(self, server: RankServer | str, preload: Sequence[str] = ()) -> None:
        self._server: RankServer | None = None if isinstance(server, str) else server
        self._reason = server if isinstance(server, str) else ""
        self._preload = preload
        self._is_prepared = False
        self._is_said = False

    def prepare(self, command: Sequence[str]) -> None:
        """Have the server import what ranks with this command need, while the launcher goes on."""
        if self._server is None or self._is_prepared:
            return
        program = self._program(command)
        self._is_prepared = True
        if program is None:
            self._reason = f"it runs `{shlex.join(command)}`"
            self.close()
            return
        source = main_module.find_source(main_module.own_arguments(program))
        script = main_module.Program(b"import torch" if source is None else source.read_bytes())
        # A script of the standard library alone is not kept waiting for torch's compiler.
        needs_torch = program[0] == "-m" or not script.imports <= sys.stdlib_module_names
        known = script.imports | script.names
        more = [name for name, signs in PRELOADED_FOR.items() if not known.isdisjoint(signs)]
        self._server.prepare([*(PRELOADED if needs_torch else ()), *more, *self._preload])

    def start(
        self, command: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any
    ) -> WarmProcess | None:
        """Start a rank warm; return None if it has to start cold.

        Args:
            command: The command of a cold start, with `rank_command` before that of Python.
            env: The variables of the rank.
            stdout: The file to which it writes, None for that of this process.
            stderr: Same as `stdout`.
        """
        program = self._program(command)
        if self._server is not None and program is None:
            self._reason = f"it runs `{command[0]}`"
        elif self._server is not None and program is not None:
            try:
                return self._server.start(
                    program,
                    env=env,
                    stdin=0,
                    stdout=1 if stdout is None else stdout.fileno(),
                    stderr=2 if stderr is None else stderr.fileno(),
                )
            except ColdStartError as error:
                self._reason = str(error)
        if self._reason and not self._is_said:
            self._is_said = True
            text = f"hocket-launch: each rank imports torch by itself (a cold start): {self._reason}"
            print(text, file=sys.stderr, flush=True)
        return None

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _program(self, command: Sequence[str]) -> list[str] | None:
        """Return the arguments of `python -u`, None if the command runs something else."""
        prefix = [sys.executable, "-P", rank_command.__file__, sys.executable, "-u"]
        if list(command[: len(prefix)]) == prefix and len(command) > len(prefix):
            return list(command[len(prefix) :])
        return None


def _kill(process: Any) -> None:
    """Kill a rank, and what is left of its session once the rest has had time to end.

    Python's tracker of shared memory is in that session: it removes what the rank had made, and then ends.
    """
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.kill(process.pid, signal.SIGKILL)
        process.wait(_FAREWELL_S)
        deadline = time.monotonic() + _FAREWELL_S
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def warm_ranks(starter: Starter) -> Iterator[None]:
    """Have torch's agent start its ranks, within the block, by a starter."""
    from torch.distributed.elastic.multiprocessing import api as torch_api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    api: Any = torch_api

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            return starter.start(args, env, self._stdout, self._stderr) or super()._popen(args, env)

        def close(self, death_sig: signal.Signals | None = None) -> None:
            if death_sig == signal.SIGKILL:
                _kill(self.proc)
            else:
                super().close(death_sig)

    own_handler = api.get_subprocess_handler
    api.get_subprocess_handler = Handler
    try:
        yield
    finally:
        api.get_subprocess_handler = own_handler
        starter.close()
