"""A process that has imported torch and Hocket once, and forks ranks from then on.

It is a fork of the launcher, made before the launcher itself has a thread or a connection, and ends with it.
Each rank becomes a child of the launcher, as if the launcher had started it. `python -m
hocket.dist.launch.warm.rank_server FD` serves another program, at the other end of a socket. A launcher that
such a program starts is a fork, too, and so is the server of its ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from hocket.dist.launch.warm import main_module
from hocket.dist.launch.warm.fork_safety import (
    ImportRecord,
    RecordingEnviron,
    is_read_on_import,
    shadowed_module,
)
from hocket.dist.ranks.rank_command import end_with_launcher, expand

MESSAGE_BYTES = 1 << 20
PRELOADED = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch._dynamo",
    "rich.console",
    "rich.table",
    "hocket.trainer",
    "hocket.dist.provider",
    "hocket.ckpt.torch",
)
"""The modules that a rank of a training imports before its first step; the first AdamW imports `_dynamo`."""
PRELOADED_FOR = {
    "torchmetrics": ("torchmetrics", "ComposerClassifier", "HuggingFaceModel"),
    "torchvision": ("torchvision",),
    "transformers": ("transformers", "HuggingFaceModel"),
}
"""Modules that take seconds to import, and the imports of a script by which it needs them."""

LAUNCHER = ["-m", "hocket.dist.launch"]
"""The arguments of Python that run the launcher."""

_ADOPTION_S = 10.0
# Sent by terminals and schedulers to every process of a job: the server ignores them, its ranks do not.
_SHIELDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class Server:
    """The state of the process that forks.

    Args:
        channel: The socket to the program for which it forks.
        record: The record of the imports of this process, begun before them.
        own_path: The entry of `sys.path` that a rank does not have, None if there is none.
    """

    def __init__(self, channel: socket.socket, record: ImportRecord, own_path: str | None) -> None:
        self._channel = channel
        self._record = record
        self._own_path = own_path
        self._problem: str | None = None
        self._handlers: dict[int, Any] = {}
        self._folders: list[str] = []

    def serve(self) -> NoReturn:
        """Import, then fork for each request until the channel closes; in a fork, run the rank's program."""
        os.setsid()
        self._record.close_inherited_files(self._channel.fileno())
        self._shield()
        self._import(self._receive()[0]["preload"])
        while True:
            request, files = self._receive()
            problem = self._problem or self._check(request, files)
            if problem is None and self._fork():
                # No exception is handled above this call, so those of the program reach the interpreter.
                self._become_rank(request, files)
            if problem is not None:
                self._channel.send(pickle.dumps({"problem": problem, "folders": self._folders}))
            for number in files:
                os.close(number)

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        message, files, *_ = socket.recv_fds(self._channel, MESSAGE_BYTES, 3)
        if not message:
            os._exit(0)
        return pickle.loads(message), files

    def _shield(self) -> None:
        """Ignore the signals that are sent to whole jobs, and keep their handlers for the ranks."""
        for number in _SHIELDED:
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN or number not in self._handlers:
                self._handlers[number] = handler
                signal.signal(number, signal.SIG_IGN)

    def _import(self, names: list[str]) -> None:
        gc.disable()  # imports make half a million objects, hardly any of them garbage
        for name in names:
            known_reads = set(RecordingEnviron.reads)
            try:
                with self._keep_folders():
                    importlib.import_module(name)
            except BaseException as error:  # noqa: BLE001 - any failure of an import is one of the rank as well
                if name in (*PRELOADED, *PRELOADED_FOR) and isinstance(error, ModuleNotFoundError):
                    continue  # not every environment has every package of Hocket
                self._problem = f"`import {name}` failed with {type(error).__name__}: {error}"
                break
            if name == "torchmetrics" and "LOCAL_RANK" not in known_reads:
                RecordingEnviron.reads.discard("LOCAL_RANK")  # `_renew` sets what came of it
            if (state := self._record.unsafe_state([self._channel.fileno()])) is not None:
                self._problem = f"{state} after `import {name}`"
                break
            if self._record.seed is None and "torch" in sys.modules:
                self._record.seed = sys.modules["torch"].initial_seed()
        self._record.stop()
        # The collections of a rank, which took it a second at its end alone, skip what is frozen here, and do
        # not copy the memory that the ranks share.
        gc.collect()
        gc.freeze()
        gc.enable()
        self._shield()  # an import may have set a handler
        if self._own_path is not None and self._own_path in sys.path[:1]:
            del sys.path[0]

    @contextlib.contextmanager
    def _keep_folders(self) -> Iterator[None]:
        """Keep the temporary folders of imports, which all ranks share, until the client ends it.

        Matplotlib makes one where the home cannot be written to, and each rank would remove it at its exit.
        """
        register = atexit.register

        def record(function: Any, /, *args: Any, **options: Any) -> Any:
            if function is shutil.rmtree and args and atexit.register is record:
                self._folders.append(os.path.abspath(args[0]))
                return function
            return register(function, *args, **options)

        atexit.register = record
        try:
            yield
        finally:
            atexit.register = register

    def _check(self, request: Mapping[str, Any], files: list[int]) -> str | None:
        """Return the reason why a cold start would differ from a fork, None if there is none."""
        started = request["arguments"]
        arguments = main_module.own_arguments(started)
        try:
            os.chdir(request["cwd"])
            source = main_module.find_source(arguments)
            program = main_module.Program(b"" if source is None else source.read_bytes())
        except OSError as error:
            return f"{error}"
        if source is None and arguments[0] != "-m":
            return f"`{arguments[0]}` is no source file of Python"
        for name in sorted(program.variables):
            if is_read_on_import(name):
                return f"`{arguments[0]}` sets `{name}`, which acts on import"
        folders = {main_module.first_path_entry(words) for words in (started, arguments)}
        shadowed = (shadowed_module(folder, self._own_path) for folder in sorted(folders))
        return (
            self._record.unlike_variable(request["env"])
            or next(filter(None, shadowed), None)
            or self._record.unsafe_state([self._channel.fileno(), *files])
        )

    def _fork(self) -> bool:
        """Fork a rank, and return True in it.

        A process between this one and the rank ends at once, so that the rank passes to the client.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SHIELDED)
        if (middle := os.fork()) == 0:
            if os.fork() == 0:
                return True
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SHIELDED)
        os.waitpid(middle, 0)
        return False

    def _become_rank(self, request: dict[str, Any], files: list[int]) -> NoReturn:
        """Take over the session, files, variables and handlers of a new process, and run its program."""
        os.setsid()
        deadline = time.monotonic() + _ADOPTION_S
        while os.getppid() != request["client"]:
            if time.monotonic() > deadline:
                os._exit(70)
            time.sleep(0.0005)
        for target, number in enumerate(files):
            os.dup2(number, target)
            os.close(number)
        os.environ.clear()
        added = {name: value for name, value in self._record.changes.items() if value is not None}
        os.environ.update({**request["env"], **added})
        end_with_launcher()
        self._renew()
        for number, handler in self._handlers.items():
            if handler is not None:
                signal.signal(number, handler)
        self._channel.send(pickle.dumps({"pid": os.getpid(), "folders": self._folders}))
        self._channel.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SHIELDED)
        ImportRecord.inherited = self._record if request["arguments"][:2] == LAUNCHER else None
        main_module.run([expand(word) for word in request["arguments"]])

    def _renew(self) -> None:
        """Set anew what imports took from this process's place, or seeded; `random` does so by itself."""
        if (prints := sys.modules.get("torchmetrics.utilities.prints")) is not None:
            prints.rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", "0"))
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed()
        # Torch seeds its generator on first use. An import that has set another seed has done so in a rank.
        seed = self._record.seed
        if seed is not None and (torch := sys.modules["torch"]).initial_seed() == seed:
            self._record.seed = torch.default_generator.seed()
        if (process := sys.modules.get("multiprocessing.process")) is not None:
            process.current_process().authkey = os.urandom(32)


def begin_record() -> ImportRecord:
    """Begin the record of the imports of this process, and import numpy, whose library has idle threads."""
    record = ImportRecord()
    with contextlib.suppress(ImportError):
        import numpy as np  # noqa: F401
    record.ignore_threads()
    return record


def own_path_entry() -> str | None:
    """Return the entry of `sys.path` that stands for this process's own program."""
    return None if sys.flags.safe_path else sys.path[0]


if __name__ == "__main__":
    own_entry = own_path_entry()
    Server(socket.socket(fileno=int(sys.argv[1])), begin_record(), own_entry).serve()
