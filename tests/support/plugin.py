"""The pytest plugin of this workspace; `packages/conftest.py` and `tests/conftest.py` load it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support import leaks, sampling
from support.s3d import s3d, s3d_faults

__all__ = ["cases", "no_leaks", "s3d", "s3d_faults"]


def pytest_configure(config: pytest.Config) -> None:
    """Fix the seed of this run."""
    sampling.start(config)


def pytest_report_header() -> str:
    """Say which seed draws the slow tests, and how to draw the same again."""
    plan = sampling.plan()
    taken = "as -m says" if plan.names("slow") else "one parameter set each (all: `-m slow`)"
    return f"slow tests: {taken}; {sampling.SEED_VARIABLE}={plan.seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the parameter sets of slow tests that were not drawn, and skip what `-m` must name."""
    kept, left = sampling.select(items)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
    sampling.skip_unasked(items)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves threads, processes, files or environment behind."""
    with leaks.no_leaks():
        yield


@pytest.fixture
def cases() -> Callable[..., int]:
    """How many cases a slow test draws in this run: `cases(full=10_000, sample=50)`."""
    return sampling.cases
