"""Errors on their way from one rank to the others."""

import json
from collections.abc import Sequence
from typing import Any

from hocket.ckpt import errors
from hocket.ckpt.errors import CheckpointError, CheckpointNotFoundError, CheckpointTimeoutError
from hocket.ckpt.torch.rendezvous import Rendezvous

__all__ = ["Failure", "agree", "merge", "pack_error", "unpack_error"]

Failure = dict[str, Any]
"""A rank's error as JSON: `ranks`, `type`, `message`."""

_MESSAGE_CHARS = 4000
_REPLACED = (
    "the ranks read different saves: it was replaced meanwhile, or they name different ones. Load it again."
)


def pack_error(error: BaseException, *, ranks: Sequence[int]) -> Failure:
    """An error in a form that other ranks can read; `ranks`: where it happened, none for the whole job."""
    return {"ranks": list(ranks), "type": type(error).__name__, "message": str(error)[:_MESSAGE_CHARS]}


def merge(failures: Sequence[Failure]) -> Failure | None:
    """The first failure, with the ranks of all; None where there is none."""
    if not failures:
        return None
    return {**failures[0], "ranks": sorted(rank for failure in failures for rank in failure["ranks"])}


def unpack_error(failure: Failure, what: str) -> CheckpointError:
    """The error to raise on a rank for what went wrong on another.

    An error of this package keeps its class, so that a handler works alike on every rank.

    Args:
        failure: What `pack_error` gave on the other rank.
        what: What failed, to begin the message with.
    """
    kind = getattr(errors, failure["type"], None)
    named = ""
    if not (isinstance(kind, type) and issubclass(kind, CheckpointError)):
        kind, named = CheckpointError, f"{failure['type']}: "
    ranks = failure["ranks"]
    where = f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
    return kind(f"{what} failed{where}: {named}{failure['message']}")


def agree(
    rendezvous: Rendezvous,
    key: str,
    error: BaseException | None,
    *,
    timeout_s: float,
    what: str,
    save_id: str = "",
) -> None:
    """Ends alike on all ranks: returns when none has an error, else raises on every one of them.

    Collective over the rendezvous; blocking.

    Args:
        rendezvous: The ranks.
        key: Names this agreement; the same on all ranks, and used once.
        error: This rank's; it is what is raised here.
        timeout_s: How long to wait for the others.
        what: What is agreed on, for messages: `load of …`.
        save_id: Of the checkpoint that this rank reads, which has to be the same on all.

    Raises:
        CheckpointNotFoundError: Ranks read different saves: the checkpoint was replaced meanwhile.
        CheckpointError: Another rank failed, or did not come in time.
    """
    failure = None if error is None else pack_error(error, ranks=[rendezvous.rank])
    mine = {"failure": failure, "save_id": save_id}
    if rendezvous.is_coordinator:
        try:
            others = rendezvous.collect(
                f"{key}/report",
                range(1, rendezvous.world_size),
                timeout_s=timeout_s,
                what=f"its part of the {what}",
            )
            told = [mine, *(json.loads(others[rank]) for rank in sorted(others))]
            failure = merge([report["failure"] for report in told if report["failure"] is not None])
            if failure is None and any(report["save_id"] != save_id for report in told):
                failure = pack_error(CheckpointNotFoundError(_REPLACED), ranks=[])
        except CheckpointError as late:
            failure = failure or pack_error(late, ranks=[])
        rendezvous.post(f"{key}/outcome", json.dumps(failure).encode())
        if failure is None:
            # Where a rank failed, another may come late: it still finds the outcome.
            rendezvous.await_ticks(f"{key}/seen", rendezvous.world_size - 1, timeout_s=timeout_s)
            rendezvous.forget(f"{key}/outcome", f"{key}/seen")
    else:
        try:
            rendezvous.post(f"{key}/report/{rendezvous.rank}", json.dumps(mine).encode())
            outcome = rendezvous.receive(
                f"{key}/outcome", timeout_s=2 * timeout_s, what=f"what became of the {what}"
            )
        except (CheckpointTimeoutError, RuntimeError) as silent:
            if error is None:
                raise
            raise error from silent
        failure = json.loads(outcome)
        rendezvous.tick(f"{key}/seen")
    if error is not None:
        raise error
    if failure is not None:
        raise unpack_error(failure, f"The {what}")
