"""The errors that ranks of `hocket-launch` recorded or wrote to their logs."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.dist.ranks.failures import is_trace_of_consequence

_LOG_TAIL_BYTES = 6000


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorRecord:
    """The error that ended a rank, as the rank recorded it.

    Attributes:
        trace: Its traceback.
        summary: The last line of it.
        failed_at: Seconds since 1970.
        is_first: Whether the rank failed by itself and not because another rank had ended.
        diagnosis: The comparison of the ranks after a failed collective; empty without one.
    """

    trace: str
    summary: str
    failed_at: float
    is_first: bool
    diagnosis: dict[str, Any]


def read_record(path: Path) -> ErrorRecord | None:
    """Return the error that a rank recorded, None without one."""
    try:
        message = json.loads(path.read_text())["message"]
        info = message["extraInfo"]
        trace = str(info["py_callstack"])
        return ErrorRecord(
            trace=trace,
            summary=str(message["message"]),
            failed_at=path.stat().st_mtime,
            is_first=not info.get("is_consequence", is_trace_of_consequence(trace)),
            diagnosis=info.get("diagnosis") or {},
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_tail(log: Path) -> str:
    """Return the end of a rank's log, empty if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
