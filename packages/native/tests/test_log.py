"""Retries, slow requests and fall-backs of the Rust layer in Python's `logging`."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from hocket.native import Store
from support.s3d import Server

NAME = "hocket.native.store"


@pytest.fixture
def serve(s3d_faults: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Server]:
    def start(*rules: str) -> Server:
        server = s3d_faults(*rules)
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        return server

    return start


def test_retries_and_slow_requests_are_logged_below_warning(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve("kind=slowdown,op=PutObject,times=2", "kind=latency,op=GetObject,ms=2050,times=1")
    store = Store(server.uri("p"), backoff_ms=(1, 20))
    caplog.set_level(logging.INFO, logger="hocket")
    store.put("a", b"x")
    retries = [record for record in caplog.records if record.name == NAME]
    assert [record.levelno for record in retries] == [logging.INFO] * 2
    uri = server.uri("p/a")
    for number, record in enumerate(retries, start=1):
        assert record.getMessage().startswith(f"`{uri}`: attempt {number} failed: HTTP 503, SlowDown")
    caplog.clear()
    assert store.get("a") == b"x"
    (slow,) = caplog.records
    assert slow.getMessage().startswith(f"`{uri}`: a request for 1 bytes took 2."), slow.getMessage()


class Recursive(logging.Handler):
    """A handler that stores each message, and fails once it has."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.count = 0

    def handle(self, record: logging.LogRecord) -> bool:
        self.count += 1
        self.store.put(f"log-{self.count}", record.getMessage().encode())
        raise ValueError("the handler failed")


def test_a_handler_may_make_requests_and_fail(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve("kind=slowdown,op=PutObject,times=3")
    store = Store(server.uri("p"), backoff_ms=(1, 2))
    reports: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reports.append(report.exc_value))
    handler, logger = Recursive(store), logging.getLogger(NAME)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        store.put("a", b"x")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert store.get("a") == b"x"
    assert handler.count == 3
    assert sorted(meta.key for meta in store.list()) == ["a", "log-1", "log-2", "log-3"]
    assert [str(report) for report in reports] == ["the handler failed"] * 3


SCRIPT = """
import logging, os, sys
from hocket.native import Store
logging.basicConfig(level=logging.INFO, format="%(process)d %(name)s %(message)s")
store = Store(sys.argv[1], backoff_ms=(1, 2), max_retries=20)
store.put("a", b"x")
child = os.fork()
if child == 0:
    store.put("b", b"x")
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
print(os.getpid(), child)
"""


def test_a_forked_child_logs_its_own_retries_alone(serve: Callable[..., Server]) -> None:
    server = serve(*(f"kind=500,op=PutObject,key=*/{key},times=1" for key in "ab"))
    done = subprocess.run(
        # From 3.12 on Python warns of a fork beside threads.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SCRIPT, server.uri("f")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 3) for line in done.stderr.splitlines()]
    parent, child = done.stdout.split()
    found = [(process, name, uri) for process, name, uri, _ in lines]
    assert found == [(parent, NAME, f"`{server.uri('f/a')}`:"), (child, NAME, f"`{server.uri('f/b')}`:")]


@pytest.mark.parametrize("flags", [[], ["-v"]])
def test_the_commands_show_retries_with_v(serve: Callable[..., Server], flags: list[str]) -> None:
    pytest.importorskip("hocket.ckpt", reason="the command is in another package")
    server = serve("kind=slowdown,times=1")
    done = subprocess.run(
        [sys.executable, "-m", "hocket.ckpt", *flags, "ls", server.uri("none")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **server.env},
    )
    assert server.stats()["faults"]
    is_shown = f"INFO {NAME}: `{server.uri('none')}" in done.stderr
    assert is_shown == bool(flags), done.stderr
