"""The shard cache with a real object store: whole and verified files, one fetch per machine, kills."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.native import Store
from hocket.native.errors import StoreChangedError, StoreTransientError
from hocket.stream import MDSWriter, StreamingDataset
from hocket.stream.errors import ConfigError, DatasetExistsError, IndexNotFoundError, ShardCorruptError
from support.ranks import run_ranks

READ = """
import sys
from hocket.stream import StreamingDataset
for batch in StreamingDataset(remote=sys.argv[1], local=sys.argv[2], batch_size=8).batches():
    pass
print("read")
"""


@pytest.fixture
def remote(s3d: Any, monkeypatch: pytest.MonkeyPatch, write: Callable[..., str], tmp_path: Path) -> str:
    """Write 40 samples in compressed shards under a prefix of this test."""
    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    uri = s3d.uri(tmp_path.name)
    write(40, out=uri, compression="zstd")
    return uri


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def read_ids(**options: Any) -> list[int]:
    return [sample["id"] for sample in StreamingDataset(batch_size=8, **options)]


def test_a_data_set_written_to_a_store_is_read_from_it(remote: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert read_ids(remote=remote, local=cache) == list(range(40))
    assert names(cache) == ["index.json", "shard.00000.mds", "shard.00001.mds"]
    assert read_ids(remote=remote, local=tmp_path / "keep", keep_zip=True) == list(range(40))
    assert "shard.00001.mds.zstd" in names(tmp_path / "keep")
    with pytest.raises(DatasetExistsError, match="holds a data set"):
        MDSWriter(columns={"x": "int"}, out=remote)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_with_keep_shards_false_only_the_index_stays_in_the_cache(
    s3d: Any, remote: str, write: Callable[..., str], tmp_path: Path, compression: str | None
) -> None:
    uri = f"{remote}-other"
    write(40, out=uri, compression=compression)
    dataset = StreamingDataset(
        remote=uri, local=tmp_path / "cache", batch_size=8, keep_shards=False, shuffle=True, shuffle_seed=1
    )
    kept = StreamingDataset(remote=uri, local=tmp_path / "kept", batch_size=8, shuffle=True, shuffle_seed=1)
    for epoch in range(2):
        assert [sample["id"] for sample in dataset] == [sample["id"] for sample in kept]
        assert dataset.metrics()["stream/fetches"] == 2 * (
            epoch + 1
        )  # no shard is fetched for the next epoch
        assert names(tmp_path / "cache") == ["index.json"]
    assert [dataset[number]["id"] for number in (3, 37)] == [3, 37]
    assert names(tmp_path / "cache") == ["index.json"]
    with pytest.raises(ConfigError, match="`keep_zip` is True and `keep_shards` False"):
        StreamingDataset(remote=uri, batch_size=8, keep_zip=True, keep_shards=False)


def read_unkept_rank(remote: str, local: str) -> list[list[list[int]]]:
    """Return the rank's batches of two epochs, with and without workers."""
    from hocket.stream import StreamingDataLoader

    found = []
    for workers in (0, 2):
        dataset = StreamingDataset(remote=remote, local=local, batch_size=4, keep_shards=False, shuffle=True)
        loader = StreamingDataLoader(dataset, num_workers=workers)
        found.append([batch["id"].tolist() for _ in range(2) for batch in loader])
    return found


def test_ranks_and_workers_read_all_without_keeping_shards(remote: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first, second = run_ranks(read_unkept_rank, 2, remote, str(cache), timeout_s=240)
    dataset = StreamingDataset(remote=remote, local=tmp_path / "kept", global_batch_size=8, shuffle=True)
    expected = [batch["id"].tolist() for _ in range(2) for batch in dataset.batches()]
    for one, other in zip(first, second, strict=True):
        assert [a + b for a, b in zip(one, other, strict=True)] == expected
    assert names(cache) == ["index.json"]


def test_a_cached_shard_is_read_though_new_ones_are_not_kept(remote: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert read_ids(remote=remote, local=cache) == list(range(40))
    (cache / "shard.00001.mds").unlink()
    dataset = StreamingDataset(remote=remote, local=cache, batch_size=8, keep_shards=False)
    assert [sample["id"] for sample in dataset] == list(range(40))
    assert dataset.metrics()["stream/fetches"] == 1
    assert names(cache) == ["index.json", "shard.00000.mds"]


def test_the_default_cache_is_in_xdg_cache_home(
    remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert read_ids(remote=remote) == list(range(40))
    assert "shard.00000.mds" in names(tmp_path / "home" / "hocket" / "stream")


def test_a_split_is_a_subfolder_of_remote_and_cache(remote: str, tmp_path: Path) -> None:
    parent, _, split = remote.rpartition("/")
    assert read_ids(remote=parent, local=tmp_path / "cache", split=split) == list(range(40))
    assert (tmp_path / "cache" / split / "index.json").exists()
    with pytest.raises(IndexNotFoundError, match="s3://"):
        read_ids(remote=parent, local=tmp_path / "cache", split="nothing-there")
    for outside in ("../elsewhere", f"{split}/../..", "/elsewhere"):
        with pytest.raises(ConfigError, match=r"expected a folder within the data set"):
            read_ids(remote=parent, local=tmp_path / "cache", split=outside)


def read_rank(remote: str, local: str) -> int:
    return len(list(StreamingDataset(remote=remote, local=local, global_batch_size=8, shuffle=True)))


def test_ranks_that_share_a_cache_fetch_each_shard_once(s3d: Any, remote: str, tmp_path: Path) -> None:
    s3d.reset()
    counts = run_ranks(read_rank, 3, remote, str(tmp_path / "cache"))
    assert sum(counts) == 40
    # One request of the index for each rank and one for each of the two shards; no others.
    assert s3d.stats()["requests"] == {"GetObject": 3 + 2}


@pytest.fixture
def slow(s3d_faults: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Start a server that sends the 8 MiB shard of `slow` at 1 MiB/s, so that a download can be stopped."""
    server = s3d_faults()
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    with MDSWriter(columns={"id": "int", "x": "bytes"}, out=server.uri("slow"), hashes=["sha1"]) as writer:
        for number in range(8):
            writer.write({"id": number, "x": bytes(1 << 20)})
    server.set_faults(bandwidth=1 << 20)
    return server


def stop_reader(remote: str, cache: Path, number: signal.Signals) -> tuple[int, str]:
    """Stop a reading process by a signal during a download; return its exit status and output."""
    command = [sys.executable, "-c", READ, remote, str(cache)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as reader:
        try:
            deadline = time.monotonic() + 30
            while not (cache / ".shard.00000.mds.part").exists():
                assert time.monotonic() < deadline, "no download began"
                assert reader.poll() is None
                time.sleep(0.01)
            time.sleep(0.2)
            assert not (cache / "shard.00000.mds").exists()
            reader.send_signal(number)
            _, said = reader.communicate(timeout=5)
        finally:
            reader.kill()
    return reader.returncode, said


def test_a_killed_download_leaves_nothing_under_a_final_name(slow: Any, tmp_path: Path) -> None:
    remote, cache = slow.uri("slow"), tmp_path / "cache"
    assert stop_reader(remote, cache, signal.SIGKILL) == (-signal.SIGKILL, "")
    assert names(cache) == [".shard.00000.mds.part", "index.json"]
    slow.set_faults()
    assert read_ids(remote=remote, local=cache) == list(range(8))
    assert names(cache) == ["index.json", "shard.00000.mds"]


def test_an_interrupt_ends_a_download_and_leaves_nothing(slow: Any, tmp_path: Path) -> None:
    status, said = stop_reader(slow.uri("slow"), tmp_path / "cache", signal.SIGINT)
    assert status == -signal.SIGINT
    assert said.endswith("KeyboardInterrupt\n")
    assert names(tmp_path / "cache") == ["index.json"]


def flip(store: Store, key: str) -> None:
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, bytes(data))


def test_a_flipped_byte_in_the_remote_is_an_error_with_both_digests(
    s3d: Any, remote: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(Store(remote), "shard.00001.mds.zstd")
    s3d.reset()
    with pytest.raises(ShardCorruptError, match=r"xxh3_64 \w+, expected xxh3_64 \w+") as caught:
        read_ids(remote=remote, local=tmp_path / "cache")
    assert f"`{remote}/shard.00001.mds.zstd`" in str(caught.value)
    # One request of the index, one of the good shard, and `download_retry` requests of the bad one.
    assert s3d.stats()["requests"]["GetObject"] == 1 + 1 + 3
    assert sum("attempt" in record.message for record in caplog.records) == 2
    assert "shard.00001.mds" not in names(tmp_path / "cache")


def test_an_object_larger_than_the_index_says_is_refused_by_its_first_part(
    s3d: Any, remote: str, write: Callable[..., str], tmp_path: Path
) -> None:
    large = bytes(17 << 20)
    uri = f"{remote}/raw"
    folder = Path(write(9, size_limit=None))
    for place in (Store(uri), Store(folder)):
        place.put("index.json", (folder / "index.json").read_bytes())
        place.put("shard.00000.mds", large)
        s3d.reset()
        with pytest.raises(ShardCorruptError, match=rf"has {len(large)} bytes, expected \d+ bytes") as caught:
            read_ids(remote=place.uri, local=tmp_path / "cache", download_retry=2)
        assert f"`{place.uri}/shard.00000.mds`" in str(caught.value)
        assert names(tmp_path / "cache") == ["index.json"]
        # One request of the index, and `download_retry` requests of the first of three parts.
        assert s3d.stats()["requests"] == ({"GetObject": 1 + 2} if place.uri == uri else {})


def test_a_flipped_byte_in_the_cache_is_found_and_fetched_again(
    remote: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    read_ids(remote=remote, local=cache)
    flip(Store(str(cache)), "shard.00000.mds")
    assert read_ids(remote=remote, local=cache) == list(range(40))
    assert any("fetched again" in record.message for record in caplog.records)


def test_a_faulty_store_changes_nothing(
    s3d_faults: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, write: Callable[..., str]
) -> None:
    server = s3d_faults()
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    remote = write(200, out=server.uri("faulty"), size_limit=1000) and server.uri("faulty")
    server.set_faults("kind=slowdown,rate=0.1,op=GetObject", "kind=reset,rate=0.1,op=GetObject", seed=3)
    assert read_ids(remote=remote, local=tmp_path / "cache") == list(range(200))


def test_an_unreachable_store_raises_a_transient_store_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreTransientError, match=r"s3://bucket/data/index\.json"):
        StreamingDataset(remote="s3://bucket/data", local=tmp_path, batch_size=1, download_timeout=1)


def test_a_complete_cache_is_read_without_its_store(
    s3d_faults: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = s3d_faults()
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    uri, cache = server.uri("data"), tmp_path / "cache"
    with MDSWriter(columns={"id": "int"}, out=uri) as writer:
        for number in range(9):
            writer.write({"id": number})
    assert read_ids(remote=uri, local=cache) == list(range(9))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert read_ids(remote=uri, local=cache, download_timeout=1) == list(range(9))
    assert f"the index kept in `{cache}` is used" in caplog.text
    with pytest.raises(StoreTransientError):
        read_ids(remote=uri, local=tmp_path / "none", download_timeout=1)
    with pytest.raises(StoreTransientError):
        read_ids(remote=f"{uri}/other", local=cache, download_timeout=1)


@pytest.mark.parametrize("hashes", [None, ["xxh3_64"]])
def test_data_sets_that_share_a_folder_are_not_mixed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hashes: list[str] | None
) -> None:
    cache, datasets = tmp_path / "cache", {}
    for start in (0, 1000):
        out = str(tmp_path / str(start))
        with MDSWriter(columns={"id": "int"}, out=out, size_limit=400, hashes=hashes) as writer:
            for number in range(start, start + 99):
                writer.write({"id": number})
        datasets[start] = StreamingDataset(remote=out, local=cache, batch_size=8)
    for _ in range(2):
        for start, dataset in datasets.items():
            assert [sample["id"] for sample in dataset] == list(range(start, start + 99))
            assert dataset[5]["id"] == start + 5
    assert ("same `local`" if hashes is None else "xxh3_64") in caplog.text


def put_again(uri: str, value: int, *, count: int = 50) -> None:
    """Replace the data set at `uri` by one without digests."""
    with MDSWriter(columns={"id": "int"}, out=uri, size_limit=400, exist_ok=True, hashes=None) as writer:
        for _ in range(count):
            writer.write({"id": value})


def test_a_rewritten_data_set_is_fetched_again(
    s3d: Any, remote: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uri, cache = s3d.uri(f"{tmp_path.name}-anew"), tmp_path / "cache"
    put_again(uri, 1)
    index = Store(uri).get("index.json")
    # The writes mostly fall within one second, the resolution of the store's modification times.
    for value in (1, 2, 3):
        put_again(uri, value)
        assert Store(uri).get("index.json") == index, "the index must not show that the shards differ"
        assert read_ids(remote=uri, local=cache) == [value] * 50
    assert "a file of the current version of" in caplog.text


@pytest.mark.parametrize("limit", [None, "64kb"])
def test_a_cache_folder_removed_during_an_epoch_is_created_again(
    write: Callable[..., str], tmp_path: Path, limit: str | None
) -> None:
    uri = write(2000, name="remote", compression="zstd")
    cache = tmp_path / "above" / "cache"
    dataset = StreamingDataset(
        remote=uri, local=cache, batch_size=4, cache_limit=limit, prefetch_batches=1, prefetch_bytes="1kb"
    )
    ids: list[int] = []
    for number, batch in enumerate(dataset.batches()):
        ids += batch["id"].tolist()
        if number % 7 == 3:
            shutil.rmtree(cache.parent, ignore_errors=True)
    assert ids == list(range(2000))


@pytest.mark.parametrize("reads_by_range", [False, True])
def test_a_data_set_rewritten_during_a_run_is_not_mixed_with_the_old_one(
    s3d: Any, remote: str, tmp_path: Path, reads_by_range: bool
) -> None:
    uri = s3d.uri(f"{tmp_path.name}-run-{reads_by_range}")
    put_again(uri, 1)
    dataset = StreamingDataset(
        remote=uri, local=tmp_path / "cache", batch_size=4, prefetch_bytes=1, prefetch_batches=1
    )
    batches = dataset.batches()
    assert next(batches)["id"].tolist() == [1] * 4
    time.sleep(1.1)
    put_again(uri, 2)

    def read_rest() -> None:
        if reads_by_range:
            assert {sample["id"] for sample in dataset[:]} == {1}
        for batch in batches:
            assert batch["id"].tolist() == [1] * 4

    with pytest.raises(StoreChangedError, match="the index has changed since"):
        read_rest()


def test_shards_have_a_digest_unless_hashes_is_none(tmp_path: Path) -> None:
    for name, options, expected in [
        ("a", {}, ["xxh3_64"]),
        ("b", {"hashes": None}, []),
        ("c", {"hashes": []}, []),
    ]:
        with MDSWriter(columns={"id": "int"}, out=tmp_path / name, **options) as writer:
            writer.write({"id": 1})
        (shard,) = json.loads((tmp_path / name / "index.json").read_text())["shards"]
        assert (shard["hashes"], list(shard["raw_data"]["hashes"])) == (expected, expected)


def test_a_process_stopped_during_a_download_does_not_block_others(
    remote: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    with (
        (cache / ".index.json.part").open("w") as index,
        (cache / ".shard.00000.mds.part").open("w") as shard,
    ):
        for held in (index, shard):
            fcntl.flock(held, fcntl.LOCK_EX)
        dataset = StreamingDataset(remote=remote, local=cache, batch_size=8, download_timeout=1)
        assert [sample["id"] for sample in dataset] == list(range(40))
    assert "makes no progress on it" in caplog.text
    assert names(cache) == [".index.json.part", ".shard.00000.mds.part", "shard.00001.mds"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")
def test_another_users_files_stay_and_do_not_block_others(remote: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # only their owner can read pytest's folders
        os.chmod(folder, 0o1777)
        cache = Path(folder)
        assert read_ids(remote=remote, local=cache) == list(range(40))
        held = names(cache)
        (cache / "shard.00001.mds").unlink()
        dataset = StreamingDataset(remote=remote, local=cache, batch_size=8, cache_limit=10_000)
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            done = False
            try:
                done = [sample["id"] for sample in dataset] == list(range(40))
            finally:
                os._exit(0 if done else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert names(cache) == held[:2], "there was no room for the other"
