"""The report of a failed job: the rank that failed first with its traceback, the others by name."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hocket.dist.ranks.failures import is_trace_of_consequence

_LOG_TAIL_BYTES = 6000


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """The end of one rank.

    Attributes:
        rank: Among all ranks.
        local_rank: On this machine.
        text: Its traceback, or the end of its output; empty where it was written to the terminal.
        failed_at: Seconds since 1970.
        is_first: Whether the rank failed by itself and not because another rank had ended.
    """

    rank: int
    local_rank: int
    text: str
    failed_at: float
    is_first: bool


def report(first: ProcessFailure, *, base_rank: int, log_dir: str | None, kept: bool) -> str:
    """Return the report, for standard error.

    Args:
        first: The failure that torch's agent saw first.
        base_rank: The rank of local rank 0.
        log_dir: The folder of the ranks' logs.
        kept: Whether the folder stays.
    """
    failures = sorted(_read_failures(log_dir, base_rank), key=lambda failure: failure.failed_at)
    own_failure = next((failure for failure in failures if failure.local_rank == first.local_rank), None)
    # A rank that a signal killed leaves no record; it is the cause, even if other ranks left records.
    is_killed = first.exitcode < 0 and first.exitcode != -signal.SIGTERM
    cause = (
        own_failure if is_killed else next((failure for failure in failures if failure.is_first), own_failure)
    )
    local_rank = first.local_rank if cause is None else cause.local_rank
    how = describe_end(first) if local_rank == first.local_rank else "with an error"
    pid = f" (pid {first.pid})" if local_rank == first.local_rank else ""
    lines = [f"hocket-launch: rank {base_rank + local_rank}{pid} failed first, {how}"]
    if cause is not None and cause.text:
        lines.append(cause.text.rstrip())
    elif local_rank == 0:
        lines.append("Its output is above.")
    others = sorted({failure.rank for failure in failures} | {base_rank + first.local_rank})
    others = [rank for rank in others if rank != base_rank + local_rank]
    if others:
        lines.append(
            f"Ended because of it: rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}."
        )
    if log_dir is not None and kept:
        lines.append(f"The logs of the ranks that do not write to the terminal are kept in {log_dir}")
    return "\n".join(lines)


def describe_end(failure: ProcessFailure) -> str:
    """Return how a rank ended: its exit code, or the signal that killed it."""
    code = failure.exitcode
    if code >= 0:
        return f"with exit code {code}"
    name = signal.Signals(-code).name
    return f"by {name}" + (", which the kernel also sends when memory is short" if name == "SIGKILL" else "")


def _read_failures(log_dir: str | None, base_rank: int) -> Iterator[RankFailure]:
    """Yield the failures that the ranks of the last attempt recorded or wrote to their logs."""
    if log_dir is None:
        return
    attempts = sorted(Path(log_dir).glob("*/attempt_*"), key=lambda path: path.stat().st_mtime)
    for folder in attempts[-1].iterdir() if attempts else ():
        if not folder.name.isdecimal():
            continue
        local_rank = int(folder.name)
        record = read_record(folder / "error.json")
        if record is not None:
            trace, failed_at, is_first = record
            # Local rank 0 has printed its traceback to the terminal, unless another rank's end caused it.
            text = "" if local_rank == 0 and is_first else trace
            yield RankFailure(
                rank=base_rank + local_rank,
                local_rank=local_rank,
                text=text,
                failed_at=failed_at,
                is_first=is_first,
            )
            continue
        log = folder / "stderr.log"
        end = read_tail(log)
        if end:
            has_trace = "Traceback (most recent call last)" in end
            yield RankFailure(
                rank=base_rank + local_rank,
                local_rank=local_rank,
                text=f"--- the end of {log}\n{end}",
                failed_at=log.stat().st_mtime,
                is_first=has_trace and not is_trace_of_consequence(end),
            )


def read_record(path: Path) -> tuple[str, float, bool] | None:
    """Return the traceback that a rank recorded, its time, and whether the rank failed by itself."""
    try:
        message = json.loads(path.read_text())["message"]
        info = message["extraInfo"]
        trace = str(info["py_callstack"])
        return trace, path.stat().st_mtime, not info.get("is_consequence", is_trace_of_consequence(trace))
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
