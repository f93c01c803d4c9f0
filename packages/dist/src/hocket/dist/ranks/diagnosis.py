"""Diagnosis of late and diverged ranks, after a collective has failed.

Ranks exchange nothing while training goes well. When a collective fails on a rank, the rank writes its last
collective into the store of the job, waits a few seconds for the other ranks to do the same, and compares. A
rank that hangs outside of collectives, or has ended, writes nothing and is reported as late. Ranks that are
in different collectives have diverged.
"""

import json
import os
import re
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # public, and missing from its annotations

from hocket.dist.ranks.world import World

GRACE_S = 3.0
ASIDE = "hocket_aside"
"""The group of the small exchanges beside training, left out here: they run ahead of a rank's training."""

_KEY = "hocket/diagnosis"
_FAILURES = re.compile(
    r"timed? ?out|Connection closed|Connection reset|connectFullMesh|Broken pipe|NCCL|gloo|wait timeout|"
    r"sent nothing for|ended before the other ranks|is at exchange",
    re.IGNORECASE,
)
_TIMEOUTS = re.compile(r"timed? ?out|sent nothing for", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The state of the ranks after a failed collective.

    Attributes:
        late: Ranks that did not answer.
        places: The last collective of each rank that answered, as text.
        has_diverged: Whether the ranks that answered are in different collectives.
        lasts: The same as `places`, without host and process.
    """

    late: tuple[int, ...]
    places: dict[int, str]
    has_diverged: bool
    lasts: dict[int, str]

    def __str__(self) -> str:
        lines = []
        if self.late:
            lines.append(
                f"late: rank{'s' if len(self.late) > 1 else ''} {', '.join(map(str, self.late))} did not "
                "answer: a rank that hangs outside of collectives or has ended does not, nor one that came "
                "late to the collective and waits there itself. Their logs say why."
            )
        if self.has_diverged:
            lines.append("the ranks are in different collectives, so they took different branches:")
        lines += [f"  rank {rank}: {place}" for rank, place in sorted(self.places.items())][:32]
        return "\n".join(lines)


def is_collective_failure(error: BaseException) -> bool:
    """Return whether an error is one that torch raises when a collective fails or times out."""
    return isinstance(error, RuntimeError) and bool(_FAILURES.search(str(error)))


def has_timed_out(error: BaseException) -> bool:
    """Return whether the collective failed because its deadline passed, not because a connection was lost."""
    return bool(_TIMEOUTS.search(str(error)))


def record_collectives() -> None:
    """Turn on torch's flight recorder, unless its size is set; call it before the process group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_FR_DUMP_ON_TIMEOUT", "1")


def diagnose(
    store: Store, world: World, *, grace_s: float = GRACE_S, has_answered: threading.Event | None = None
) -> Diagnosis | None:
    """Compare the last collectives of all ranks. Call it on every rank on which a collective failed.

    Args:
        store: The store of the job.
        world: The place of this process.
        grace_s: Seconds to wait for the other ranks.
        has_answered: Set once the store has answered.

    Returns:
        None if the store itself cannot be reached.
    """
    names = [f"{_KEY}/{rank}" for rank in range(world.world_size)]
    try:
        store.set(names[world.rank], json.dumps(_place()))
        deadline = time.monotonic() + grace_s
        store.check(names)
        if has_answered is not None:
            has_answered.set()
        while not store.check(names) and time.monotonic() < deadline:
            time.sleep(0.1)
        present = [rank for rank, name in enumerate(names) if store.check([name])]
        store.set_timeout(timedelta(seconds=grace_s))
        answers: dict[int, dict[str, Any]] = {rank: json.loads(store.get(names[rank])) for rank in present}
    except RuntimeError:
        return None
    late = tuple(rank for rank in range(world.world_size) if rank not in answers)
    last = {rank: answer["last"] for rank, answer in answers.items()}
    return Diagnosis(
        late=late,
        places={
            rank: f"{answer['last']} on {answer['host']} (pid {answer['pid']})"
            for rank, answer in answers.items()
        },
        has_diverged=len(set(last.values())) > 1,
        lasts=last,
    )


def diagnose_in_time(store: Store, world: World, *, grace_s: float = GRACE_S) -> Diagnosis | None:
    """Same as `diagnose`, but return None where the store's host is lost: a request to it would never end."""
    found: list[Diagnosis | None] = []
    has_answered = threading.Event()

    def ask() -> None:
        try:
            found.append(diagnose(store, world, grace_s=grace_s, has_answered=has_answered))
        finally:
            has_answered.set()

    asking = threading.Thread(target=ask, name="hocket-diagnosis", daemon=True)
    asking.start()
    if has_answered.wait(grace_s):
        asking.join(2 * grace_s + 1)
    return found[0] if found else None


def _place() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "last": _last_collective()}


def _last_collective() -> str:
    """Describe the newest collective in the flight recorder."""
    recorder: Any = torch._C._distributed_c10d
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(recorder, name, None)
        if dump is None:
            continue
        try:
            entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries") or []
        except (RuntimeError, ValueError, TypeError):
            continue
        entries = [entry for entry in entries if entry.get("process_group", ["", ""])[1] != ASIDE]
        if entries:
            entry = entries[-1]
            return (
                f"{entry['profiling_name']} #{entry['collective_seq_id']} of {entry['input_sizes']} "
                f"in group {entry['process_group'][1] or entry['process_group'][0]}"
            )
    return "no collective recorded"
