"""Propagation of errors from one rank to all ranks."""

import json
from collections.abc import Sequence
from typing import Any

from hocket.ckpt import errors
from hocket.ckpt.errors import CheckpointError, CheckpointNotFoundError, CheckpointTimeoutError
from hocket.ckpt.torch.ranks.coordinator import Coordinator

__all__ = ["Failure", "agree", "merge", "pack_error", "unpack_error"]

Failure = dict[str, Any]
"""A rank's error as JSON: `ranks`, `type`, `message`."""

_MESSAGE_CHARS = 4000
_REPLACED = (
    "the ranks read different saves: the checkpoint was replaced during the load, or the ranks name "
    "different checkpoints. Load it again"
)


def pack_error(error: BaseException, *, ranks: Sequence[int]) -> Failure:
    """Return an error as JSON for other ranks; `ranks` are those that raised it, empty for the whole job."""
    failure: Failure = {
        "ranks": list(ranks),
        "type": type(error).__name__,
        "message": str(error)[:_MESSAGE_CHARS],
    }
    if isinstance(error, CheckpointTimeoutError):
        failure["diagnosis"] = error.hocket_diagnosis
    return failure


def merge(failures: Sequence[Failure]) -> Failure | None:
    """Return the first failure with the ranks of all failures; None if there is none."""
    if not failures:
        return None
    return {**failures[0], "ranks": sorted(rank for failure in failures for rank in failure["ranks"])}


def unpack_error(failure: Failure, what: str) -> CheckpointError:
    """Return the exception to raise on this rank for an error of another rank.

    An error of this package keeps its class, so that a handler sees the same class on every rank.

    Args:
        failure: The result of `pack_error` on the other rank.
        what: The operation that failed; the message begins with it.
    """
    kind = getattr(errors, failure["type"], None)
    prefix = ""
    if not (isinstance(kind, type) and issubclass(kind, CheckpointError)):
        kind, prefix = CheckpointError, f"{failure['type']}: "
    ranks = failure["ranks"]
    where = f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
    error = kind(f"{what} failed{where}: {prefix}{failure['message']}")
    if isinstance(error, CheckpointTimeoutError):
        error.hocket_diagnosis = failure.get("diagnosis")
    return error


def agree(
    coordinator: Coordinator,
    key: str,
    error: BaseException | None,
    *,
    timeout_s: float,
    what: str,
    save_id: str = "",
) -> None:
    """Return if no rank has an error, else raise on every rank.

    Collective over the coordinator; blocking.

    Args:
        coordinator: Connects the ranks.
        key: Identifies this agreement: the same on all ranks, and used once.
        error: This rank's error, which is raised here as it is.
        timeout_s: Seconds to wait for the other ranks.
        what: The operation, for messages: `load of …`.
        save_id: The save that this rank reads; it must be the same on all ranks.

    Raises:
        CheckpointNotFoundError: Ranks read different saves of a checkpoint that was replaced.
        CheckpointError: Another rank failed, or did not report in time.
    """
    failure = None if error is None else pack_error(error, ranks=[coordinator.rank])
    own_report = {"failure": failure, "save_id": save_id}
    if coordinator.is_rank_0:
        try:
            others = coordinator.collect(
                f"{key}/report",
                range(1, coordinator.world_size),
                timeout_s=timeout_s,
                what=f"its part of the {what}",
            )
            reports = [own_report, *(json.loads(others[rank]) for rank in sorted(others))]
            failure = merge([report["failure"] for report in reports if report["failure"] is not None])
            if failure is None and any(report["save_id"] != save_id for report in reports):
                failure = pack_error(CheckpointNotFoundError(_REPLACED), ranks=[])
        except CheckpointError as collect_error:
            failure = failure or pack_error(collect_error, ranks=[])
        coordinator.post(f"{key}/outcome", json.dumps(failure).encode())
        if failure is None:
            # After a failure the outcome is kept for late ranks.
            coordinator.await_ticks(f"{key}/seen", coordinator.world_size - 1, timeout_s=timeout_s)
            coordinator.forget(f"{key}/outcome", f"{key}/seen")
    else:
        try:
            coordinator.post(f"{key}/report/{coordinator.rank}", json.dumps(own_report).encode())
            outcome = coordinator.receive(
                f"{key}/outcome", timeout_s=2 * timeout_s, what=f"what became of the {what}"
            )
        except (CheckpointTimeoutError, RuntimeError) as silent:
            if error is None:
                raise
            raise error from silent
        failure = json.loads(outcome)
        coordinator.tick(f"{key}/seen")
    if error is not None:
        raise error
    if failure is not None:
        raise unpack_error(failure, f"the {what}")
