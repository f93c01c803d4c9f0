"""The state of a process that forks ranks: what its imports have read, started and opened.

A forked rank must be as one that imports everything itself. An import that started a thread or opened a file,
or that read a variable which has another value in the rank, makes the two differ. Each function here returns
such a difference in words, as the reason for a cold start.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

# Prefixes of the variables that the interpreter, C libraries or torch's C++ read when they are loaded.
_READ_BY_LIBRARIES = [
    "ATEN_",
    "BLIS_",
    "GLIBC_",
    "GOMP_",
    "GOTO_",
    "KMP_",
    "LANG",
    "LC_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH_",
    "TORCH",
    "TZ",
]
# Variables of those prefixes that torch reads when it makes a process group, not when it is imported.
_READ_LATE = ("TORCHELASTIC_", "TORCH_FR_", "TORCH_NCCL_")
# The place of a rank, under which some engines start the launcher itself with a place of its own. An import
# that copies all variables, as tqdm's does to find its own, does not use them.
_PLACE = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)


class RecordingEnviron(os._Environ):  # type: ignore[type-arg]
    """`os.environ` that records the names that are looked up, also those that are absent.

    A name that comes from a walk over all variables is recorded as copied.
    """

    reads: ClassVar[set[str]] = set()
    copied: ClassVar[set[str]] = set()
    _walked: ClassVar[dict[int, str]] = {}

    def __iter__(self) -> Iterator[str]:
        for key in super().__iter__():
            self._walked[id(key)] = key  # it stays alive, so no other string has its `id`
            yield key

    def __getitem__(self, key: str) -> str:
        (self.copied if self._walked.get(id(key)) is key else self.reads).add(key)
        return super().__getitem__(key)  # type: ignore[no-any-return]

    def __contains__(self, key: object) -> bool:
        self.reads.add(str(key))
        return super().__contains__(key)

    def copy(self) -> dict[str, str]:
        """Return all variables, as for a subprocess, which is no use of any of them here."""
        return {name: super(RecordingEnviron, self).__getitem__(name) for name in self}


class ImportRecord:
    """The effects of imports on this process, from the construction on.

    Construct it before torch and numpy are imported.

    Attributes:
        inherited: The record of the process from which this one was forked, if this one runs the launcher.
        environment: The variables before the imports.
        changes: The variables that the imports have set, and None for those that they have removed.
        seed: The seed that torch drew from the operating system when it was imported; None before.
    """

    inherited: ClassVar[ImportRecord | None] = None

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.changes: dict[str, str | None] = {}
        self.seed: int | None = None
        self._threads = set(_native_threads())
        self.resume()

    def resume(self) -> None:
        """Begin to record, or go on with it in a process that was forked from the recorded one."""
        self._files = set(_open_files())
        self._before = dict(os.environ)
        os.environ.__class__ = RecordingEnviron

    def ignore_threads(self) -> None:
        """Accept the threads that exist now: call it after the import of numpy alone.

        They are the idle pool of OpenBLAS, which ends before a fork and starts again after it.
        """
        self._threads |= set(_native_threads())

    def stop(self) -> None:
        """Stop recording reads of variables, and note those that have changed."""
        os.environ.__class__ = os._Environ
        before, after = self._before, os.environ
        for name in {*before, *after}:
            if before.get(name) != after.get(name):
                self.changes[name] = after.get(name)

    def close_inherited_files(self, kept: int) -> None:
        """Close the files that this process inherited from its parent, as `subprocess` does for a rank."""
        for number in self._files - {kept}:
            if number > 2:
                os.close(number)

    def unsafe_state(self, kept_files: Collection[int]) -> str | None:
        """Return the first thread, process, file or device that forked ranks would share or lose."""
        if others := [thread for thread in threading.enumerate() if thread is not threading.main_thread()]:
            return f"the thread `{others[0].name}` runs"
        threads = _native_threads()
        if added := sorted(set(threads) - self._threads):
            return f"the thread `{threads[added[0]]}` of a library runs"
        if children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            return f"the process {children[0]} was started"
        for number, target in _open_files().items():
            if "nvidia-uvm" in target:
                return "CUDA has been initialised"
            if number > 2 and number not in kept_files and number not in self._files:
                return f"the file `{target}` is open"
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return "a process group has been initialised"
        return None

    def unlike_variable(self, env: Mapping[str, str]) -> str | None:
        """Return a variable that was read on import, or set by one, and has another value in a rank.

        Args:
            env: The variables of the rank.
        """
        for name in sorted({*self.environment, *env, *self.changes}):
            before = self.environment.get(name)
            after = self.changes.get(name, before)
            if env.get(name) in (before, after):
                continue
            if is_read_on_import(name) or before != after:
                return f"`{name}` is {env.get(name)!r} in the rank, and was {before!r} on import"
        return None


def is_read_on_import(name: str) -> bool:
    """Return whether a module or library that this process has imported read the variable then."""
    if name.startswith(_READ_LATE):
        return False
    return (
        name in RecordingEnviron.reads
        or name in RecordingEnviron.copied - _PLACE
        or name.startswith(tuple(_READ_BY_LIBRARIES))
    )


def shadowed_module(folder: str, own_folder: str | None) -> str | None:
    """Return a module that a rank would import from elsewhere, since `folder` comes first in its path.

    Args:
        folder: The first entry of the rank's `sys.path`.
        own_folder: That of this process, which the rank does not have.
    """
    names = _importable(folder)
    for name, module in sys.modules.copy().items():
        if "." in name or name in (
            "__main__",
            "__mp_main__",
        ):  # the second is multiprocessing's name of the first
            continue
        file = getattr(module, "__file__", None)
        if file is None:
            # A namespace package grows by each folder of its name; a built-in module is never looked for.
            if name in names and getattr(module, "__path__", None) is not None:
                return f"`{Path(folder, name)}` is part of the imported `{name}`"
            continue
        path = Path(file)
        home = str(path.parent.parent if path.name.startswith("__init__.") else path.parent)
        if names.get(name) and home != folder and not _is_frozen(module):
            return f"`{Path(folder, name)}` stands before the imported `{name}`"
        if home == own_folder and own_folder not in (folder, *sys.path[1:]):
            return f"`{name}` was imported from {own_folder}"
    return None


def _importable(folder: str) -> dict[str, bool]:
    """Return the names that can be imported from a folder, with False for those of plain folders."""
    names: dict[str, bool] = {}
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return names
    for entry in entries:
        name, _, suffix = entry.name.partition(".")
        if entry.is_dir():
            names.setdefault(entry.name, (Path(entry.path) / "__init__.py").exists())
        elif suffix in ("py", "pyc", "so") or suffix.endswith(".so"):
            names[name] = True
    return names


def _is_frozen(module: object) -> bool:
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return origin in ("frozen", "built-in")


def _native_threads() -> dict[int, str]:
    """Return the name of each thread of this process but the main one, as the kernel has it."""
    threads = {}
    for entry in os.scandir("/proc/self/task"):
        if int(entry.name) != os.getpid():
            threads[int(entry.name)] = Path(entry.path, "comm").read_text().strip()
    return threads


def _open_files() -> dict[int, str]:
    files = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            files[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing itself
            continue
    return files
