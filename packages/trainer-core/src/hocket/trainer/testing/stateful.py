"""The suite of `Stateful`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hocket.trainer.protocols import Stateful
from hocket.trainer.testing.trees import describe_difference, snapshot

T = TypeVar("T", bound=Stateful)


def check_stateful(
    make: Callable[[], T],
    advance: Callable[[T], object] = lambda _: None,
    *,
    observe: Callable[[T], Any] | None = None,
    num_advances: int = 3,
) -> None:
    """Check that an object continues from its state as if it had never stopped.

    Args:
        make: A function that returns a fresh object, the same each time.
        advance: A function that moves an object on: takes the next batch, steps, counts.
        observe: A function that returns the next results of the object, in values that compare equal; the
            state itself by default.
        num_advances: Number of moves; the state is checked before the first move and after each one.

    Raises:
        AssertionError: If the object does not, with the part of the state that differs.
    """
    watch = observe or (lambda one: snapshot(one.state_dict()))
    original = make()
    for method in ("state_dict", "load_state_dict"):
        assert callable(getattr(original, method, None)), (
            f"`{type(original).__name__}` has no method `{method}`"
        )
    for num_moves in range(num_advances + 1):
        state = original.state_dict()
        assert isinstance(state, dict), f"`state_dict` returned a `{type(state).__name__}`; expected a dict"
        expected = snapshot(state)
        resumed = make()
        resumed.load_state_dict(snapshot(state))
        difference = describe_difference(expected, resumed.state_dict())
        assert difference is None, (
            f"after {num_moves} moves, the state loaded into a fresh object is another: {difference}"
        )

        loaded = snapshot(state)
        moved = make()
        advance(moved)
        moved.load_state_dict(loaded)
        difference = describe_difference(expected, moved.state_dict())
        assert difference is None, (
            f"after {num_moves} moves, loading into an object that moved leaves a trace: {difference}"
        )
        advance(moved)
        difference = describe_difference(expected, loaded)
        assert difference is None, (
            f"the object keeps and changes the dict given to `load_state_dict`: {difference}"
        )

        # Last, since `advance` and `observe` may both move the original.
        advance(original)
        difference = describe_difference(expected, state)
        assert difference is None, (
            f"`state_dict` returned live parts, which the object then changed: {difference}"
        )
        advance(resumed)
        difference = describe_difference(watch(original), watch(resumed))
        assert difference is None, (
            f"resumed after {num_moves} moves, the object goes on differently: {difference}"
        )
