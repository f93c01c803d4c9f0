"""A note with the microbatch size for the next attempt of a job, after one ran out of memory."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path

_RUN = "TORCHELASTIC_RUN_ID"
_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


def write_note(size: int) -> bool:
    """Write `size` for the next attempt of this job on this node.

    Returns:
        True if the note was written; False without a launcher that restarts ranks, or if the write failed.
    """
    try:
        path = _path()
        if path is None:
            return False
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"attempt": int(os.environ.get(_ATTEMPT, "0")), "size": size}))
        part.replace(path)
    except OSError:
        return False
    return True


def read_note() -> int | None:
    """Return the size that an earlier attempt of this job wrote on this node; None without a note."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        path = _path()
        if path is not None:
            note = json.loads(path.read_text())
            if int(note["attempt"]) < int(os.environ.get(_ATTEMPT, "0")):
                return int(note["size"])
    return None


def _path() -> Path | None:
    """Return a path that all attempts of one job share and no other job uses; None without a launcher.

    The path has the id of the parent process, since the launcher's agent on a node starts every attempt.
    """
    run = os.environ.get(_RUN)
    if not run:
        return None
    name = "".join(letter if letter.isalnum() else "-" for letter in run)
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir(), f"hocket-microbatch-{user}-{os.getppid()}-{name}.json")
