"""The pytest plugin of this workspace, loaded by `addopts`: sampling, leak checks, server fixtures."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Generator, Iterator

import pytest

from support import leaks, sampling, servers
from support.s3d import Server, ServerError, build
from support.servers import azurite, fake_gcs, minio, versitygw
from support.spark import spark

__all__ = ["azurite", "fake_gcs", "minio", "spark", "versitygw"]  # fixtures

FAILED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Fix the seed of this run, and handle Ctrl-C even if a shell started pytest in the background."""
    sampling.start(config)
    # Without bytecode each of the hundreds of ranks compiles torch again, for 15 s of processor time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Options of this run are not those of a pytest that a test starts.
    os.environ.pop("PYTEST_ADDOPTS", None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """Return the header line with the seed that draws the slow tests."""
    plan = sampling.plan()
    selection = "as -m says" if plan.names("slow") else "one parameter set each (all: `-m slow`)"
    return f"slow tests: {selection}; {sampling.SEED_VARIABLE}={plan.seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect undrawn parameter sets of slow tests, and skip tests whose marker `-m` must name."""
    selected, deselected = sampling.select(items)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = selected
    sampling.skip_unasked(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build or install servers before the first test, because this may exceed a test's time limit."""
    if session.config.option.collectonly:
        return
    # The fixture reports a failure, to the tests that request it.
    is_needed = any(
        {"s3d", "s3d_faults", "gcs"} & set(getattr(item, "fixturenames", ())) for item in session.items
    )
    if is_needed:
        with contextlib.suppress(FileNotFoundError, ServerError, subprocess.TimeoutExpired):
            build()
    if sampling.plan().asks_for("stores"):
        store_tests = [item for item in session.items if item.get_closest_marker("stores")]
        for fixture in servers.FIXTURES.keys() & {name for item in store_tests for name in _fixtures(item)}:
            with contextlib.suppress(servers.MissingToolError, subprocess.SubprocessError):
                servers.install(servers.FIXTURES[fixture])


def _fixtures(item: pytest.Item) -> set[str]:
    """Return the fixtures that a test requests, and those that its parameters name."""
    parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
    return {*getattr(item, "fixturenames", ()), *(name for name in parameters if isinstance(name, str))}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record that a test failed, for `no_leaks`."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves threads, processes, files or environment behind.

    A failed test is not checked, because its traceback keeps its objects alive.
    """
    before = leaks.snapshot()
    yield
    try:
        if FAILED not in request.node.stash:
            leaks.check(before)
    finally:
        leaks.restore(before)


@pytest.fixture
def cases() -> Callable[..., int]:
    """Return the function `cases(full=10_000, sample=50)`, the number of cases of a slow test in this run."""
    return sampling.cases


@pytest.fixture(scope="session")
def s3d() -> Iterator[Server]:
    """Return a server for the whole run, without faults; a test must use a prefix of its own."""
    _build_or_skip()
    with Server() as server:
        leaks.keep_process(server.pid)
        yield server
    leaks.release_process(server.pid)


@pytest.fixture(scope="session")
def gcs() -> Iterator[Server]:
    """Return a server of Google's XML API for the whole run, without faults."""
    _build_or_skip()
    with Server(mode="gcs") as server:
        leaks.keep_process(server.pid)
        yield server
    leaks.release_process(server.pid)


@pytest.fixture
def s3d_faults() -> Iterator[Callable[..., Server]]:
    """Return `s3d_faults("kind=slowdown,rate=0.05", seed=1)`, which starts a server for one test."""
    _build_or_skip()
    with contextlib.ExitStack() as stack:
        yield lambda *rules, **settings: stack.enter_context(Server(*rules, **settings))


def _build_or_skip() -> None:
    try:
        build()
    except FileNotFoundError as error:
        pytest.skip(str(error))
