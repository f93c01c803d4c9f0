"""Fixtures of the store tests: servers of each service, proxies, and boto3 clients."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from support.proxy import Authority, Proxy, forwarding
from support.s3d import Server
from support.servers import Remote

OTHERS = ("minio", "versitygw", "azurite")
SERVICES = ["s3d", "gcs", *(pytest.param(name, marks=pytest.mark.stores) for name in OTHERS)]

boto3 = pytest.importorskip(
    "boto3", reason="`boto3` is in the dependency group `test`: `uv sync --group test`"
)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Make a certificate authority for these tests' servers, which no system trusts."""
    try:
        return Authority(tmp_path_factory.mktemp("authority"))
    except FileNotFoundError as error:
        pytest.skip(str(error))


def connect(server: Server | Remote, **options: Any) -> Any:
    """Return a boto3 client of `server` that never retries, so that the test sees each response."""
    from botocore.config import Config

    options = {
        "aws_access_key_id": server.env["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": server.env["AWS_SECRET_ACCESS_KEY"],
        **options,
    }
    config = Config(
        s3={"addressing_style": "path"},
        retries={"total_max_attempts": 1},
        max_pool_connections=16,
        connect_timeout=60,
        read_timeout=60,
        proxies={},
    )
    return boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1", config=config, **options)


@pytest.fixture
def client_of() -> Iterator[Callable[..., Any]]:
    """Return `client_of(server)`, which makes a boto3 client that is closed after the test."""
    with ExitStack() as stack:

        def make(server: Server | Remote, **options: Any) -> Any:
            client = connect(server, **options)
            stack.callback(client.close)
            return client

        yield make


@pytest.fixture
def client(s3d: Server, client_of: Callable[..., Any]) -> Any:
    """Return a boto3 client of the session's server."""
    return client_of(s3d)


@pytest.fixture
def bucket(client: Any, request: pytest.FixtureRequest) -> str:
    """Create a bucket for this test."""
    name = f"b-{abs(hash(request.node.nodeid)):x}"
    client.create_bucket(Bucket=name)
    return name


@pytest.fixture(params=SERVICES)
def service(
    request: pytest.FixtureRequest, s3d: Server, gcs: Server, monkeypatch: pytest.MonkeyPatch
) -> Server | Remote:
    """Return a server of each service, with its address and keys set in the environment."""
    server: Server | Remote = request.getfixturevalue(request.param)
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def place(service: Server | Remote) -> str:
    """Return a prefix for this test on each service."""
    return service.uri(uuid.uuid4().hex)


@pytest.fixture
def proxy(service: Server | Remote, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Put a proxy between the store and every handle that the test opens."""
    with forwarding(service.endpoint) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.address)
        monkeypatch.setenv("NO_PROXY", "")
        yield proxy
