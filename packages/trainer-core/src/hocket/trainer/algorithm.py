"""`Algorithm`: a training method that changes the run at the events it matches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from hocket.trainer.event import Event

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.trainer.logger import Logger
    from hocket.trainer.state import State


class Algorithm(ABC):
    """Base of training methods: `match` says when, `apply` does it.

    Algorithms run before callbacks and loggers, sorted by `order` and then as they were given; at the events
    that end what a `BEFORE_*` event began (`AFTER_FORWARD` and the like), in the reverse order, so that they
    nest. `hocket.trainer.passes` has the rules.

    Attributes:
        events: The events that `match` can say yes to. With None, every event asks.
        order: Place among the algorithms of an event; lower numbers run earlier. It makes the order of the
            user's list irrelevant for algorithms that change the same things.
    """

    events: ClassVar[frozenset[Event] | None] = None
    order: int = 0

    @abstractmethod
    def match(self, event: Event, state: State) -> bool:
        """Whether to run now."""

    @abstractmethod
    def apply(self, event: Event, state: State, logger: Logger) -> int | None:
        """Run; what it returns is for the trace alone."""

    def conflict_with(self, other: Any) -> str | None:
        """Return why this algorithm cannot run together with `other`, and what to do; None if it can.

        Asked for every pair, in both directions, when the trainer is built.
        """
        return None

    @staticmethod
    def required_on_load() -> bool:
        """Whether it must be applied before a checkpoint of a run with it is loaded; no unless overridden."""
        return False

    def averaged_weights(self) -> Mapping[str, Tensor]:
        """Return averages of the model's tensors, by name; nothing unless overridden.

        A checkpoint of weights alone has them in place of the model's. A whole checkpoint has the weights
        that are trained, and the averages where `state_dict` has them.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state to keep in a checkpoint; nothing unless overridden."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - nothing to take by default
        """Take back what `state_dict` gave."""
