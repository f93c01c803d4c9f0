"""The order in which algorithms run, for any order of the user's list, and conflicting algorithms."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from hocket.trainer import Algorithm, Event
from hocket.trainer.engine.passes import NESTED_EVENTS, make_passes, run_passes
from hocket.trainer.errors import TrainerConfigError
from support.training import loader, make


class Noting(Algorithm):
    def __init__(self, name: str, notes: list[tuple[str, Event]], order: int = 0) -> None:
        self.name, self.notes, self.order = name, notes, order

    def match(self, event: Event, state: Any) -> bool:
        return True

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        self.notes.append((self.name, event))

    def conflict_with(self, other: Any) -> str | None:
        is_rival = self.name == "a" and getattr(other, "name", "") == "rival"
        return "both count; remove one of them" if is_rival else None


def _heard(algorithms: list[Noting], notes: list[tuple[str, Event]], **arguments: Any) -> dict[Event, str]:
    with make(
        train_dataloader=loader(4, 4), algorithms=algorithms, max_duration="1ba", **arguments
    ) as trainer:
        trainer.fit()
    heard: dict[Event, str] = {}
    for name, event in notes:
        heard[event] = heard.get(event, "") + name
    return heard


def test_algorithms_run_in_reverse_at_events_that_close_earlier_ones():
    notes: list[tuple[str, Event]] = []
    heard = _heard([Noting(name, notes) for name in "abcd"], notes)
    for event, names in heard.items():
        assert names[:4] == ("dcba" if event in NESTED_EVENTS else "abcd"), event
    assert heard[Event.AFTER_DATALOADER] == heard[Event.AFTER_LOAD] == "abcd"
    assert heard[Event.AFTER_LOSS] == heard[Event.AFTER_TRAIN_BATCH] == "dcba"


def test_algorithms_are_sorted_by_their_order_attribute():
    for names in permutations("abc"):
        notes: list[tuple[str, Event]] = []
        orders = {"a": -5, "b": 0, "c": 7}
        heard = _heard([Noting(name, notes, orders[name]) for name in names], notes)
        assert heard[Event.AFTER_DATALOADER] == heard[Event.INIT] == "abc"
        assert heard[Event.AFTER_LOSS] == "cba"


def test_a_users_pass_runs_after_sorting_and_before_nesting():
    def last_first(algorithms: Any, event: Event) -> Any:
        return [algorithms[-1], *algorithms[:-1]]

    notes: list[tuple[str, Event]] = []
    heard = _heard([Noting(name, notes) for name in "abc"], notes, algorithm_passes=last_first)
    assert (heard[Event.BEFORE_LOSS], heard[Event.AFTER_LOSS]) == ("cab", "bac")


def test_a_pass_may_remove_algorithms_and_have_a_position():
    def without_a(algorithms: Any, event: Event) -> Any:
        return [one for one in algorithms if one.name != "a"]

    notes: list[tuple[str, Event]] = []
    heard = _heard([Noting(name, notes) for name in "abc"], notes, algorithm_passes=[(without_a, 0)])
    assert (heard[Event.BEFORE_LOSS], heard[Event.AFTER_LOSS]) == ("bc", "cb")
    assert [one.__name__ for one in make_passes([(without_a, 0)])] == ["without_a", "sort_by_order", "nest"]


def test_an_invalid_pass_raises_with_its_type():
    with pytest.raises(TrainerConfigError, match=r"`algorithm_passes` has 'fifo'; expected a function"):
        make_passes(["fifo"])


@pytest.mark.parametrize("turned", [False, True])
def test_conflicting_algorithms_raise_when_the_trainer_is_built(turned: bool):
    pair = [Noting("a", []), Noting("rival", [])]
    message = r"`Noting` and `Noting` cannot be used together: both count; remove one of them"
    with pytest.raises(TrainerConfigError, match=message):
        make(train_dataloader=loader(4, 4), algorithms=pair[::-1] if turned else pair)


def test_an_algorithm_added_later_is_checked_for_conflicts():
    with (
        make(train_dataloader=loader(4, 4), algorithms=Noting("a", [])) as trainer,
        pytest.raises(TrainerConfigError, match="cannot be used together"),
    ):
        trainer.state.algorithms.append(Noting("rival", []))


def test_an_algorithm_without_the_base_class_has_order_zero():
    class Plain:
        pass

    low, high, plain = Noting("low", [], -1), Noting("high", [], 1), Plain()
    assert list(run_passes([high, plain, low], Event.INIT, make_passes())) == [low, plain, high]


class HalvesLoss(Algorithm):
    events = frozenset({Event.BEFORE_LOSS, Event.AFTER_LOSS})

    def __init__(self) -> None:
        self.heard: list[Event] = []

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        self.heard.append(event)


def test_an_algorithm_without_a_match_runs_at_its_events():
    halves = HalvesLoss()
    with make(train_dataloader=loader(8, 4), algorithms=halves, max_duration="2ba") as trainer:
        trainer.fit()
    assert halves.heard == [Event.BEFORE_LOSS, Event.AFTER_LOSS] * 2


def test_an_algorithm_with_neither_events_nor_match_is_refused_by_name():
    class Aimless(HalvesLoss):
        events = None

    with pytest.raises(TypeError, match="`Aimless` has neither `events` nor `match`"):
        make(train_dataloader=loader(4, 4), algorithms=Aimless())
