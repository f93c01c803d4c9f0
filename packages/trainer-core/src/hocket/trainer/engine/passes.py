"""Passes: functions that decide the order in which algorithms run at an event.

Three passes run by default, in this order:

1. `sort_by_order` sorts algorithms by their `order`, so that the result does not depend on the list that the
   user wrote: SelectiveBackprop (low) sees the data before other methods change it, low-precision norms
   (high) come last.
2. The passes of `Trainer(algorithm_passes=…)`.
3. `nest` reverses the algorithms at events that end what a `BEFORE_*` event began, so that the first to
   change something is the last to restore it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import permutations
from typing import Any

from hocket.trainer.algorithm import Algorithm
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.event import Event

AlgorithmPass = Callable[[Sequence[Any], Event], Sequence[Any]]
"""A function `(algorithms, event) -> algorithms` that returns all or some of them in running order."""

# Events that end what a `BEFORE_*` event began. AFTER_DATALOADER and AFTER_LOAD are not among them: no
# algorithm changes anything at the `BEFORE_*` events of the data loader and the checkpoint.
NESTED_EVENTS = frozenset(
    {
        Event.AFTER_FORWARD,
        Event.AFTER_LOSS,
        Event.AFTER_BACKWARD,
        Event.AFTER_TRAIN_BATCH,
        Event.EVAL_AFTER_FORWARD,
        Event.EVAL_AFTER_ALL,
        Event.PREDICT_AFTER_FORWARD,
    }
)


def sort_by_order(
    algorithms: Sequence[Algorithm],
    event: Event,  # noqa: ARG001 - as every pass takes it
) -> Sequence[Algorithm]:
    """Sort algorithms by their `order`, lowest first; algorithms of equal order stay as given."""
    return sorted(algorithms, key=_order_of)


def nest(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Reverse algorithms at the events that end what a `BEFORE_*` event began."""
    return algorithms[::-1] if event in NESTED_EVENTS else algorithms


def make_passes(given: Any = None) -> list[AlgorithmPass]:
    """Merge the user's passes with the default ones.

    Args:
        given: None, a pass, a pair (pass, index), or a sequence of these. A pass without an index runs
            after sorting and before nesting; an index is a position among the passes, as for `list.insert`.

    Raises:
        TrainerConfigError: If a pass is not callable.
    """
    passes: list[AlgorithmPass] = [sort_by_order, nest]
    for entry in [] if given is None else [given] if callable(given) or _is_indexed(given) else given:
        algorithm_pass, index = entry if _is_indexed(entry) else (entry, len(passes) - 1)
        if not callable(algorithm_pass):
            raise TrainerConfigError(
                f"`algorithm_passes` has {algorithm_pass!r}; expected a function (algorithms, event) -> "
                "algorithms, or a pair of one and an index"
            )
        passes.insert(index, algorithm_pass)
    return passes


def run_passes(algorithms: Iterable[Any], event: Event, passes: Iterable[AlgorithmPass]) -> Sequence[Any]:
    """Return the algorithms in the order in which they run at `event`."""
    ordered: Sequence[Any] = list(algorithms)
    for algorithm_pass in passes:
        ordered = algorithm_pass(ordered, event)
    return ordered


def check_pairs(algorithms: Sequence[Any]) -> None:
    """Raise for algorithms that cannot be used together.

    Raises:
        TrainerConfigError: If `conflict_with` of an algorithm returns a reason against another algorithm, or
            both average the model's weights.
    """
    for algorithm, other in permutations(algorithms, 2):
        conflict_with = getattr(algorithm, "conflict_with", None)
        reason = None if conflict_with is None else conflict_with(other)
        if not reason and averages_weights(algorithm) and averages_weights(other):
            reason = "each has its own average of the weights, and a checkpoint stores one; keep one of them"
        if reason and isinstance(reason, str):
            names = f"`{type(algorithm).__name__}` and `{type(other).__name__}`"
            raise TrainerConfigError(f"{names} cannot be used together: {reason}")


def averages_weights(algorithm: Any) -> bool:
    """Return whether an algorithm has an `averaged_weights` of its own."""
    own = getattr(type(algorithm), "averaged_weights", Algorithm.averaged_weights)
    return own is not Algorithm.averaged_weights


def _order_of(algorithm: Any) -> float:
    order = getattr(algorithm, "order", 0)
    # A mock object of a test, such as `unittest.mock.Mock`, has any attribute.
    return order if isinstance(order, (int, float)) else 0


def _is_indexed(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], int)
