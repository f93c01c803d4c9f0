"""The end of a process whose threads must not ask for the interpreter's lock once the interpreter ends."""

import atexit
import contextlib
import ctypes
import gc
import importlib.machinery
import os
import sys
import sysconfig
import threading
import types
from _io import _IOBase
from collections.abc import Collection
from types import TracebackType
from typing import Any, NoReturn

_CLOSED = (("gzip", "GzipFile"), ("bz2", "BZ2File"), ("lzma", "LZMAFile"), ("zipfile", "ZipFile"))
"""Classes of files in Python, by module: their last bytes are written when they are closed."""


def end_promptly_after_error() -> None:
    """Have this process end with exit code 1 after an uncaught error, although collectives are in progress.

    When the deadline of a collective passes or its connection is lost, gloo's threads release tensors, for
    which they need the interpreter's lock. A thread that requests it once the interpreter shuts down ends the
    process with SIGABRT ("terminate called without an active exception",
    https://github.com/pytorch/pytorch/issues/190489), and the launcher reports exit code 134 in place of 1.
    The traceback is printed and threads, exit handlers and files end as usual, also those of gzip, bz2, lzma
    and zipfile. Finalizers run for what the main program and the frames of the error hold: they write the
    last bytes of files such as pyarrow's. Others do not run.

    Call it in a rank. Safe to call again.
    """
    if getattr(sys.excepthook, "ends_promptly", False):
        return
    previous_hook, pid = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous_hook(kind, error, trace)
        # A program that only prints an error by the hook goes on. The interpreter notes the one that ends it.
        is_uncaught = getattr(sys, "last_value", None) is error
        is_main = threading.current_thread() is threading.main_thread() and os.getpid() == pid
        # With `python -i` the interpreter goes on. It ends by the signal itself after Ctrl-C.
        goes_on = sys.flags.inspect or hasattr(sys, "ps1") or kind is KeyboardInterrupt
        if is_main and is_uncaught and not goes_on:
            atexit.unregister(_end_after_error)
            atexit.register(_end_after_error)  # so late that it is the first to run

    hook.ends_promptly = True  # type: ignore[attr-defined]
    hook.is_hocket = getattr(previous_hook, "is_hocket", False)  # type: ignore[attr-defined]
    sys.excepthook = hook


def _end_after_error() -> None:
    atexit.unregister(_end_after_error)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # Of files that refer to themselves, as those of gzip do in Python 3.13.0, the collector may close the one
    # below first, and the compressed one could not write its last bytes.
    files = _compressed_files()
    _release_program()
    while files:
        with contextlib.suppress(Exception):
            files.pop().close()
    gc.collect()  # the files below may have finalizers
    end(1)


def _release_program() -> None:
    """Release the frames of the error and the objects of the main program, so that their finalizers run.

    Threads may still have the interpreter's lock. What finalizers use stays: functions, classes, modules and
    values that refer to nothing.
    """
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        sys.__dict__.pop(name, None)
    own = vars(sys.modules["__main__"])
    for name, value in list(own.items()):
        is_used = isinstance(value, (types.ModuleType, types.FunctionType, type)) or name.startswith("__")
        if gc.is_tracked(value) and not is_used:
            del own[name]
        del value
    gc.collect()


def end(code: int, shared: Collection[str] | None = None) -> NoReturn:
    """End this process as the interpreter does, but do not take apart what it has imported.

    That would take a second of processor time with torch, and copy its memory where the process was forked.
    Threads are joined, exit handlers run, and files are written. The interpreter ends in full where the
    difference would be seen: with an object that has a finalizer, a generator that has not ended, a daemon
    thread, a GPU in use, a library in C that may write when its objects are released, or output that the
    interpreter reports as lost.

    Args:
        code: The exit code.
        shared: Names of the modules that are not the program's own; None for a program of Hocket's, which has
            nothing left to write, and whose daemon threads may wait in torch's store. A thread that asks for
            the interpreter's lock while the interpreter ends would abort the process.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads, and ends the pools of futures
    atexit._run_exitfuncs()
    if not _flush_streams() or (
        shared is not None
        and (threading.active_count() > 1 or own_extension(shared) or _has_finalizers() or _uses_gpu())
    ):
        gc.unfreeze()
        sys.exit(code)
    _flush_files()
    ctypes.CDLL(None).fflush(None)
    # Without C's exit handlers: those of libraries expect that the interpreter has ended.
    os._exit(code)


def own_extension(shared: Collection[str]) -> str | None:
    """Return an extension module that is neither Python's own nor in `shared`, None if there is none.

    Its objects may have finalizers in C: h5py's write what the file has in memory.
    """
    standard = sysconfig.get_path("platstdlib")
    for name, module in sys.modules.copy().items():
        file = getattr(module, "__file__", None) or ""
        if name not in shared and file.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)):
            folder = os.path.dirname(file)
            if not (folder.startswith(standard) and "site-packages" not in folder):
                return name
    return None


def _uses_gpu() -> bool:
    """Return whether CUDA has been initialised: its profilers write what they have in C's exit handlers."""
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())


def _flush_streams() -> bool:
    """Flush standard output and error; return whether they took everything."""
    try:
        for stream in (sys.stdout, sys.stderr):
            # A program's own stream may have neither.
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
    except Exception:  # noqa: BLE001 - the interpreter reports any
        return False
    return True


def _has_finalizers() -> bool:
    """Return whether an object of the program would run Python code when it is released.

    Those that a fork server has frozen are not among them.
    """
    kinds = {type(each) for each in gc.get_objects()}
    if not kinds.isdisjoint((types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
        return True
    return any(
        isinstance(getattr(kind, "__del__", None), types.FunctionType)
        # A file in Python, such as gzip's, writes its last bytes when it is closed, not when it is flushed.
        or (issubclass(kind, _IOBase) and kind.__module__ not in ("_io", "io"))
        for kind in kinds
    )


def _flush_files() -> None:
    """Flush all files; close those of Python that write their last bytes when they are closed."""
    files = [each for each in gc.get_objects() if issubclass(type(each), _IOBase)]
    files = [file for file in files if file not in (sys.stdout, sys.stderr)]
    to_close = _compressed_files()
    # A closed file writes to one below it, which is flushed again.
    ends = [*(file.flush for file in files), *(file.close for file in to_close)]
    for end_file in [*ends, *(file.flush for file in files if to_close)]:
        with contextlib.suppress(Exception):
            end_file()


def _compressed_files() -> list[Any]:
    """Return the files of the classes of `_CLOSED`."""
    kinds = tuple(getattr(sys.modules[name], kind) for name, kind in _CLOSED if name in sys.modules)
    return [each for each in gc.get_objects() if issubclass(type(each), kinds)]
