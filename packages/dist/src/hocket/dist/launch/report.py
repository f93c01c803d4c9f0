"""The report of a failed job: the verdict, and the traceback of the rank that failed first."""

import os
from pathlib import Path

from hocket.dist.launch.error_records import read_record, read_tail
from hocket.dist.launch.verdict import Verdict


def report(
    verdict: Verdict, follows: str, *, base_rank: int, local_world_size: int, log_dir: str | None, kept: bool
) -> str:
    """Return the report, for standard error.

    Args:
        verdict: The cause.
        follows: An addition to the verdict; may be empty.
        base_rank: The rank of local rank 0.
        local_world_size: Ranks on this machine.
        log_dir: The folder of the ranks' logs.
        kept: Whether the folder stays.
    """
    lines = [f"hocket-launch: {verdict.text}" + (f"; {follows}" if follows else "")]
    local_rank = -1 if verdict.cause is None else verdict.cause.rank - base_rank
    has_error = verdict.cause is not None and verdict.cause.kind in ("failed", "waited")
    if has_error and 0 <= local_rank < local_world_size:
        if text := _read_text(log_dir, local_rank):
            lines.append(text.rstrip())
        elif local_rank == 0:
            lines.append("Its output is above.")
    if log_dir is not None and kept:
        lines.append(f"The logs of the ranks that do not write to the terminal are kept in {log_dir}")
    return "\n".join(lines)


def _read_text(log_dir: str | None, local_rank: int) -> str:
    """Return the traceback of a rank, or the end of its log; empty where it is printed already."""
    attempts = sorted(Path(log_dir or os.devnull).glob("*/attempt_*"), key=lambda path: path.stat().st_mtime)
    if not attempts:
        return ""
    folder = attempts[-1] / str(local_rank)
    record = read_record(folder / "error.json")
    if record is not None:
        # Local rank 0 has printed its traceback to the terminal, unless another rank's end caused it.
        return "" if local_rank == 0 and record.is_first else record.trace
    log = folder / "stderr.log"
    end = read_tail(log)
    return f"--- the end of {log}\n{end}" if end else ""
