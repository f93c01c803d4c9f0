"""Settings of stores: requester pays, TLS, proxies, virtual hosts, timeouts, Azure's credentials."""

from __future__ import annotations

import base64
import hashlib
import hmac
import uuid
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode

import pytest

from hocket.ckpt import collect_garbage, list_checkpoints, remove
from hocket.ckpt.verbs.demo import write_demo
from hocket.compat.streaming import MDSWriter, Stream, StreamingDataset
from hocket.native import Store, errors
from hocket.stream.errors import ShardCorruptError
from support.proxy import Authority, forwarding
from support.s3d import Server
from support.servers import AZURITE_ACCOUNT, AZURITE_KEY, BUCKET, MINIO_DOMAIN, Remote


def use(patch: pytest.MonkeyPatch, server: Server | Remote, **more: str) -> None:
    for name, value in {**server.env, **more}.items():
        patch.setenv(name, value)


def fill(uri: str, *, size_limit: int = 100) -> None:
    with MDSWriter(out=uri, columns={"id": "int"}, size_limit=size_limit, hashes=["xxh3_64"]) as writer:
        for number in range(40):
            writer.write({"id": number})


def test_every_request_has_the_requester_pays_header(
    s3d: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with forwarding(s3d.endpoint) as proxy:
        use(monkeypatch, s3d, HTTP_PROXY=proxy.address, NO_PROXY="", AWS_REQUEST_PAYER="requester")
        prefix = s3d.uri(uuid.uuid4().hex)
        fill(f"{prefix}/data")
        read = StreamingDataset(remote=f"{prefix}/data", local=str(tmp_path / "cache"), batch_size=4)
        assert len(list(read)) == 40
        write_demo(f"{prefix}/checkpoints/one")
        assert [found.status for found in list_checkpoints(f"{prefix}/checkpoints")] == ["committed"]
        assert collect_garbage(f"{prefix}/checkpoints", min_age_s=0).garbage == ()
        remove(f"{prefix}/checkpoints/one")
        assert {headers.get("x-amz-request-payer") for _, headers in proxy.seen} == {"requester"}
        assert any("uploads" in url for url, _ in proxy.seen)


@pytest.mark.parametrize(("variable", "port"), [("AWS_CA_BUNDLE", 444), ("SSL_CERT_FILE", 445)])
def test_a_store_is_reached_through_tls_and_a_proxy_with_a_custom_authority(
    s3d: Server,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    authority: Authority,
    variable: str,
    port: int,
) -> None:
    with forwarding(s3d.endpoint, authority=authority) as front, forwarding(front.address) as proxy:
        use(monkeypatch, s3d, HTTPS_PROXY=proxy.address, NO_PROXY="", AWS_ENDPOINT_URL="")
        monkeypatch.setenv(variable, str(authority.bundle))
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"https://store.invalid:{port}")
        prefix = s3d.uri(uuid.uuid4().hex)
        fill(prefix)
        read = StreamingDataset(remote=prefix, local=str(tmp_path / "cache"), batch_size=4)
        assert len(list(read)) == 40
        assert set(proxy.tunnels) == {f"store.invalid:{port}"}
        assert {headers["host"] for _, headers in front.seen} == {f"store.invalid:{port}"}
        assert proxy.seen == []
        monkeypatch.delenv(variable)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://store.invalid:446")
        with pytest.raises(errors.StoreTransientError, match="certificate"):
            Store(prefix, deadline_s=1).get("index.json")


@pytest.mark.stores
def test_a_virtual_host_bucket_is_reached(
    minio: Remote, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """MinIO accepts the signature only if it covers the request's host."""
    with forwarding(minio.endpoint) as proxy:
        use(monkeypatch, minio, HTTP_PROXY=proxy.address, NO_PROXY="")
        use(monkeypatch, minio, AWS_ENDPOINT_URL=f"http://{MINIO_DOMAIN}")
        monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
        prefix = minio.uri(uuid.uuid4().hex)
        fill(f"{prefix}/data")
        read = StreamingDataset(remote=f"{prefix}/data", local=str(tmp_path / "cache"), batch_size=4)
        assert len(list(read)) == 40
        write_demo(f"{prefix}/checkpoints/one")
        assert collect_garbage(f"{prefix}/checkpoints", min_age_s=0).garbage == ()
        (tmp_path / "parts").write_bytes(bytes(17 << 20))
        store = Store(f"{prefix}/parts")
        store.upload("k", tmp_path / "parts")
        assert [found.size for found in store.list()] == [17 << 20]
        assert {headers["host"] for _, headers in proxy.seen} == {f"{BUCKET}.{MINIO_DOMAIN}"}


def test_each_stream_uses_its_own_timeout_and_retries(
    s3d_faults: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = s3d_faults()
    use(monkeypatch, server)
    for name in ("good", "slow"):
        fill(server.uri(name))
    fill(server.uri("spoiled"), size_limit=1 << 20)  # one shard

    def read(**streams: dict[str, float]) -> list[int]:
        folder = tmp_path / uuid.uuid4().hex
        every = [
            Stream(remote=server.uri(name), local=str(folder / name), **own)  # type: ignore[arg-type]
            for name, own in streams.items()
        ]
        samples = StreamingDataset(streams=every, batch_size=4, download_timeout=600, validate_hash="xxh3_64")
        return [sample["id"] for sample in samples]

    assert len(read(good={}, slow={})) == 80
    server.set_faults("kind=500,key=slow/shard*")
    with pytest.raises(errors.StoreTransientError, match=r"slow/shard.* failed \d times"):
        read(good={}, slow={"download_timeout": 2})  # without the timeout there would be 11 tries
    server.set_faults()
    store = Store(server.uri("spoiled"))
    for found in store.list():
        if found.key.startswith("shard"):
            store.put(found.key, bytes(found.size))
    for tries in (1, 4):
        server.set_faults("kind=latency,ms=1,op=GetObject,key=spoiled/shard*")  # counts the requests
        with pytest.raises(ShardCorruptError, match="spoiled"):
            read(spoiled={"download_retry": tries})
        assert server.stats()["rules"][0]["matched"] == tries


@pytest.mark.stores
@pytest.mark.parametrize("way", ["connection string", "shared access signature", "account in the URI"])
def test_azure_is_reached_with_each_kind_of_credentials(
    azurite: Remote, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    endpoint, prefix = azurite.endpoint, uuid.uuid4().hex
    uri = azurite.uri(prefix)
    if way == "connection string":
        parts = {"AccountName": AZURITE_ACCOUNT, "AccountKey": AZURITE_KEY, "BlobEndpoint": f"{endpoint}/"}
        text = ";".join(f"{name}={value}" for name, value in parts.items())
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"DefaultEndpointsProtocol=http;{text};")
    elif way == "shared access signature":
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", AZURITE_ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", shared_access_signature())
    else:
        monkeypatch.setenv("AZURE_STORAGE_KEY", AZURITE_KEY)
        uri = f"abfss://{BUCKET}@{AZURITE_ACCOUNT}.dfs.core.windows.net/{prefix}"
    store = Store(uri, endpoint=endpoint if way == "account in the URI" else None)
    store.put("k", b"x", if_absent=True)
    assert [found.key for found in store.list()] == ["k"]
    assert store.get("k") == b"x"
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2019-12-12&sig=wrong")
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING", raising=False)
    monkeypatch.delenv("AZURE_STORAGE_KEY", raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", AZURITE_ACCOUNT)
    with pytest.raises(errors.StorePermissionError, match="AZURE_STORAGE_SAS_TOKEN") as caught:
        Store(azurite.uri(prefix), endpoint=endpoint).get("k")
    assert "sig=" not in str(caught.value)


def shared_access_signature() -> str:
    """Return an account SAS for the whole blob service, valid for longer than these tests run."""
    signed = {"sp": "rwdlac", "ss": "b", "srt": "sco", "se": "2999-01-01T00:00:00Z", "sv": "2019-12-12"}
    lines = [
        AZURITE_ACCOUNT,
        signed["sp"],
        signed["ss"],
        signed["srt"],
        "",
        signed["se"],
        "",
        "",
        signed["sv"],
    ]
    text = "".join(f"{line}\n" for line in lines)
    digest = hmac.new(base64.b64decode(AZURITE_KEY), text.encode(), hashlib.sha256).digest()
    return urlencode({**signed, "sig": base64.b64encode(digest).decode()})
