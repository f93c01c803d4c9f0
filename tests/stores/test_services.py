"""Data sets on services other than S3, and limits of the services' test servers."""

from __future__ import annotations

import http.client
import os
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier
from urllib.parse import urlsplit

import pytest

from hocket.native import Store
from hocket.native.errors import StoreChangedError, StoreExistsError
from hocket.stream import MDSWriter, StreamingDataset
from support.proxy import Fate, Proxy
from support.servers import Remote


def test_a_data_set_is_written_and_streamed(place: str, tmp_path: Path) -> None:
    columns = {"id": "int", "x": "bytes"}
    with MDSWriter(columns=columns, out=place, size_limit=4096, hashes=["xxh3_64"]) as writer:
        for index in range(60):
            writer.write({"id": index, "x": bytes([index]) * 200})
    dataset = StreamingDataset(remote=place, local=tmp_path / "cache", batch_size=8)
    assert dataset[17]["x"] == bytes([17]) * 200
    samples = list(dataset)
    assert [sample["id"] for sample in samples] == list(range(60))
    assert all(sample["x"] == bytes([sample["id"]]) * 200 for sample in samples)
    shuffled = StreamingDataset(
        remote=place, local=tmp_path / "other", batch_size=8, shuffle=True, validate_hash="xxh3_64"
    )
    assert sorted(sample["id"] for sample in shuffled) == list(range(60))


def test_a_failed_upload_keeps_the_old_object(place: str, tmp_path: Path) -> None:
    store = Store(place)
    store.put("k", b"old")
    with pytest.raises(FileNotFoundError):
        store.upload("k", tmp_path / "nothing")
    assert store.get("k") == b"old"


def test_an_upload_whose_last_reply_is_lost_is_complete(place: str, proxy: Proxy, tmp_path: Path) -> None:
    def fate(method: str, url: str) -> Fate:
        is_last = (method == "POST" and "uploadId=" in url) or (method == "PUT" and "comp=blocklist" in url)
        return "lose" if is_last and not proxy.lost else "pass"

    proxy.fate = fate
    data = os.urandom(9 << 20)  # two parts
    (tmp_path / "source").write_bytes(data)
    store = Store(place)
    meta = store.upload("k", tmp_path / "source")
    assert len(proxy.lost) == 1
    assert (meta.size, meta.etag) == (len(data), store.head("k").etag)
    assert store.get("k") == data


@pytest.mark.stores
def test_fake_gcs_server_does_not_support_writes_by_the_xml_api(fake_gcs: Remote) -> None:
    """Check the reason why writing to Google Cloud Storage is tested with `s3d --gcs` only.

    The client writes by the XML API: a PUT to the object's address, with its condition in a header.
    fake-gcs-server (1.56) accepts such a PUT only with the JSON API's `uploadType` or a signed URL's query,
    ignores the header with both, and lacks the XML API's multipart uploads. A version that supports them
    fails this test.
    """

    def ask(method: str, target: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(urlsplit(fake_gcs.endpoint).netloc, timeout=10)
        with closing(connection):
            connection.request(method, f"/hocket/{target}", b"x", {"x-goog-if-generation-match": "0"})
            answer = connection.getresponse()
            return answer.status, answer.read()

    for method, target in (("PUT", "commit"), ("POST", "parts?uploads")):
        status, said = ask(method, target)
        assert (status, b"invalid uploadType" in said) == (400, True)
    for _ in range(2):  # the second should be 412
        assert ask("PUT", "signed?X-Goog-Algorithm=GOOG4-RSA-SHA256")[0] == 200


@pytest.mark.stores
def test_objects_that_another_client_wrote_to_gcs_are_read(
    fake_gcs: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test writes by the JSON API, the only one by which fake-gcs-server accepts writes."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake_gcs.env["STORAGE_EMULATOR_HOST"])
    data = bytes(range(256)) * 2000
    url = f"{fake_gcs.endpoint}/upload/storage/v1/b/hocket/o?uploadType=media&name=other/a%2Fk"
    urllib.request.urlopen(urllib.request.Request(url, data=data, method="POST"), timeout=10).close()
    store = Store(fake_gcs.uri("other"), part_bytes=64 << 10)
    assert store.get("a/k") == data
    assert store.get("a/k", start=5, end=300_000) == data[5:300_000]
    assert [(meta.key, meta.size) for meta in store.list()] == [("a/k", len(data))]
    store.delete("a/k")
    assert store.list() == []


@pytest.mark.stores
@pytest.mark.parametrize("name", ["minio", "versitygw"])
def test_one_of_two_concurrent_conditional_writes_wins(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: Remote = request.getfixturevalue(name)
    for variable, value in server.env.items():
        monkeypatch.setenv(variable, value)
    store = Store(server.uri("race"))
    start = Barrier(2)

    def put(key: str, data: bytes, etag: str | None) -> str | None:
        start.wait(timeout=30)
        try:
            return store.put(key, data, if_absent=etag is None, if_match=etag)
        except (StoreExistsError, StoreChangedError):
            return None

    with ThreadPoolExecutor(2) as threads:
        for number in range(20):
            etag = None
            for data in (b"12", b"34"):
                running = [threads.submit(put, f"k{number}", bytes([byte]), etag) for byte in data]
                won = [ran.result(timeout=60) for ran in running]
                assert won.count(None) == 1, (number, won)
                etag = won[0] or won[1]
                assert store.get(f"k{number}") == bytes([data[won.index(etag)]])
