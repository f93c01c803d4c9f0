"""`Algorithm`: a training method that changes the run at the events it matches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from hocket.trainer.event import Event

if TYPE_CHECKING:
    from hocket.trainer.logger import Logger
    from hocket.trainer.state import State


class Algorithm(ABC):
    """Base of training methods: `match` says when, `apply` does it.

    Algorithms run before callbacks and loggers, in the order in which they were given; at the events that end
    what a `BEFORE_*` event began (`AFTER_FORWARD` and the like), in the reverse order, so that they nest.

    Attributes:
        events: The events that `match` can say yes to. With None, every event asks.
    """

    events: ClassVar[frozenset[Event] | None] = None

    @abstractmethod
    def match(self, event: Event, state: State) -> bool:
        """Whether to run now."""

    @abstractmethod
    def apply(self, event: Event, state: State, logger: Logger) -> int | None:
        """Run; what it returns is for the trace alone."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint should keep of this algorithm; nothing unless overridden."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - nothing to take by default
        """Take back what `state_dict` gave."""
