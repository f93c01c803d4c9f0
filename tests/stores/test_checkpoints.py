"""Checkpoints on every service: one whole commit, overwriting and removal, also when requests get lost."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode
from xml.etree import ElementTree as ET

import pytest
import torch

import hocket.ckpt
from hocket.ckpt.cli.app import app
from hocket.ckpt.errors import CheckpointExistsError, CheckpointNotFoundError
from hocket.ckpt.torch import CheckpointStore
from hocket.ckpt.verbs.retention import KeepLast
from hocket.native import Store, errors
from support.proxy import Fate, Proxy
from support.s3d import Server
from support.servers import Remote

# Services that list unfinished uploads. Azure does not, and discards their blocks after a week. MinIO lists
# only those of a complete key, and aborts uploads itself after a day.
TELL_UPLOADS = ("s3d", "gcs", "versitygw")
DEAD = "data/0badc0de-r00000-000.safetensors"  # a data file of a save that ended before its commit


def state(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((300, 1000), float(value)), "bias": torch.arange(7) + value}


def save(prefix: str, value: int, *, step: int = 1, **options: Any) -> bool:
    """Save, and return whether this writer committed its checkpoint."""
    with closing(CheckpointStore(prefix, **options)) as store:
        try:
            store.save(state(value), step=step)
        except CheckpointExistsError:
            return False
        return True


def holds(uri: str, value: int) -> bool:
    """Return whether the checkpoint is sound and has exactly this state."""
    opened = hocket.ckpt.open(uri)
    is_same = all((opened[name] == tensor.numpy()).all() for name, tensor in state(value).items())
    return is_same and hocket.ckpt.verify(uri).is_sound


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """Run the command; return its exit code and its JSON output."""
    with pytest.raises(SystemExit) as ended:
        app([*words, "--json"])
    return cast("int", ended.value.code), json.loads(capsys.readouterr().out)


def keys(uri: str) -> set[str]:
    return {found.key for found in Store(uri).list()}


def test_a_checkpoint_is_saved_listed_verified_and_loaded(
    place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert save(place, 1, step=1)
    assert save(place, 2, step=2)
    Store(place).put(f"step-3/{DEAD}", b"no manifest")
    assert holds(f"{place}/step-2", 2)
    code, document = call(capsys, "ls", place)
    assert code == 0
    found = [(one["name"], one["status"]) for one in document]
    assert sorted(found) == [("step-1", "committed"), ("step-2", "committed"), ("step-3", "partial")]
    with closing(CheckpointStore(place)) as store:
        loaded = store.load("step-1", state(0)).state
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state(1).items())
    files = Store(f"{place}/step-1")
    (path,) = [key for key in keys(f"{place}/step-1") if key.startswith("data/")]
    spoiled = bytearray(files.get(path))
    spoiled[-1] ^= 1
    files.put(path, spoiled)
    assert call(capsys, "verify", f"{place}/step-1")[0] == 1
    assert call(capsys, "verify", f"{place}/step-2")[0] == 0


def test_one_of_two_writers_commits(place: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        won = list(pool.map(save, (place, place), (1, 2)))
    assert sorted(won) == [False, True]
    assert holds(f"{place}/step-1", 1 + won.index(True))
    named = {file["path"] for file in hocket.ckpt.open(f"{place}/step-1").manifest.files}
    assert keys(f"{place}/step-1") == named | {"checkpoint.json.zst"}  # the other writer left no files


def test_a_commit_whose_reply_is_lost_succeeds(place: str, proxy: Proxy) -> None:
    def fate(method: str, url: str) -> Fate:
        is_commit = method == "PUT" and "checkpoint.json" in url
        return "lose" if is_commit and not proxy.lost else "pass"

    proxy.fate = fate
    assert save(place, 7)
    assert len(proxy.lost) == 1
    assert holds(f"{place}/step-1", 7)
    assert not save(place, 8)
    assert holds(f"{place}/step-1", 7)


def test_an_earlier_commit_of_another_save_wins_if_our_reply_is_lost(place: str, proxy: Proxy) -> None:
    def fate(method: str, url: str) -> Fate:
        if method != "PUT" or "checkpoint.json" not in url or proxy.lost:
            return "pass"
        other.submit(save_past, 1).result(60)
        return "lose"

    def save_past(value: int) -> None:
        # A handle of another client, whose requests do not pass the proxy.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NO_PROXY", "127.0.0.1")
            assert save(place, value)

    with ThreadPoolExecutor(1) as other:
        proxy.fate = fate
        assert not save(place, 2)
    assert len(proxy.lost) == 1
    assert holds(f"{place}/step-1", 1)


def test_a_checkpoint_is_replaced_only_with_overwrite(place: str) -> None:
    with closing(CheckpointStore(place)) as store:
        store.save(state(1), step=1, name="last")
        with pytest.raises(CheckpointExistsError, match="overwrite=True"):
            store.save(state(2), step=2, name="last")
        assert holds(f"{place}/last", 1)
        before = keys(f"{place}/last")
        store.save(state(2), step=2, name="last", overwrite=True)
    assert holds(f"{place}/last", 2)
    assert before & keys(f"{place}/last") == {"checkpoint.json.zst"}


def test_gc_deletes_the_files_of_a_dead_save_and_nothing_else(
    place: str,
    service: Server | Remote,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    client_of: Callable[..., Any],
    request: pytest.FixtureRequest,
) -> None:
    assert save(place, 1)
    committed = keys(place)
    Store(place).put(f"step-1/{DEAD}", b"of a save that lost")
    Store(place).put("step-2/notes.txt", b"not ours")
    die_in_an_upload(f"{place}/step-2", proxy, tmp_path / "shard")
    monkeypatch.delenv("HTTP_PROXY")
    assert is_unfinished(service, f"{place}/step-2/{DEAD}", client_of)
    young = call(capsys, "gc", place)
    assert (young[0], young[1]["garbage"]) == (0, [])
    code, document = call(capsys, "gc", place, "--min-age", "0s")
    found = {(one["name"], one["waste"]) for one in document["garbage"]}
    is_told = request.node.callspec.params["service"] in TELL_UPLOADS
    uploads = {("step-2", "upload")} if is_told else set()
    assert (code, found) == (0, {("step-1", "file"), *uploads})
    assert keys(place) == committed | {"step-2/notes.txt"}
    assert is_unfinished(service, f"{place}/step-2/{DEAD}", client_of) == (not is_told)
    assert holds(f"{place}/step-1", 1)


def die_in_an_upload(uri: str, proxy: Proxy, source: Path) -> None:
    """Start a multipart upload, and close the connection after its first part."""

    def fate(method: str, url: str) -> Fate:
        is_part = method == "PUT" and ("partNumber=" in url or "comp=block&" in url or url.endswith("block"))
        parts.extend([url] if is_part else [])
        return "refuse" if len(parts) > 1 else "pass"

    parts: list[str] = []
    proxy.fate = fate
    source.write_bytes(os.urandom(17 << 20))
    with pytest.raises(errors.StoreTransientError):
        Store(uri, max_retries=0, max_requests=1).upload(DEAD, source)


def is_unfinished(service: Server | Remote, uri: str, client_of: Callable[..., Any]) -> bool:
    """Return whether the service has an unfinished upload of this object; Azure keeps it for a week."""
    bucket, _, key = uri.split("://")[1].partition("/")
    if uri.startswith("az://"):
        return True
    if uri.startswith("s3://"):
        listed = client_of(service).list_multipart_uploads(Bucket=bucket, Prefix=key)
        return [upload["Key"] for upload in listed.get("Uploads", [])] == [key]
    url = f"{service.endpoint}/{bucket}?{urlencode({'uploads': '', 'prefix': key})}"
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30) as answer:
        return [found.text for found in ET.parse(answer).iterfind(".//{*}Upload/{*}Key")] == [key]


def test_retention_and_rm_delete_whole_checkpoints(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        # A new store for each save, so that retention depends on the listing only.
        assert save(place, step, step=step, retention=KeepLast(num=2))
    assert {key.partition("/")[0] for key in keys(place)} == {"step-2", "step-3"}
    assert holds(f"{place}/step-2", 2)
    assert call(capsys, "rm", f"{place}/step-2")[0] == 0
    assert {key.partition("/")[0] for key in keys(place)} == {"step-3"}
    with pytest.raises(CheckpointNotFoundError):
        hocket.ckpt.open(f"{place}/step-2")
    assert holds(f"{place}/step-3", 3)


def test_thin_replaces_whole_checkpoints_in_one_step(place: str) -> None:
    for step in (1, 2):
        assert save(place, step, step=step)
    report = hocket.ckpt.thin(place, drop=["bias"])
    assert [one.name for one in report.thinned] == ["step-1"]
    opened = hocket.ckpt.open(f"{place}/step-1")
    assert list(opened) == ["w"]
    assert (opened["w"] == state(1)["w"].numpy()).all()
    named = {file["path"] for file in opened.manifest.files}
    assert keys(f"{place}/step-1") == named | {"checkpoint.json.zst"}
    assert holds(f"{place}/step-2", 2)
    assert hocket.ckpt.thin(place, drop=["bias"]).unchanged == ("step-1",)


@pytest.mark.parametrize("fault", ["500", "reset", "slowdown"])
@pytest.mark.parametrize("mode", ["", "gcs"])
def test_a_commit_whose_request_failed_is_retried(
    s3d_faults: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, mode: str, fault: str
) -> None:
    server = s3d_faults(mode=mode)
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    server.set_faults(f"kind={fault},op=PutObject,key=*/checkpoint.json*,times=1")
    prefix = server.uri("run")
    assert save(prefix, 7)
    assert server.stats()["faults"] == {fault: 1}
    assert holds(f"{prefix}/step-1", 7)
    assert not save(prefix, 8)
