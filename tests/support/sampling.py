"""Selects the tests that a run executes.

A plain run takes everything unmarked, and of each test function marked `slow` one parameter set, drawn by a
seed that the pytest header prints; of one marked `slow(one_run_in=4)` it does so with one seed in four.
`-m slow` takes all of them. Tests marked `parity`, `stores` or `gpu` need something that a plain run does not
have, and run only when `-m` names their marker.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

SEED_VARIABLE = "HOCKET_TEST_SEED"
EXPRESSION_VARIABLE = "HOCKET_TEST_EXPRESSION"
ON_REQUEST = ("parity", "stores", "gpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The seed and the `-m` expression of a run."""

    seed: int
    """The seed that draws the parameter set of each slow test in a plain run."""
    expression: str
    """The `-m` expression, empty in a plain run."""

    def names(self, marker: str) -> bool:
        """Return whether the `-m` expression names `marker`, also after `not`."""
        return re.search(rf"\b{marker}\b", self.expression) is not None

    def asks_for(self, marker: str) -> bool:
        """Return whether the `-m` expression names `marker` without `not` before it."""
        return re.search(rf"(?<!\bnot ){marker}\b", self.expression) is not None


_plan: Plan | None = None


def start(config: pytest.Config) -> Plan:
    """Read the seed and the `-m` expression once, before any test module is imported.

    The plan is put into the environment, so that the run's processes, which import test modules too, draw the
    same sets.

    Raises:
        pytest.UsageError: The seed in the environment is not an integer.
    """
    global _plan
    text = os.environ.get(SEED_VARIABLE, "")
    try:
        seed = int(text) if text else random.SystemRandom().randrange(2**32)
    except ValueError:
        raise pytest.UsageError(
            f"`{SEED_VARIABLE}` is {text!r}; expected an integer, as the header of a run prints it"
        ) from None
    _plan = Plan(seed=seed, expression=config.option.markexpr or "")
    os.environ[SEED_VARIABLE] = str(seed)
    os.environ[EXPRESSION_VARIABLE] = _plan.expression
    return _plan


def plan() -> Plan:
    """Return the plan of the current run.

    Raises:
        RuntimeError: No pytest run with `support.plugin` has started.
    """
    if _plan is not None:
        return _plan
    if EXPRESSION_VARIABLE in os.environ:
        return Plan(seed=int(os.environ[SEED_VARIABLE]), expression=os.environ[EXPRESSION_VARIABLE])
    raise RuntimeError("no test run has started; expected `pytest_plugins = ['support.plugin']` to be loaded")


def cases(*, full: int, sample: int) -> int:
    """Return the number of cases that a slow property test draws in this run.

    Works while a module is imported, so it fits in a decorator:
    `@settings(max_examples=cases(full=10_000, sample=50))`.

    Args:
        full: Number of cases under `-m slow`.
        sample: Number of cases in any other run.
    """
    return full if plan().asks_for("slow") else sample


def select(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split `items` into those this run takes and the parameter sets of slow tests that it leaves out."""
    if plan().names("slow"):
        return items, []
    by_function: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            by_function.setdefault(_function_id(item), []).append(item)
    due = {name: sets for name, sets in by_function.items() if _is_due(name, sets[0])}
    drawn = {id(_draw(name, sets)) for name, sets in due.items()}
    selected = [item for item in items if not item.get_closest_marker("slow") or id(item) in drawn]
    deselected = [item for item in items if item.get_closest_marker("slow") and id(item) not in drawn]
    return selected, deselected


def skip_unasked(items: Sequence[pytest.Item]) -> None:
    """Skip tests whose marker must be named by `-m` and is not; the reason contains the command."""
    for item in items:
        for marker in ON_REQUEST:
            if item.get_closest_marker(marker) and not plan().names(marker):
                item.add_marker(pytest.mark.skip(reason=f"run with `uv run pytest -m {marker}`"))


def _function_id(item: pytest.Item) -> str:
    name = getattr(item, "originalname", None) or item.name
    return item.nodeid.removesuffix(item.name) + name


def _is_due(function: str, item: pytest.Item) -> bool:
    """Return whether the seed is one with which a plain run takes a function."""
    marker = item.get_closest_marker("slow")
    assert marker is not None
    return _number(f"due:{function}") % marker.kwargs.get("one_run_in", 1) == 0


def _draw(function: str, sets: list[pytest.Item]) -> pytest.Item:
    ordered = sorted(sets, key=lambda item: item.nodeid)
    return ordered[_number(function) % len(ordered)]


def _number(name: str) -> int:
    """Return a number that depends on the seed and a name, and not on the other collected tests."""
    digest = hashlib.sha256(f"{plan().seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
