"""S3 with faults: failed and lost responses, replaced objects, unreachable servers, wrong settings."""

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from hocket.native import Store, errors
from support.s3d import Server

PART = 64 << 10
MULTIPART = 9 << 20  # two parts of at least 5 MiB
QUICK = {"part_bytes": PART, "backoff_ms": (1, 20)}
Faults = Callable[..., Server]


@pytest.fixture
def serve(s3d_faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Return `s3d_faults`, with the server's address and keys set in the environment."""

    def start(*rules: str, **settings: int) -> Server:
        server = s3d_faults(*rules, **settings)
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        return server

    return start


def write(path: Path, size: int, seed: int = 0) -> bytes:
    data = random.Random(seed).randbytes(size)
    path.write_bytes(data)
    return data


def test_five_percent_of_each_fault_change_no_byte(serve: Faults, tmp_path: Path) -> None:
    server = serve(*(f"kind={kind},rate=0.05" for kind in ("500", "slowdown", "reset", "short_body")), seed=3)
    store = Store(server.uri("p"), **QUICK)
    data = write(tmp_path / "source", MULTIPART)
    store.upload("big", tmp_path / "source")
    assert store.get("big") == data
    store.download("big", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data
    for index in range(40):
        store.put(f"small/{index:02}", data[index : 2 * index])
    for index in range(40):
        assert store.get(f"small/{index:02}") == data[index : 2 * index]
        assert store.get("big", start=index * 1000, end=index * 5000) == data[index * 1000 : index * 5000]
    assert [meta.key for meta in store.list("small")] == [f"small/{index:02}" for index in range(40)]
    counts = server.stats()["faults"]
    assert all(counts[kind] >= 5 for kind in ("500", "slowdown", "reset", "short_body")), counts


def test_a_broken_response_is_continued_where_it_stopped(serve: Faults) -> None:
    server = serve()
    store = Store(server.uri("p"), **{**QUICK, "part_bytes": 4 << 20})
    data = random.Random(0).randbytes(3 << 20)
    store.put("k", data)
    server.set_faults("kind=short_body,op=GetObject,times=1")
    server.reset()
    assert store.get("k", start=0, end=len(data)) == data
    stats = server.stats()
    assert stats["requests"] == {"GetObject": 2}
    assert stats["bytes_sent"] < 1.1 * len(data)


@pytest.mark.parametrize("before", ["nothing", "other content of the same size", "the same content"])
@pytest.mark.parametrize("fault", ["lost_reply", "500", "reset"])
def test_a_lost_reply_to_a_completed_upload_is_resolved(
    serve: Faults, tmp_path: Path, before: str, fault: str
) -> None:
    server = serve()
    store = Store(server.uri("p"), **QUICK)
    data = write(tmp_path / "source", MULTIPART)
    if before != "nothing":
        write(tmp_path / "before", MULTIPART, seed=1 if before.startswith("other") else 0)
        store.upload("k", tmp_path / "before")
    server.set_faults(f"kind={fault},op=CompleteMultipartUpload,times=1")
    meta = store.upload("k", tmp_path / "source")
    assert server.stats()["faults"] == {fault: 1}
    assert meta.size == MULTIPART
    assert meta.etag == store.head("k").etag
    assert store.get("k") == data
    assert "AbortMultipartUpload" not in server.stats()["requests"]


def test_a_failed_upload_is_aborted_and_leaves_the_old_object(serve: Faults, tmp_path: Path) -> None:
    server = serve()
    store = Store(server.uri("p"), max_retries=1, backoff_ms=(1, 5))
    store.put("k", b"old")
    write(tmp_path / "source", MULTIPART)
    server.set_faults("kind=500,op=UploadPart,after=1")
    with pytest.raises(errors.StoreTransientError, match="500"):
        store.upload("k", tmp_path / "source")
    assert store.get("k") == b"old"
    _wait_until(lambda: server.stats()["requests"].get("AbortMultipartUpload", 0) == 1)


def test_an_interrupted_upload_is_aborted(serve: Faults, tmp_path: Path) -> None:
    server = serve("kind=latency,ms=20000,op=UploadPart")  # long: the interrupt comes during the upload
    write(tmp_path / "source", MULTIPART)

    def interrupt() -> None:
        _wait_until(lambda: server.stats()["requests"].get("UploadPart", 0) > 0)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        Store(server.uri("p")).upload("k", tmp_path / "source")
    thread.join(10)
    _wait_until(lambda: server.stats()["requests"].get("AbortMultipartUpload", 0) == 1)


def test_a_failed_completion_raises(serve: Faults, tmp_path: Path) -> None:
    server = serve("kind=500,op=CompleteMultipartUpload")
    store = Store(server.uri("p"), max_retries=3, backoff_ms=(1, 5))
    write(tmp_path / "source", MULTIPART)
    with pytest.raises(errors.StoreTransientError, match="500"):
        store.upload("k", tmp_path / "source")
    with pytest.raises(errors.StoreNotFoundError):
        store.head("k")


AFTER_TWO = "kind=slowdown,op=GetObject,after=2"


@contextmanager
def _after_two_parts(server: Server, act: Callable[[], object]) -> Iterator[None]:
    """Call `act` once two parts have been read, and only then let the server send the others."""

    def run() -> None:
        _wait_until(lambda: server.stats()["faults"].get("slowdown", 0) > 0)
        act()
        server.set_faults()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(60)


def test_an_object_replaced_during_a_read_raises(serve: Faults, tmp_path: Path) -> None:
    server = serve(AFTER_TWO)
    store = Store(server.uri("p"), max_requests=2, max_retries=1_000_000, **QUICK)
    first = store.put("k", bytes(20 * PART))
    replaced: list[str | None] = []
    other = Store(server.uri("p"))  # a store of its own, so that its requests do not wait for the reader's
    with (
        _after_two_parts(server, lambda: replaced.append(other.put("k", b"x" * (20 * PART)))),
        pytest.raises(errors.StoreChangedError) as caught,
    ):
        store.get("k")
    message = str(caught.value)
    assert f"`{first}`" in message
    assert f"`{replaced[0]}`" in message
    assert store.uri + "/k" in message


def test_an_object_deleted_during_a_read_raises(serve: Faults, tmp_path: Path) -> None:
    server = serve(AFTER_TWO)
    store = Store(server.uri("p"), max_requests=2, max_retries=1_000_000, **QUICK)
    store.put("k", bytes(20 * PART))
    other = Store(server.uri("p"))
    with (
        _after_two_parts(server, lambda: other.delete("k")),
        pytest.raises((errors.StoreChangedError, errors.StoreNotFoundError)),
    ):
        store.download("k", tmp_path / "copy")


def test_a_conditional_create_with_a_lost_reply_does_not_raise_exists(serve: Faults) -> None:
    server = serve("kind=lost_reply,op=PutObject,times=1")
    store = Store(server.uri("p"), **QUICK)
    with pytest.raises(errors.StoreTransientError, match="read the object back"):
        store.put("commit", b"mine", if_absent=True)
    assert store.get("commit") == b"mine"
    with pytest.raises(errors.StoreExistsError):
        store.put("commit", b"other", if_absent=True)


@pytest.mark.parametrize("fault", ["500", "slowdown", "reset"])
def test_a_conditional_create_that_failed_is_retried(serve: Faults, fault: str) -> None:
    server = serve(f"kind={fault},op=PutObject,times=2")
    store = Store(server.uri("p"), **QUICK)
    store.put("commit", b"mine", if_absent=True)
    assert store.get("commit") == b"mine"
    assert server.stats()["requests"]["PutObject"] == 3


def test_a_retried_conditional_create_of_an_existing_object_raises_exists(serve: Faults) -> None:
    server = serve()
    store = Store(server.uri("p"), **QUICK)
    store.put("commit", b"first", if_absent=True)
    server.set_faults("kind=slowdown,op=PutObject,times=1")
    with pytest.raises(errors.StoreExistsError):
        store.put("commit", b"second", if_absent=True)


def test_requests_are_retried_by_one_layer_only(serve: Faults) -> None:
    server = serve("kind=500")
    store = Store(server.uri("p"), max_retries=4, backoff_ms=(1, 5))
    with pytest.raises(errors.StoreTransientError, match=r"p/k` failed 5 times"):
        store.head("k")
    with pytest.raises(errors.StoreTransientError, match=r"500, InternalError"):
        store.get("k")
    assert server.stats()["requests"] == {"HeadObject": 5, "GetObject": 5}


@pytest.mark.parametrize("bound", [{"max_requests": 3}, {"budget_bytes": 3 << 20, "max_requests": 50}])
def test_requests_and_bytes_in_flight_are_bounded(serve: Faults, bound: dict[str, int]) -> None:
    server = serve("kind=latency,ms=20,op=GetObject")
    store = Store(server.uri("p"), part_bytes=1 << 20, **bound)
    data = random.Random(0).randbytes(12 << 20)
    store.put("k", data)
    server.reset()
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(store.get, ["k"] * 3)) == [data] * 3
    assert 1 < server.stats()["most_in_flight"] <= 3


def test_neighbouring_ranges_share_a_request(serve: Faults) -> None:
    server = serve()
    store = Store(server.uri("p"), part_bytes=1 << 20)
    store.put("k", bytes(4 << 20))
    server.reset()
    store.get("k", start=10, end=(4 << 20) - 10)
    assert server.stats()["requests"] == {"GetObject": 4}


def test_a_small_object_takes_one_request_each_way(serve: Faults, tmp_path: Path) -> None:
    server = serve()
    store = Store(server.uri("p"))
    (tmp_path / "source").write_bytes(b"small")
    store.upload("k", tmp_path / "source")
    store.get("k")
    assert server.stats()["requests"] == {"PutObject": 1, "GetObject": 1}


def test_a_list_of_several_pages_is_complete(serve: Faults) -> None:
    server = serve()
    store = Store(server.uri("p"), **QUICK)
    keys = [f"{index % 7}/{index:04}" for index in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b""), keys))
    server.set_faults("kind=500,op=ListObjects*,times=1,after=1")
    server.reset()
    assert [meta.key for meta in store.list()] == sorted(keys)
    assert sum(server.stats()["requests"].values()) == 3  # the first page once, the second twice
    assert store.list_dirs()[0] == [str(digit) for digit in range(7)]


def test_an_unreachable_endpoint_raises_a_transient_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    _credentials(monkeypatch)
    store = Store("s3://bucket/p", endpoint=f"http://127.0.0.1:{port}", deadline_s=1.5, max_retries=1000)
    started = time.monotonic()
    with pytest.raises(errors.StoreTransientError, match=r"s3://bucket/p/k` failed \d+ times") as caught:
        store.put("k", b"x")
    assert time.monotonic() - started < 20  # a thousand retries would take an hour
    assert isinstance(caught.value, ConnectionError)
    assert "refused" in str(caught.value)


def test_an_unknown_host_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    _credentials(monkeypatch)
    store = Store("s3://bucket", endpoint="http://no-such-host.invalid", max_retries=1, deadline_s=5)
    with pytest.raises(errors.StoreTransientError, match="s3://bucket/k"):
        store.get("k")


def test_a_silent_endpoint_raises_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    _credentials(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        store = Store("s3://bucket", endpoint=endpoint, timeout_s=0.4, deadline_s=1.0, max_retries=1000)
        started = time.monotonic()
        with pytest.raises(errors.StoreTransientError, match="no complete answer within"):
            store.list()
        assert time.monotonic() - started < 20


def test_missing_credentials_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    started = time.monotonic()
    with pytest.raises(errors.StorePermissionError, match=r"AWS_ACCESS_KEY_ID.*boto3") as caught:
        Store("s3://bucket/p").get("k")
    assert time.monotonic() - started < 60  # most of it imports boto3
    assert isinstance(caught.value, PermissionError)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    with pytest.raises(errors.StoreConfigError, match="AWS_SECRET_ACCESS_KEY"):
        Store("s3://bucket/p").get("k")


def test_wrong_credentials_and_missing_buckets_raise(serve: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    for verb in (lambda store: store.get("k"), lambda store: store.put("k", b""), lambda store: store.list()):
        with pytest.raises(errors.StoreNotFoundError, match="s3://no-such-bucket"):
            verb(Store("s3://no-such-bucket/p", max_retries=0))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    with pytest.raises(errors.StorePermissionError, match="403") as caught:
        Store(server.uri("p")).get("k")
    assert "wrong-secret" not in str(caught.value)


def test_invalid_settings_raise() -> None:
    for options, said in [
        ({"part_bytes": 1}, "`part_bytes` is 1"),
        ({"max_requests": 0}, "`max_requests` is 0"),
        ({"timeout_s": 0.0}, "`timeout_s` is 0"),
        ({"deadline_s": float("nan")}, "`deadline_s` is NaN"),
        ({"backoff_ms": (5, 1)}, "`backoff_ms`"),
        ({"endpoint": "localhost:9000"}, "`http://localhost:9000`"),
    ]:
        with pytest.raises(errors.StoreConfigError, match=said):
            Store("s3://bucket", **options)
    with pytest.raises(errors.StoreConfigError, match="`ftp`"):
        Store("ftp://host")
    with pytest.raises(ValueError, match="bucket"):
        Store("s3://")


def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")


def _wait_until(holds: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("fault", "answer"), [("no_conditions", "501, NotImplemented"), ("bad_condition", "400")]
)
def test_a_condition_that_the_store_rejects_is_reported_after_one_request(
    serve: Faults, fault: str, answer: str
) -> None:
    server = serve(f"kind={fault}")
    store = Store(server.uri("p"), **QUICK)
    with pytest.raises(errors.StoreError, match=rf"{answer}.*`If-None-Match`"):
        store.put("k", b"x", if_absent=True)
    with pytest.raises(errors.StoreError, match=rf"{answer}.*`If-Match`"):
        store.put("k", b"x", if_match='"0"')
    assert server.stats()["requests"] == {"PutObject": 2}
    store.put("k", b"x")
    assert store.get("k") == b"x"


def test_a_listing_answered_by_a_web_page_is_not_an_empty_listing(serve: Faults) -> None:
    server = serve()
    store = Store(server.uri("p"), **QUICK)
    store.put("k", b"x")
    server.set_faults("kind=html,op=List*")
    for listing in (store.list, store.list_dirs):
        server.reset()
        with pytest.raises(errors.StoreError, match=r"`<!DOCTYPE html> .*root element `ListBucketResult`"):
            listing()
        assert sum(server.stats()["requests"].values()) == 1
    server.set_faults("kind=error_body,op=List*,times=2")
    assert [meta.key for meta in store.list()] == ["k"]
    server.set_faults("kind=error_body,op=List*")
    with pytest.raises(errors.StoreTransientError, match="HTTP 200 with an error: InternalError: Please try"):
        Store(server.uri("p"), backoff_ms=(1, 2), max_retries=3).list()


def test_the_region_of_a_redirect_and_a_wrong_clock_are_named(serve: Faults) -> None:
    server = serve("kind=moved")
    store = Store(server.uri("p"), **QUICK)
    operations = (lambda: store.put("k", b"x"), lambda: store.head("k"), store.list)
    for operation in operations:
        with pytest.raises(errors.StoreConfigError, match=r"region `eu-west-3`.*for `us-east-1`"):
            operation()
    server.set_faults("kind=skewed")
    for operation in operations:
        with pytest.raises(errors.StorePermissionError, match=r"clock is 3(59|60)\d s behind") as caught:
            operation()
        assert "AWS_ACCESS_KEY_ID" not in str(caught.value)
