"""`tools/s3d` injects faults as configured: clients see each kind, and faults are counted and repeatable."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    IncompleteReadError,
    ResponseStreamingError,
)
from botocore.exceptions import ConnectionError as BrokenConnectionError

from support.s3d import Server

Faults = Callable[..., Server]


def outcome(act: Callable[[], Any]) -> str:
    """Return `ok`, the code of the error, or the kind of broken connection."""
    try:
        act()
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    except (IncompleteReadError, ResponseStreamingError):
        return "short"
    except ConnectionClosedError:
        return "closed"
    except BrokenConnectionError:
        return "broken"
    return "ok"


def read(client: Any, server: Server, key: str = "k") -> bytes:
    body: bytes = client.get_object(Bucket=server.bucket, Key=key)["Body"].read()
    return body


@pytest.mark.parametrize(
    ("kind", "seen", "is_carried_out"),
    [
        ("slowdown", "SlowDown", False),
        ("500", "InternalError", False),
        ("conflict", "ConditionalRequestConflict", False),
        ("reset", "closed", False),
        ("lost_reply", "closed", True),
    ],
)
def test_writes_fail_with_the_configured_fault(
    s3d_faults: Faults, client_of: Callable[..., Any], kind: str, seen: str, is_carried_out: bool
) -> None:
    server = s3d_faults(f"kind={kind},op=PutObject,times=1")
    client = client_of(server)
    data = b"x" * 300_000
    assert outcome(lambda: client.put_object(Bucket=server.bucket, Key="k", Body=data)) == seen
    assert (outcome(lambda: client.head_object(Bucket=server.bucket, Key="k")) == "ok") == is_carried_out
    assert outcome(lambda: client.put_object(Bucket=server.bucket, Key="k", Body=data)) == "ok"
    assert read(client, server) == data
    stats = server.stats()
    assert stats["faults"] == {kind: 1}
    assert stats["requests"] == {"GetObject": 1, "HeadObject": 1, "PutObject": 2}


def test_a_short_body_has_fewer_bytes_than_declared(
    s3d_faults: Faults, client_of: Callable[..., Any]
) -> None:
    server = s3d_faults("kind=short_body,times=2")
    client = client_of(server)
    client.put_object(Bucket=server.bucket, Key="k", Body=bytes(10_000))
    answer = client.get_object(Bucket=server.bucket, Key="k")
    assert answer["ContentLength"] == 10_000
    with pytest.raises((IncompleteReadError, ResponseStreamingError)) as error:
        answer["Body"].read()
    assert "5000" in str(error.value)
    assert outcome(lambda: client.list_objects_v2(Bucket=server.bucket)) != "ok"
    assert read(client, server) == bytes(10_000)
    assert server.stats()["faults"] == {"short_body": 2}


def test_latency_and_bandwidth_faults_delay_responses(
    s3d_faults: Faults, client_of: Callable[..., Any]
) -> None:
    server = s3d_faults("kind=latency,ms=200,op=HeadObject", "kind=bandwidth,bytes_per_s=400000,op=GetObject")
    client = client_of(server)
    client.put_object(Bucket=server.bucket, Key="k", Body=bytes(200_000))
    start = time.monotonic()
    client.head_object(Bucket=server.bucket, Key="k")
    waited = time.monotonic()
    assert len(read(client, server)) == 200_000
    done = time.monotonic()
    assert 0.2 <= waited - start < 20
    assert 0.4 <= done - waited < 20
    server.set_faults(bandwidth=400_000, latency_ms=50)
    start = time.monotonic()
    client_of(server).put_object(Bucket=server.bucket, Key="k", Body=bytes(200_000))
    assert 0.45 <= time.monotonic() - start < 20


def run(server: Server, client: Any, count: int) -> list[str]:
    return [outcome(lambda: client.head_object(Bucket=server.bucket, Key="k")) for _ in range(count)]


def test_a_seed_repeats_the_same_faults(s3d_faults: Faults, client_of: Callable[..., Any]) -> None:
    rule = "kind=slowdown,rate=0.3,op=HeadObject"
    server = s3d_faults(rule, seed=11)
    client = client_of(server)
    client.put_object(Bucket=server.bucket, Key="k", Body=b"x")
    first = run(server, client, 60)
    hits = first.count("503")
    assert 5 < hits < 35
    assert set(first) == {"ok", "503"}
    server.reset()
    assert run(server, client, 60) == first
    other = s3d_faults(rule, seed=11)
    other_client = client_of(other)
    other_client.put_object(Bucket=other.bucket, Key="k", Body=b"x")
    assert run(other, other_client, 60) == first
    server.set_faults(rule, seed=12)
    assert run(server, client, 60) != first


def test_the_seed_fixes_the_number_of_faults_for_any_order_of_requests(
    s3d_faults: Faults, client_of: Callable[..., Any]
) -> None:
    server = s3d_faults("kind=slowdown,rate=0.3,op=HeadObject", seed=11)
    client = client_of(server)
    client.put_object(Bucket=server.bucket, Key="k", Body=b"x")
    alone = run(server, client, 48).count("503")
    server.reset()
    with ThreadPoolExecutor(8) as pool:
        together = [
            answer for part in pool.map(lambda _: run(server, client, 6), range(8)) for answer in part
        ]
    assert together.count("503") == alone
    stats = server.stats()
    assert stats["rules"] == [
        {"rule": "kind=slowdown,rate=0.3,op=HeadObject", "matched": 48, "injected": alone}
    ]
    assert 1 <= stats["most_in_flight"] <= 8


def test_rules_match_keys_and_can_be_changed_while_the_server_runs(
    s3d_faults: Faults, client_of: Callable[..., Any]
) -> None:
    server = s3d_faults("kind=500,key=*/data/*")
    client = client_of(server)
    assert (
        outcome(lambda: client.put_object(Bucket=server.bucket, Key="a/data/1", Body=b"")) == "InternalError"
    )
    assert outcome(lambda: client.put_object(Bucket=server.bucket, Key="a/manifest", Body=b"")) == "ok"
    server.set_faults()
    assert outcome(lambda: client.put_object(Bucket=server.bucket, Key="a/data/1", Body=b"")) == "ok"
    with pytest.raises(ValueError, match=r"fault `kind=fire`.*slowdown"):
        server.set_faults("kind=fire")
    with pytest.raises(ValueError, match="expected GET /_s3d/stats"):
        server._call("GET", "nothing")


def test_bytes_on_the_wire_are_counted(s3d_faults: Faults, client_of: Callable[..., Any]) -> None:
    server = s3d_faults()
    client = client_of(server)
    client.put_object(Bucket=server.bucket, Key="k", Body=bytes(100_000))
    server.reset()
    client.get_object(Bucket=server.bucket, Key="k", Range="bytes=0-999")["Body"].read()
    stats = server.stats()
    assert 1000 < stats["bytes_sent"] < 3000
    assert stats["requests"] == {"GetObject": 1}


@pytest.mark.parametrize(
    "line",
    [
        b"GET /../../etc/passwd HTTP/1.1",
        b"GET /%00%ff/%zz HTTP/1.1",
        b"PUT /hocket/k?partNumber=999999999999&uploadId=%27 HTTP/1.1",
        b"GET /hocket?list-type=2&continuation-token=zz&max-keys=-1 HTTP/1.1",
        b"POST /_s3d/faults HTTP/1.1\r\nContent-Length: 99999999999",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_a_hostile_request_does_not_end_the_server(s3d_faults: Faults, line: bytes) -> None:
    import socket
    from urllib.parse import urlsplit

    server = s3d_faults()
    with socket.create_connection(
        ("127.0.0.1", urlsplit(server.endpoint).port or 0), timeout=60
    ) as connection:
        connection.sendall(line + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(1 << 16)
    assert not answer.startswith(b"HTTP/1.1 200")
    assert server.stats()["connections"] >= 1
