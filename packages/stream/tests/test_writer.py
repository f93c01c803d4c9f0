from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.stream import MDSWriter, StreamingDataset
from hocket.stream.errors import ConfigError, DatasetExistsError, StreamIOError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("compression", [None, "zstd:9"])
@pytest.mark.parametrize("hashes", [None, ["sha1", "md5", "xxh64"]])
def test_what_is_written_reads_back(
    write: Callable[..., str], sample: Callable[[int], Any], compression: str | None, hashes: list[str] | None
) -> None:
    folder = write(120, compression=compression, hashes=hashes)
    read = list(StreamingDataset(local=folder, batch_size=7))
    assert len(read) == 120
    for number, got in enumerate(read):
        expected = sample(number)
        assert got["tokens"].tolist() == expected.pop("tokens").tolist()
        assert {name: got[name] for name in expected} == expected


def test_an_exception_inside_leaves_no_data_set(tmp_path: Path) -> None:
    def fail() -> None:
        with MDSWriter(columns={"x": "bytes"}, out=tmp_path / "d", size_limit=300) as writer:
            for _ in range(20):
                writer.write({"x": bytes(60)})
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert "index.json" not in names(tmp_path / "d")
    assert not [name for name in names(tmp_path / "d") if name.endswith(".part")]


def test_a_place_that_is_taken_is_refused_and_replaced_on_request(
    write: Callable[..., str], tmp_path: Path
) -> None:
    folder = Path(write(200))
    for name in ("notes.txt", "shard.99999.mds"):
        (folder / name).write_text("of a person")
    with pytest.raises(DatasetExistsError, match="not empty"):
        write(5)
    write(5, exist_ok=True)
    assert names(folder) == ["index.json", "notes.txt", "shard.00000.mds", "shard.99999.mds"]


def test_no_samples_make_an_index_without_shards(tmp_path: Path) -> None:
    MDSWriter(columns={"x": "int"}, out=tmp_path).finish()
    assert json.loads((tmp_path / "index.json").read_text()) == {"shards": [], "version": 2}


def test_upload_to_a_second_place(write: Callable[..., str], tmp_path: Path) -> None:
    local, remote = tmp_path / "local", tmp_path / "remote"
    write(60, out=(str(local), str(remote)))
    assert not local.exists()
    assert len(list(StreamingDataset(local=remote, batch_size=8))) == 60
    write(60, out=(str(local), str(remote)), keep_local=True, exist_ok=True)
    assert names(local) == names(remote)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "lz4"}, "`lz4` is not supported.*`zstd:1` to `zstd:22`"),
        ({"compression": "zstd:23"}, "zstd:22"),
        ({"hashes": ["crc32"]}, "`crc32`.*`xxh3_64`"),
        ({"max_workers": 0}, "`max_workers` is 0"),
        ({"append": True, "exist_ok": True}, "`append` and `exist_ok`"),
        ({"hashes": ["sha1", "sha1"]}, "once"),
        ({"size_limit": 1 << 32}, r"2\^32"),
        ({"size_limit": "64 parsecs"}, "64mb"),
        ({"columns": {}}, "`columns` is empty"),
    ],
)
def test_arguments_that_do_not_work(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MDSWriter(**({"columns": {"x": "int"}, "out": tmp_path / "d"} | options))


def test_sizes_may_be_words(tmp_path: Path) -> None:
    with MDSWriter(columns={"x": "int"}, out=tmp_path, size_limit="64mb") as writer:
        writer.write({"x": 1})
    assert json.loads((tmp_path / "index.json").read_text())["shards"][0]["size_limit"] == 64 << 20


def test_a_folder_that_refuses_is_a_typed_error(tmp_path: Path) -> None:
    writer = MDSWriter(columns={"x": "int"}, out=tmp_path / "d")
    writer.write({"x": 1})
    (tmp_path / "d").write_text("a file in the way")
    with pytest.raises(StreamIOError, match="could not"):
        writer.finish()
