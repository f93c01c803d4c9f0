"""The states of the ranks of a machine when their job failed: ended, stopped, late, or waiting for others."""

import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hocket.dist.launch.verdicts.error_records import read_record, read_tail
from hocket.dist.ranks.failures import is_trace_of_consequence
from hocket.dist.ranks.stack_dump import find_activity, find_line, process_state, read_crash, read_stack

Kind = Literal["failed", "stopped", "diverged", "ended", "running", "waiting", "waited"]
"""From the likeliest cause of a failed job to the least likely:

`failed` by itself, `stopped` by a signal, in another collective than the others (`diverged`), `ended` with
exit code 0 while others trained, `running` outside of the collective as far as is known, still `waiting` in
a collective, and `waited` for another rank until an error.
"""

IN_BACKWARD = "in the backward pass, in which DDP waits for other ranks, too"
"""How a rank is `running` that may wait for others."""

_ERROR_LENGTH = 600
_RECORDS_S = 0.7
"""Seconds to wait for the records of ranks that are about to fail, where no rank has failed by itself yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The state of one rank.

    Attributes:
        rank: Among all ranks.
        pid: Its process.
        host: The name of its machine.
        kind: The state.
        how: The way in which it ended, or `IN_BACKWARD`, as a part of a sentence.
        error: The last line of its error, empty without one.
        line: The line of the user's code, None where it is not known.
        since: Seconds since 1970 at which the state began, by the clock of its machine.
        waited_s: Seconds for which it waited for others; 0 where it did not wait until a deadline.
        late: The ranks that did not answer it.
        last: Its last collective, empty where it is not known.
    """

    rank: int
    pid: int
    host: str
    kind: Kind
    how: str = ""
    error: str = ""
    line: str | None = None
    since: float
    waited_s: float = 0.0
    late: tuple[int, ...] = ()
    last: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Finding":
        """Return the finding that another launcher has written."""
        return cls(**{**values, "late": tuple(values["late"])})


def find_states(context: Any) -> list[Finding]:
    """Return the states of this machine's ranks; call it before they are ended because one has failed.

    Args:
        context: The `PContext` of torch's agent.
    """
    deadline = time.monotonic() + _RECORDS_S
    found = _find_once(context, has_stacks=False)
    # Ranks that wait for one another fail within moments, and the one that failed by itself may be the last.
    while (
        not any(finding.kind in ("failed", "stopped") for finding in found)
        and any(finding.kind == "running" for finding in found)
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
        found = _find_once(context, has_stacks=False)
    if any(finding.kind == "failed" for finding in found):
        return found
    return _find_once(context, has_stacks=True)


def has_missed_deadline(context: Any) -> bool:
    """Return whether a rank has recorded that others, named if it can, did not answer until a deadline.

    Ranks in different collectives have all recorded an error before it is known which of them are.

    Args:
        context: The `PContext` of torch's agent.
    """
    for file in context.error_files.values():
        record = read_record(Path(file)) if os.path.exists(file) else None
        if record is None or not record.diagnosis.get("waited_s") or record.diagnosis.get("has_diverged"):
            continue
        if record.diagnosis.get("late") != []:  # missing where the store of the job did not answer
            return True
    return False


def with_records(context: Any, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings again, renewed for the ranks that have recorded an error of their own since."""
    pids = {pid: local_rank for local_rank, pid in context.pids().items()}
    renewed = []
    for finding in findings:
        local_rank = pids.get(finding.pid)
        if finding.kind in ("running", "waiting") and local_rank is not None:
            now = _find(context, local_rank, finding.pid, None, "", has_stacks=False)
            renewed.append(now if now.kind in ("failed", "diverged") else finding)
        else:
            renewed.append(finding)
    return renewed


def find_end(rank: int, failure: ProcessFailure) -> Finding:
    """Return what torch's agent tells of a rank that has ended."""
    return Finding(
        rank=rank,
        pid=failure.pid,
        host=socket.gethostname(),
        kind="failed",
        how=_describe_code(failure.exitcode),
        since=float(failure.timestamp),
    )


def _find_once(context: Any, *, has_stacks: bool) -> list[Finding]:
    found = []
    for local_rank, pid in context.pids().items():
        handler = context.subprocess_handlers[local_rank]
        code = handler.proc.poll()
        state = None if code is not None else process_state(pid)
        found.append(_find(context, local_rank, pid, code, state or "", has_stacks=has_stacks))
    return found


def _find(
    context: Any, local_rank: int, pid: int, code: int | None, state: str, *, has_stacks: bool
) -> Finding:
    """Return the state of one rank."""
    folder = Path(context.error_files[local_rank]).parent
    common: dict[str, Any] = {
        "rank": int(context.envs[local_rank].get("RANK", local_rank)),
        "pid": pid,
        "host": socket.gethostname(),
    }
    info = read_record(Path(context.error_files[local_rank]))
    text = read_tail(Path(context.stderrs[local_rank] or os.devnull)) if info is None else info.trace
    if info is not None:
        diagnosis = info.diagnosis
        has_diverged = bool(diagnosis.get("has_diverged"))
        kind: Kind = "diverged" if has_diverged else "failed" if info.is_first else "waited"
        waited_s = float(diagnosis.get("waited_s", 0.0))
        return Finding(
            **common,
            kind=kind,
            how="with an error" if code is None else _describe_code(code),
            error=" ".join(info.summary.split())[:_ERROR_LENGTH],
            line=find_line(text),
            since=float(diagnosis.get("failed_at", info.failed_at)) - waited_s,
            waited_s=waited_s,
            late=tuple(diagnosis.get("late", ())),
            last=str(diagnosis.get("last", "")),
        )
    has_trace = "Traceback (most recent call last)" in text
    is_ending = has_trace and text.splitlines()[-2][:1] == " "  # the error stands below the last frame
    if code not in (None, 0) or (is_ending and not is_trace_of_consequence(text)):
        is_consequence = has_trace and is_trace_of_consequence(text)
        return Finding(
            **common,
            kind="waited" if is_consequence and (code or 0) > 0 else "failed",
            how="with an error" if code is None else _describe_code(code),
            error=text.splitlines()[-1] if has_trace else "",
            line=find_line(text if has_trace else read_crash(folder)),
            since=time.time(),
        )
    if code == 0:
        return Finding(**common, kind="ended", since=_ended_at(context, local_rank))
    stack = read_stack(pid, folder) if has_stacks else ""
    activity = find_activity(stack)
    here: Kind = "stopped" if state == "T" else "waiting" if activity == "collective" else "running"
    how = IN_BACKWARD if here == "running" and activity == "backward" else ""
    return Finding(**common, kind=here, how=how, line=find_line(stack), since=time.time())


def _describe_code(code: int) -> str:
    return f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"


def _ended_at(context: Any, local_rank: int) -> float:
    """Return the time of the last output of a rank, or now: the agent notes no time of a good end."""
    with_output = [Path(path) for path in (context.stdouts[local_rank], context.stderrs[local_rank]) if path]
    times = [path.stat().st_mtime for path in with_output if path.exists() and path.stat().st_size]
    return max(times, default=time.time())
