"""`Algorithm`: a training method that changes the run at the events it matches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from hocket.trainer.checks import Described
from hocket.trainer.event import Event

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State


class Algorithm(Described, ABC):
    """Base class of training methods: `events` and `match` decide when to run, and `apply` runs.

    Algorithms run before callbacks and loggers, sorted by `order` and then as they were given. At the events
    that end what a `BEFORE_*` event began (`AFTER_FORWARD` and the like) they run in the reverse order, so
    that they nest; see `hocket.trainer.engine.passes`.

    Attributes:
        events: The events at which to run, or at which a `match` may return True; None for all events.
        order: Position among the algorithms of an event; lower numbers run earlier. It makes the order of the
            user's list irrelevant for algorithms that change the same things.
    """

    events: ClassVar[frozenset[Event] | None] = None
    order: int = 0

    def match(self, event: Event, state: State) -> bool:
        """Return whether to run at this event; at all of `events` unless overridden.

        Raises:
            TypeError: If the class states neither `events` nor a `match`.
        """
        if self.events is None:
            name = type(self).__name__
            raise TypeError(f"`{name}` has neither `events` nor `match`; set one of them to say when it runs")
        return event in self.events

    @abstractmethod
    def apply(self, event: Event, state: State, logger: Logger) -> int | None:
        """Run the training method; the return value is not used."""

    def conflict_with(self, other: Any) -> str | None:
        """Return why this algorithm cannot run together with `other`, and what to do; None if it can.

        Called for every pair, in both directions, when the trainer is built.
        """
        return None

    @staticmethod
    def required_on_load() -> bool:
        """Return whether the algorithm must be applied before a checkpoint of a run with it is loaded.

        False unless overridden.
        """
        return False

    def abandon_evaluation(self, state: State) -> None:
        """Restore what was changed for an evaluation or a prediction that an exception has ended.

        Called in place of the events that would have ended it. It must not communicate with other ranks,
        since the exception may be of this rank alone. With `state.evaluation_depth` above 1, the evaluation
        is within another one, which may go on.
        """

    def averaged_weights(self) -> Mapping[str, Tensor]:
        """Return averages of the model's tensors, by name; nothing unless overridden.

        A weights-only checkpoint stores the averages in place of the model's tensors. A whole checkpoint
        stores the trained weights, and the averages only as part of `state_dict`.
        """
        return {}

    def trained_weights(self) -> Mapping[str, Tensor]:
        """Return the trained tensors that others replace now, by name; nothing unless overridden.

        A whole checkpoint that is saved meanwhile, such as one of a callback in an evaluation, stores them.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state to keep in a checkpoint; nothing unless overridden."""
        return {}

    def state_to_fill(self) -> dict[str, Any]:
        """Return the tree that a checkpoint's state is loaded into; `state_dict` unless overridden.

        An algorithm whose state may have other tensors in the checkpoint puts a `SlotsLike` in their place.
        """
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
