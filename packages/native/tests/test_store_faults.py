"""With a tenth of all responses faulty, all bytes arrive, with few requests and bounded memory."""

import math
import random
import time
from collections.abc import Callable

import pytest

from hocket.native import Store, counters, errors
from support.s3d import Server

KINDS = ("500", "slowdown", "reset", "short_body", "lost_reply")
PART = 64 << 10
Faults = Callable[..., Server]


@pytest.fixture
def serve(s3d_faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Faults:
    def start(*rules: str, **settings: int | str) -> Server:
        server = s3d_faults(*rules, **settings)
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        return server

    return start


def each(rate: float, kinds: tuple[str, ...] = KINDS) -> list[str]:
    """Return rules that make `rate` of the requests fail, divided equally over the kinds of faults."""
    return [f"kind={kind},rate={rate / len(kinds)}" for kind in kinds]


@pytest.mark.parametrize("mode", ["", "gcs"])
@pytest.mark.parametrize("rate", [0.05, 0.1])
def test_faulty_responses_change_no_byte_and_at_most_double_the_requests(
    serve: Faults, rate: float, mode: str
) -> None:
    server = serve(mode=mode)
    store = Store(server.uri("p"), part_bytes=PART, backoff_ms=(1, 20), timeout_s=5)
    data = random.Random(1).randbytes(40 * PART + 11)
    objects = {f"small/{index:03}": data[index : 3 * index] for index in range(60)}
    server.set_faults(*each(rate), seed=9)
    before = store.counters()
    for key, value in objects.items():
        store.put(key, value)
    store.put("big", data)
    for _ in range(3):
        assert store.get("big") == data
    assert {meta.key: store.get(meta.key) for meta in store.list("small")} == objects
    counts, stats = store.counters(), server.stats()
    ideal = (
        2 * len(objects) + 1 + 3 * 41 + 1 + 1
    )  # the last one is a HEAD of the empty object, which has no range
    assert sum(stats["faults"].values()) > rate * ideal / 3
    assert ideal < counts["requests"] - before["requests"] <= 2 * ideal
    assert counts["retries"] == counts["requests"] - before["requests"] - ideal
    assert 0 < counts["retries"] < 0.5 * ideal


def test_slow_responses_are_abandoned_and_continued_by_new_requests(serve: Faults) -> None:
    server = serve()
    data = random.Random(2).randbytes(20 * PART)
    store = Store(server.uri("p"), part_bytes=PART, backoff_ms=(1, 5), timeout_s=0.3, max_requests=4)
    store.put("k", data)
    server.set_faults("kind=bandwidth,bytes_per_s=1024,rate=0.1,op=GetObject", seed=3)
    started = time.monotonic()
    assert store.get("k") == data
    assert time.monotonic() - started < 50  # at the faulty bandwidth each part would take a minute
    assert server.stats()["faults"]["bandwidth"] >= 1


def test_constant_failures_raise_with_the_key_at_the_deadline(serve: Faults) -> None:
    server = serve("kind=slowdown")
    store = Store(server.uri("p"), deadline_s=1.0, max_retries=10_000, backoff_ms=(50, 200))
    started = time.monotonic()
    with pytest.raises(errors.StoreTransientError, match=r"p/data/k` failed \d+ times .*SlowDown"):
        store.get("data/k")
    assert time.monotonic() - started < 20  # ten thousand retries would take half an hour
    counts = store.counters()
    assert counts["requests"] == counts["retries"] + 1 <= 25
    assert server.stats()["requests"] == {"GetObject": counts["requests"]}


@pytest.mark.parametrize("size", [1, PART, PART + 1, 7 * PART + 5])
def test_each_part_takes_one_request(serve: Faults, size: int) -> None:
    server = serve()
    store = Store(server.uri("p"), part_bytes=PART)
    keys = [f"k{index}" for index in range(3)]
    for key in keys:
        store.put(key, bytes(size))
    server.reset()
    before = store.counters()
    for key in keys:
        store.get(key)
    gets = server.stats()["requests"]["GetObject"]
    assert gets <= math.ceil(3 * size / PART) + len(keys)
    counts = store.counters()
    assert counts["requests"] - before["requests"] == gets
    assert counts["bytes_received"] - before["bytes_received"] == 3 * size
    assert before["bytes_sent"] == 3 * size


def test_requests_are_counted_by_handle_and_by_process(serve: Faults) -> None:
    server = serve()
    before = counters()
    store, other = Store(server.uri("p")), Store(server.uri("p"))
    store.put("k", b"12345")
    other.get("k")
    assert store.counters() == {"requests": 1, "retries": 0, "bytes_received": 0, "bytes_sent": 5}
    assert other.counters() == {"requests": 1, "retries": 0, "bytes_received": 5, "bytes_sent": 0}
    now = counters()
    assert now["requests"] - before["requests"] == 2
    assert now["bytes_in_flight"] == 0
    assert now["most_bytes_in_flight"] >= 5
    assert Store("memory://counted").put("k", b"x") is not None
    assert counters() == now


def test_bytes_in_flight_stay_within_the_budget(serve: Faults) -> None:
    """Run in a new process, because the maximum in flight is counted over the whole process."""
    import subprocess
    import sys

    server = serve("kind=latency,ms=10,op=GetObject")
    Store(server.uri("p")).put("k", bytes(24 << 20))
    code = f"""
from concurrent.futures import ThreadPoolExecutor
from hocket.native import Store, counters
store = Store({server.uri("p")!r}, part_bytes=1 << 20, budget_bytes=5 << 20, max_requests=64)
with ThreadPoolExecutor(4) as pool:
    list(pool.map(store.get, ["k"] * 4))
print(counters()["most_bytes_in_flight"], counters()["bytes_in_flight"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    most, now = map(int, done.stdout.split())
    assert 3 << 20 <= most <= 5 << 20
    assert now == 0
