"""Control groups with a limit of memory, in which the kernel ends processes as in a container."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_limit(num_bytes: int) -> Iterator[Path]:
    """Make a control group; yield the file into which a process writes its number to join it.

    Raises:
        OSError: This machine does not allow it.
    """
    is_first_version = (_ROOT / "memory").is_dir()
    parent = _ROOT / "memory" if is_first_version else _ROOT
    folder = parent / f"hocket-test-{os.getpid()}"
    folder.mkdir()
    try:
        name = "memory.limit_in_bytes" if is_first_version else "memory.max"
        if not (folder / name).exists():
            raise OSError(f"the control group {folder} has no `{name}`")
        (folder / name).write_text(str(num_bytes))
        with contextlib.suppress(OSError):  # without swap there is nothing to limit
            swap = "memory.memsw.limit_in_bytes" if is_first_version else "memory.swap.max"
            (folder / swap).write_text(str(num_bytes if is_first_version else 0))
        yield folder / "cgroup.procs"
    finally:
        deadline = time.monotonic() + 20
        while True:
            try:
                folder.rmdir()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
