"""One rank of `support.ranks.run_ranks`: `python -m support.rank_main TASK RESULT`."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import operator
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from support.ranks import Outcome


def main(task_path: str, result_path: str) -> None:
    """Run the task and leave its `Outcome` in a file; the file appears whole or not at all."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_parent, name="hocket-parent-watch", daemon=True).start()
    task = pickle.loads(Path(task_path).read_bytes())
    outcome = _run(task)
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)  # an exception with its own __init__ may pickle and not come back
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

            dist.init_process_group(task["init"], timeout=timedelta(seconds=task["timeout_s"]))
        return Outcome(value=fn(*args))
    except BaseException as error:  # noqa: BLE001 - an exit or interrupt of `fn` is its failure as well
        return _failure(error)
    finally:
        _destroy_group()


def _failure(error: BaseException) -> Outcome:
    return Outcome(error=error, traceback=traceback.format_exc(), failed_at=time.time())


def _find(file: str, name: str, qualname: str) -> Callable[..., Any]:
    fn: Callable[..., Any] = operator.attrgetter(qualname)(_load(file, name))
    return fn


def _load(file: str, name: str) -> ModuleType:
    """Import `file` under the name that the parent knows it by, so that pickle finds its classes."""
    if name != "__main__" and _is_importable(file, name):
        return importlib.import_module(name)
    # A test module, which pytest loads from its file, or a script, whose main part must not run again.
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


def _end_with_parent() -> None:
    # Nobody writes to this pipe: it ends when the parent does, however that came to pass.
    # Not `sys.stdin`, whose lock would be held while the interpreter shuts down.
    os.read(0, 1)
    os._exit(70)


if __name__ == "__main__":
    main(*sys.argv[1:])
