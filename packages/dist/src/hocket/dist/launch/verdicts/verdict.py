"""The verdict on a failed job, in one paragraph: rank, host, line, time, and what to do."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

from hocket.dist.launch.verdicts.error_records import read_record, read_tail
from hocket.dist.launch.verdicts.findings import IN_BACKWARD, Finding, Kind

_ORDER = get_args(Kind)
_UNKNOWN_S = 2.0
"""Seconds within which a rank whose error is known precedes one that has ended with an unknown error."""

_ADVICE = {
    "memory": (
        "Memory was short: use a smaller `device_train_microbatch_size`, or shard or offload more "
        "(`hocket-launch plan` estimates it)"
    ),
    "failed": (
        "Correct the error and start again: with `autoresume=True` the job goes on from its newest checkpoint"
    ),
    "stopped": (
        "A debugger, a scheduler that suspends jobs or Ctrl-Z stops a process so. Start again, or keep the "
        "job from being suspended"
    ),
    "diverged": (
        "Every rank has to call the same collectives in the same order: look above these lines for a "
        "condition that depends on the rank or on its data"
    ),
    "ended": "Give all ranks equally many steps: equally long data, or `max_duration` in batches",
    "running": (
        "If the rank is only slow, raise `dist_timeout`; else it hangs at that line. Look at the load, the "
        "disk and the network of its host"
    ),
    "waiting": (
        "If the rank came too late, raise `dist_timeout`. Otherwise every rank has to call the same "
        "collectives in the same order: look above these lines for a condition that depends on the rank"
    ),
    "lost": "See whether the host runs, and its network: a cut link and a lost machine look alike from here",
    "waited": "The logs of the other ranks say why",
}

_ADVICE_BY_SIGNAL = {
    "by SIGKILL": (
        "The kernel also sends SIGKILL when memory is short: see its log (`dmesg`, or the scheduler's "
        "accounting)"
    ),
    "by SIGABRT": (
        "Gloo ends a process so that receives data of another size than it expects. "
        f"{_ADVICE['diverged']}. Otherwise the output of the rank says why"
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The likeliest cause of a failed job.

    Attributes:
        text: The paragraph.
        cause: The rank that caused the end; None where no launcher could see it.
    """

    text: str
    cause: Finding | None


def judge(findings: Sequence[Finding], hosts: Mapping[int, str]) -> Verdict:
    """Return the verdict on what the launchers of a job have found.

    Args:
        findings: The states of all ranks that a launcher has seen; at least one.
        hosts: The names of the hosts by rank, where they are known.
    """
    ordered = sorted(findings, key=_likelihood)
    cause, waiting = ordered[0], _first_waiting(ordered)
    seen = {finding.rank for finding in findings}
    # A rank that is cut off itself reaches no store, and does not know who is late.
    others_there = {rank for rank in hosts if rank not in seen} if cause.waited_s else set()
    lost = [] if waiting is None else sorted(set(waiting.late or others_there) - seen)
    if cause.kind in ("ended", "running", "waiting", "waited") and waiting is not None and lost:
        return Verdict(text=_tell_lost(lost, waiting, hosts), cause=None)
    late = () if waiting is None else waiting.late
    if cause.kind in ("running", "waiting") and late and cause.rank not in late:
        cause = next((finding for finding in ordered if finding.rank in late), cause)
    if cause.kind == "diverged":
        # One that took the others for late has told its collective, too.
        text = _tell_diverged([finding for finding in ordered if finding.kind == "diverged" or finding.last])
    else:
        text = _tell(cause, waiting)
        # Which of them hangs and which only waits for it in code of its own cannot be told apart.
        text += _tell_also_late(
            [one for one in ordered if one.kind == cause.kind == "running" and one.rank in late][1:]
        )
    others = sorted(
        finding.rank
        for finding in findings
        if finding.kind in ("waiting", "waited", "failed") and finding is not cause
    )
    if others and cause.kind != "diverged":
        text += f". Ended because of it: {_ranks(others)}"
    return Verdict(text=f"{text}. {_advice(cause)}", cause=cause)


def _likelihood(finding: Finding) -> tuple[int, bool, float]:
    """Return a key by which the likeliest cause is the first."""
    # The terminal has the traceback of the machine's first rank, which may only report another rank's end.
    is_unknown = finding.kind == "failed" and not finding.error and finding.how.startswith("with exit code")
    since = finding.since + (_UNKNOWN_S if is_unknown else 0)
    return _ORDER.index(finding.kind), finding.how == IN_BACKWARD, since


def _first_waiting(findings: Sequence[Finding]) -> Finding | None:
    waiting = [finding for finding in findings if finding.kind == "waited"]
    return min(waiting, key=lambda finding: (not finding.late, finding.since), default=None)


def _tell(cause: Finding, waiting: Finding | None) -> str:
    name, at = f"rank {cause.rank} (pid {cause.pid})", _place(cause)
    if cause.kind == "failed":
        error = f": `{cause.error}`" if cause.error else ""
        return (
            f"{name} failed first, {cause.how}{error}; {at}, at {_clock(cause.since)}{_waited_for(waiting)}"
        )
    if cause.kind == "waited":
        return f"{name} failed first, {cause.how}: `{cause.error}`; {at}, since {_clock(cause.since)}"
    since = cause.since if waiting is None else waiting.since
    state = {
        "stopped": "was stopped, as by SIGSTOP",
        "ended": "ended with exit code 0 while other ranks trained on",
        "running": "did not take part in a collective",
        "waiting": "did not take part in a collective in time: it is in another one, or came too late",
    }[cause.kind]
    how = f", {cause.how}" if cause.kind == "running" and cause.how else ""
    return f"{name} {state}{how}; {at}, since {_clock(since)}{_waited_for(waiting)}"


def _tell_also_late(ranks: Sequence[Finding]) -> str:
    """Name ranks of which it is not known whether they hang, too, or only wait for the first."""
    shown = "; ".join(
        f"rank {finding.rank} (pid {finding.pid}), {_place(finding)}"
        + (f", {finding.how}" * bool(finding.how))
        for finding in ranks[:4]
    )
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f". Late, too, but it may wait for that rank: {shown}{more}" if ranks else ""


def _tell_diverged(ranks: Sequence[Finding]) -> str:
    places = "; ".join(
        f"rank {finding.rank} (pid {finding.pid}), {_place(finding)}, in {finding.last or 'none'}"
        for finding in sorted(ranks, key=lambda finding: finding.rank)[:4]
    )
    since = _clock(min(finding.since for finding in ranks))
    return f"the ranks took different branches, and since {since} are in different collectives: {places}"


def _tell_lost(lost: Sequence[int], waiting: Finding, hosts: Mapping[int, str]) -> str:
    names = sorted({hosts[rank] for rank in lost if rank in hosts})
    of_host = f" on host {', '.join(names)}" if names else ""
    return (
        f"{_ranks(lost)}{of_host} did not answer, nor did the launcher there, since {_clock(waiting.since)}"
        f"{_waited_for(waiting)}. Ended because of it: rank {waiting.rank}. {_ADVICE['lost']}"
    )


def _waited_for(waiting: Finding | None) -> str:
    if waiting is None:
        return ""
    seconds = f" {waiting.waited_s:g} s" if waiting.waited_s else ""
    at = "" if waiting.line is None else f" at {waiting.line}"
    return f"; rank {waiting.rank} on host {waiting.host} waited{seconds} for it{at}"


def _place(finding: Finding) -> str:
    unknown = " (its line is not known)"
    return f"on host {finding.host}" + (unknown if finding.line is None else f" at {finding.line}")


def _advice(cause: Finding) -> str:
    # A rank that has raised an error may end by a signal afterwards, as gloo's threads abort its exit.
    if cause.kind == "failed" and not cause.error and cause.how in _ADVICE_BY_SIGNAL:
        return _ADVICE_BY_SIGNAL[cause.how]
    if cause.kind == "failed" and any(
        words in cause.error
        for words in ("OutOfMemoryError", "out of memory", "can't allocate memory", "MemoryError")
    ):
        return _ADVICE["memory"]
    return _ADVICE[cause.kind]


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M:%S UTC")


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
