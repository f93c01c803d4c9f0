"""One rank: `python -m support.rank_main TASK RESULT` for `support.ranks.run_ranks`.

Without arguments it reads lines `TASK RESULT` from its standard input and runs one after the other, for
`support.standing_ranks`.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import importlib
import importlib.util
import operator
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from support.ranks import Outcome


def main(task_path: str, result_path: str) -> None:
    """Run the task and write its `Outcome` to a file, atomically."""
    _watch(_end_with_parent)
    task = pickle.loads(Path(task_path).read_bytes())
    try:
        outcome = _run(task)
    finally:
        _destroy_group()
    _leave(outcome, result_path)


def serve() -> None:
    """Run the tasks named on standard input until it closes; the process group persists between them."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    _watch(functools.partial(_read_lines, lines))
    while True:
        task_path, result_path = lines.get().split("\t")
        _leave(_run(pickle.loads(Path(task_path).read_bytes())), result_path)


def _watch(target: Callable[[], None]) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=target, name="hocket-parent-watch", daemon=True).start()


def _leave(outcome: Outcome, result_path: str) -> None:
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)  # an exception with its own `__init__` may pickle and not unpickle
    except Exception as error:  # noqa: BLE001 - whatever a result's own pickling raises is the rank's failure
        if not outcome.failed_at:
            outcome = _failure(error)
        data = pickle.dumps(Outcome(traceback=outcome.traceback, failed_at=outcome.failed_at))
    part = Path(f"{result_path}.part")
    part.write_bytes(data)
    part.rename(result_path)


def _run(task: dict[str, Any]) -> Outcome:
    try:
        sys.path.extend(entry for entry in task["path"] if entry not in sys.path)
        fn = _find(task["file"], task["module"], task["qualname"])
        args = pickle.loads(task["args"])
        if task["init"]:
            import torch.distributed as dist

            if dist.is_initialized():  # an earlier task of a standing rank has initialized it
                return Outcome(value=fn(*args))
            dist.init_process_group(task["init"], timeout=timedelta(seconds=task["timeout_s"]))
            dist.barrier()  # a rank that ends at once would close its connections while others open theirs
        return Outcome(value=fn(*args))
    except BaseException as error:  # noqa: BLE001 - an exit or interrupt of `fn` is its failure as well
        return _failure(error)


def _failure(error: BaseException) -> Outcome:
    return Outcome(error=error, traceback=traceback.format_exc(), failed_at=time.time())


def _find(file: str, name: str, qualname: str) -> Callable[..., Any]:
    fn: Callable[..., Any] = operator.attrgetter(qualname)(_load(file, name))
    return fn


def _load(file: str, name: str) -> ModuleType:
    """Import `file` under its name in the parent process, so that pickle finds its classes."""
    if name != "__main__" and _is_importable(file, name):
        return importlib.import_module(name)
    # A test module, which pytest loads from its file, or a script, whose main part must not run again.
    loaded = sys.modules.get("__mp_main__" if name == "__main__" else name)
    if loaded is not None and getattr(loaded, "__file__", None) == file:
        return loaded  # an earlier task of a standing rank has loaded it
    spec = importlib.util.spec_from_file_location("__mp_main__" if name == "__main__" else name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"`{file}` cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    for dots in range(1, name.count(".") + 1):
        parent = name.rsplit(".", dots)[0]
        sys.modules.setdefault(parent, ModuleType(parent))
    sys.modules[name] = sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _is_importable(file: str, name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except ImportError:
        return False
    return spec is not None and spec.origin is not None and os.path.samefile(spec.origin, file)


def _destroy_group() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        # Modules sharded by FSDP2 are in reference cycles and hold groups. A gloo thread that still has to
        # release a tensor at interpreter shutdown would end the process with SIGABRT (pytorch issue 190489).
        gc.collect()


def _end_with_parent() -> None:
    # No process writes to this pipe, so the read returns when the parent ends, even if it is killed.
    # `sys.stdin` is not used, because its lock would be held while the interpreter shuts down.
    os.read(0, 1)
    os._exit(70)


def _read_lines(lines: queue.SimpleQueue[str]) -> None:
    rest = b""
    while data := os.read(0, 4096):
        *complete, rest = (rest + data).split(b"\n")
        for line in complete:
            lines.put(line.decode())
    os._exit(0)


def _end_fork() -> NoReturn:
    """End as a fork of `multiprocessing` does: without taking apart what its parent has imported.

    That takes a second of processor time. Ranks that are interpreters of their own, and those of launchers,
    end in full.
    """
    threading._shutdown()  # joins threads, and ends the pools of futures
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        serve()
    main(*sys.argv[1:])
    if "hocket.dist.launch.warm.rank_server" in sys.modules:
        _end_fork()
