"""`StopSignal`: the request to end training before its duration."""

from __future__ import annotations

from collections.abc import Callable


class StopSignal:
    """A request to end training, and the agreement of all ranks to it.

    A callback, SIGTERM or another rank requests a stop. Once every rank knows of the request, no further
    batch is fetched. The batches that are ahead are still trained on, since a checkpoint cannot restore them;
    then the stop is final. A stop does not shorten `max_duration`, because schedules are functions of the
    duration.

    Attributes:
        reason: The reason for the stop on this rank; None without a request.
        is_agreed: Whether every rank knows of the request.
        is_final: Whether the present batch is the last one, on every rank.
        notify: Takes a notice of the end that was no signal, with the seconds until then; None outside a fit.
    """

    __slots__ = ("is_agreed", "is_final", "notify", "reason")

    def __init__(self) -> None:
        self.notify: Callable[[float | None], None] | None = None
        self.reason: str | None = None
        self.is_agreed = False
        self.is_final = False

    def request(self, reason: str) -> None:
        """Request a stop; the first reason is kept."""
        if self.reason is None:
            self.reason = reason

    def agree(self) -> None:
        """Record that every rank knows of the request; called at the same batch on every rank."""
        self.is_agreed = True
        self.request("a stop that another rank requested")

    def finalize(self) -> None:
        """Make the present batch the last one. Every rank calls this at the same batch."""
        self.is_final = True

    def clear(self) -> None:
        """Clear the request; called at the start of `fit`."""
        self.reason = None
        self.is_agreed = self.is_final = False
