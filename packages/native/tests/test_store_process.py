"""A store works in child processes and threads, also after its parent has read, and handles signals."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hocket.native import Store, errors
from support.s3d import Server

DATA = bytes(range(256)) * 2048
PART = 64 << 10


@pytest.fixture
def remote(s3d: Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Store:
    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    store = Store(s3d.uri(request.node.name.replace("[", "-").rstrip("]")), part_bytes=PART)
    store.put("k", DATA)
    return store


def read_equal(store: Store, times: int) -> bool:
    return all(store.get("k") == DATA for _ in range(times))


def memory_is_empty(store: Store) -> bool:
    return store.list() == [] and store.put("own", b"x") is not None


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_children_read_after_their_parent_has_read(remote: Store, method: str, tmp_path: Path) -> None:
    assert remote.get("k") == DATA
    _stop_forkserver(method)  # another test's has another environment
    context = multiprocessing.get_context(method)
    # The target is a method of the extension, because a spawned child cannot import a test module.
    paths = [tmp_path / f"copy-{index}" for index in range(2)]
    children = [context.Process(target=Store.download, args=(remote, "k", path)) for path in paths]
    for child in children:
        child.start()
    for child, path in zip(children, paths, strict=True):
        child.join(60)
        assert child.exitcode == 0
        assert path.read_bytes() == DATA
        child.close()
    assert remote.get("k") == DATA
    _stop_forkserver(method)


def test_children_forked_while_other_threads_read_can_read(remote: Store) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                assert remote.get("k") == DATA
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(8):
            assert _in_fork(lambda: read_equal(remote, 1))
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert failures == []


def test_a_grandchild_reads(remote: Store) -> None:
    assert remote.get("k") == DATA
    assert _in_fork(lambda: read_equal(remote, 1) and _in_fork(lambda: read_equal(remote, 1)))


def test_a_forked_child_has_its_own_memory_store() -> None:
    store = Store("memory://forked")
    store.put("k", b"parent")
    assert _in_fork(lambda: memory_is_empty(store))
    assert [meta.key for meta in store.list()] == ["k"]


def test_many_threads_share_a_store(remote: Store) -> None:
    outcomes: list[bool] = []
    threads = [threading.Thread(target=lambda: outcomes.append(read_equal(remote, 5))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == [True] * 8


def test_threads_have_names_that_begin_with_hocket(remote: Store) -> None:
    remote.get("k")
    names = {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    assert any(name.startswith("hocket-") for name in names), names


@pytest.mark.parametrize("verb", ["get", "put", "list", "download"])
def test_ctrl_c_ends_a_wait_within_100_ms(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, Callable[[Store], object]] = {
        "get": lambda store: store.get("k"),
        "put": lambda store: store.put("k", b"x"),
        "list": lambda store: store.list(),
        "download": lambda store: store.download("k", tmp_path / "x"),
    }
    with silent_server(monkeypatch) as store:
        # Designed for 50 ms. One of up to 30 attempts must be in time, because a busy machine may delay some.
        late_s: list[float] = []
        while not late_s or (late_s[-1] >= 0.1 and len(late_s) < 30):
            late_s.append(_seconds_to_interrupt(lambda: calls[verb](store)))
    assert min(late_s) < 0.1, late_s


def test_a_signal_without_an_exception_does_not_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with silent_server(monkeypatch, timeout_s=0.6) as store:
            timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            with pytest.raises(errors.StoreTransientError):
                store.head("k")
            timer.join(5)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]


def test_ctrl_c_does_not_end_a_wait_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[BaseException] = []

    with silent_server(monkeypatch, timeout_s=1.0) as store:

        def wait() -> None:
            try:
                store.head("k")
            except BaseException as error:  # noqa: BLE001
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        thread.join(10)
    assert [type(error) for error in caught] == [errors.StoreTransientError]


def test_an_upload_that_was_killed_is_not_listed_and_the_next_process_removes_it(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "store"
    with source.open("wb") as file:
        file.truncate(4 << 30)  # takes no disk, and longer to copy than to be seen
    code = f"from hocket.native import Store; Store({str(folder)!r}).upload('k', {str(source)!r})"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        deadline = time.monotonic() + 60
        while not (folder.is_dir() and list(folder.iterdir())):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        child.kill()
    assert child.returncode == -signal.SIGKILL
    [left] = folder.iterdir()
    store = Store(str(folder))
    assert store.list() == []
    source.write_bytes(DATA)
    store.upload("k", source)
    assert [path.name for path in folder.iterdir()] == ["k"], left
    assert store.get("k") == DATA


@contextmanager
def silent_server(monkeypatch: pytest.MonkeyPatch, timeout_s: float = 30) -> Iterator[Store]:
    """Yield a store whose server accepts connections and never answers."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        yield Store("s3://bucket", endpoint=endpoint, timeout_s=timeout_s, max_retries=0)


def _seconds_to_interrupt(wait: Callable[[], object]) -> float:
    """Return the seconds from Ctrl-C to the `KeyboardInterrupt` out of `wait`."""
    sent: list[float] = []

    def interrupt() -> None:
        time.sleep(0.1)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        wait()
    late_s = time.monotonic() - sent[0]
    thread.join(60)
    return late_s


def _in_fork(check: Callable[[], bool], timeout_s: float = 120) -> bool:
    """Return whether `check` holds in a forked child; a child that hangs is killed and fails."""
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            status = 0 if check() else 1
        finally:
            os._exit(status)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def _stop_forkserver(method: str) -> None:
    """End the fork server and the resource tracker, which outlive a test."""
    if method != "fork":
        from multiprocessing import forkserver, resource_tracker

        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
