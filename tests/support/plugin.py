"""The pytest plugin of this workspace; `addopts` loads it."""

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

__all__ = ["azurite", "fake_gcs", "minio", "versitygw"]  # fixtures

FAILED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Fix the seed of this run, and hear Ctrl-C even where a shell started it in the background."""
    sampling.start(config)
    # Without bytecode each of the hundreds of ranks compiles torch again, for 15 s of processor time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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


def pytest_collection_finish(session: pytest.Session) -> None:
    """Get the servers before the first test that needs them: a cold build outlasts a test's time limit."""
    if session.config.option.collectonly:
        return
    # What goes wrong is told by the fixture, for the tests that ask for it.
    is_needed = any(
        {"s3d", "s3d_faults", "gcs"} & set(getattr(item, "fixturenames", ())) for item in session.items
    )
    if is_needed:
        with contextlib.suppress(FileNotFoundError, ServerError, subprocess.TimeoutExpired):
            build()
    if sampling.plan().asks_for("stores"):
        asked = [item for item in session.items if item.get_closest_marker("stores")]
        for fixture in servers.FIXTURES.keys() & {name for item in asked for name in _fixtures(item)}:
            with contextlib.suppress(servers.MissingToolError, subprocess.SubprocessError):
                servers.install(servers.FIXTURES[fixture])


def _fixtures(item: pytest.Item) -> set[str]:
    """The fixtures that a test names, and those that its parameters name."""
    parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
    return {*getattr(item, "fixturenames", ()), *(name for name in parameters if isinstance(name, str))}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note that a test failed, for `no_leaks`."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves threads, processes, files or environment behind.

    One that failed already is not looked at: its traceback keeps everything alive that it held.
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
    """How many cases a slow test draws in this run: `cases(full=10_000, sample=50)`."""
    return sampling.cases


@pytest.fixture(scope="session")
def s3d() -> Iterator[Server]:
    """A server for the whole run, without faults; use a prefix of your own in `s3d.bucket`."""
    _build_or_skip()
    with Server() as server:
        leaks.keep_process(server.pid)
        yield server
    leaks.release_process(server.pid)


@pytest.fixture(scope="session")
def gcs() -> Iterator[Server]:
    """The same server speaking Google's XML API, for the whole run."""
    _build_or_skip()
    with Server(mode="gcs") as server:
        leaks.keep_process(server.pid)
        yield server
    leaks.release_process(server.pid)


@pytest.fixture
def s3d_faults() -> Iterator[Callable[..., Server]]:
    """`s3d_faults("kind=slowdown,rate=0.05", seed=1)`: a server of this test's own, with faults."""
    _build_or_skip()
    with contextlib.ExitStack() as stack:
        yield lambda *rules, **settings: stack.enter_context(Server(*rules, **settings))


def _build_or_skip() -> None:
    try:
        build()
    except FileNotFoundError as error:
        pytest.skip(str(error))
