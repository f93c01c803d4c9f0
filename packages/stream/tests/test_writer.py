"""The writers: round trips, errors that leave no data set, sizes, uploads and arguments."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from hocket.native import Store, _native
from hocket.native.errors import StoreConfigError
from hocket.stream import MDSWriter, StreamingDataset
from hocket.stream.encodings import resolve_encoding
from hocket.stream.errors import ConfigError, DatasetExistsError, SampleError, StreamIOError
from hocket.stream.settings.sizes import parse_bytes


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("compression", [None, "zstd:9"])
@pytest.mark.parametrize("hashes", [None, ["sha1", "md5", "xxh64"]])
def test_samples_round_trip(
    write: Callable[..., str], sample: Callable[[int], Any], compression: str | None, hashes: list[str] | None
) -> None:
    folder = write(120, compression=compression, hashes=hashes)
    read = list(StreamingDataset(local=folder, batch_size=7))
    assert len(read) == 120
    for number, got in enumerate(read):
        expected = sample(number)
        assert got["tokens"].tolist() == expected.pop("tokens").tolist()
        assert {name: got[name] for name in expected} == expected


def test_an_exception_in_the_with_block_leaves_no_data_set(tmp_path: Path) -> None:
    def fail() -> None:
        with MDSWriter(columns={"x": "bytes"}, out=tmp_path / "d", size_limit=300) as writer:
            for _ in range(20):
                writer.write({"x": bytes(60)})
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert "index.json" not in names(tmp_path / "d")
    assert not [name for name in names(tmp_path / "d") if name.endswith(".part")]


def test_a_folder_with_files_is_refused_unless_exist_ok(write: Callable[..., str], tmp_path: Path) -> None:
    folder = Path(write(200))
    for name in ("notes.txt", "shard.99999.mds"):
        (folder / name).write_text("of a person")
    with pytest.raises(DatasetExistsError, match="not empty"):
        write(5)
    write(5, exist_ok=True)
    assert names(folder) == ["index.json", "notes.txt", "shard.00000.mds", "shard.99999.mds"]


def test_a_file_uri_is_the_same_folder_for_writer_reader_and_store(
    write: Callable[..., str], tmp_path: Path
) -> None:
    uri = f"file://{tmp_path}/a%20b%25"
    write(5, out=uri)
    assert names(tmp_path) == ["a b%"]
    assert names(tmp_path / "a b%") == sorted(meta.key for meta in Store(uri).list())
    cached = StreamingDataset(remote=uri, local=f"file://{tmp_path}/the%20cache", batch_size=2)
    assert [sample["id"] for sample in cached] == list(range(5))
    assert names(tmp_path / "the cache") == names(tmp_path / "a b%")
    for place in ({"local": uri}, {"remote": uri}, {"local": tmp_path / "a b%", "remote": uri}):
        assert len(list(StreamingDataset(**place, batch_size=2))) == 5
    with pytest.raises(DatasetExistsError, match="a b%"):
        write(5, out=uri)
    with pytest.raises(StoreConfigError, match=r"`file://a/b` names no local directory"):
        write(5, out="file://a/b")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64mb", 64 << 20),
        ("64 MiB", 64 << 20),
        (" 1.5G ", 3 << 29),
        ("2tb", 2 << 40),
        ("7", 7),
        ("9007199254740993b", 9007199254740993),
        (np.int64(5), 5),
    ],
)
def test_sizes_with_a_unit_are_parsed_exactly(text: str, size: int) -> None:
    assert parse_bytes("size_limit", text) == size


@pytest.mark.parametrize(
    "wrong", ["", "mb", "64 pb", "-1", "0.5b", "9" * 400, "8388608tb", True, 1.5, 1 << 63, "٣", "0x10"]
)
def test_invalid_sizes_raise(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"`cache_limit` is .*expected bytes from 1 to below"):
        parse_bytes("cache_limit", wrong)


def test_hashes_that_are_no_list_raise(tmp_path: Path) -> None:
    hashes: Any = "sha1"
    with pytest.raises(ConfigError, match=r"`hashes` is 'sha1': expected a list of names, .* `\['sha1'\]`"):
        MDSWriter(columns={"x": "int"}, out=tmp_path / "d", hashes=hashes)
    assert not (tmp_path / "d").exists()


def test_a_writer_without_samples_writes_an_index_without_shards(tmp_path: Path) -> None:
    MDSWriter(columns={"x": "int"}, out=tmp_path).finish()
    assert json.loads((tmp_path / "index.json").read_text()) == {"shards": [], "version": 2}


def test_a_pair_of_locations_uploads_and_keeps_the_local_files_if_asked(
    write: Callable[..., str], tmp_path: Path
) -> None:
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
        ({"columns": {"\udce9": "int"}}, "expected a string of Unicode characters"),
        ({"columns": {1: "int"}}, "a name in `columns` is 1"),
    ],
)
def test_invalid_arguments_raise(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MDSWriter(**({"columns": {"x": "int"}, "out": tmp_path / "d"} | options))


def test_invalid_names_of_columns_leave_the_old_data_set(write: Callable[..., str]) -> None:
    folder = write(5)
    old = names(Path(folder))
    with pytest.raises(ConfigError, match="Unicode"):
        MDSWriter(columns={"\udce9": "int"}, out=folder, exist_ok=True)
    assert names(Path(folder)) == old


def test_the_size_limit_may_have_a_unit(tmp_path: Path) -> None:
    with MDSWriter(columns={"x": "int"}, out=tmp_path, size_limit="64mb") as writer:
        writer.write({"x": 1})
    assert json.loads((tmp_path / "index.json").read_text())["shards"][0]["size_limit"] == 64 << 20


def test_a_file_in_place_of_the_folder_raises_a_typed_error(tmp_path: Path) -> None:
    writer = MDSWriter(columns={"x": "int"}, out=tmp_path / "d")
    writer.write({"x": 1})
    (tmp_path / "d").write_text("a file in the way")
    with pytest.raises(StreamIOError, match="could not"):
        writer.finish()


#: Values of each encoding that the native buffer copies from memory, and values that it must encode.
VALUES: dict[str, list[Any]] = {
    "bytes": [b"", b"abc", bytearray(b"abc")],
    "str": ["", "é", "x" * 300, b"as it is"],
    "int": [0, -1, True, 1 << 62, np.int64(7), 3.0],
    "uint64": [(1 << 64) - 1, 5],
    "int8": [-128, 127, np.uint8(4)],
    "float32": [0.1, float("nan"), float("-inf"), 3, np.float64(2)],
    "float64": [1e300, 2],
    "float16": [0.5],
    "ndarray:uint16:2,3": [
        np.arange(6, dtype=np.uint16).reshape(2, 3),
        np.arange(6, dtype=">u2").reshape(2, 3),
        np.arange(12, dtype=np.uint16).reshape(2, 6)[:, ::2],
        np.asfortranarray(np.arange(6, dtype=np.uint16).reshape(2, 3)),
        np.ma.masked_array(np.arange(6, dtype=np.uint16).reshape(2, 3)),
    ],
    "ndarray:int64": [np.arange(300), np.zeros((2, 70000), np.int64), np.arange(3, dtype=np.longlong)],
    "ndarray": [
        np.ones((1, 2), np.float16),
        np.arange(3, dtype=np.int8),
        np.arange(4, dtype=">f8"),
        np.zeros((2, 0)),
    ],
    "json": [{"a": 1}],
}


@pytest.mark.parametrize("encoding", VALUES)
def test_copied_values_have_the_same_bytes_as_encoded_ones(tmp_path: Path, encoding: str) -> None:
    columns = {"a": "int", "x": encoding, "z": "str"}
    for folder, kind in (("copied", dict), ("encoded", MappingProxyType)):
        with MDSWriter(columns=columns, out=tmp_path / folder, size_limit=None) as writer:
            for number, value in enumerate(VALUES[encoding]):
                writer.write(kind({"z": "end", "a": number, "x": value}))
    buffer = _native.SampleBuffer([("x", encoding, resolve_encoding(encoding).width)])
    assert (buffer.push({"x": VALUES[encoding][0]}) is None) == (encoding in {"json", "float16"})
    name = "shard.00000.mds"
    assert (tmp_path / "copied" / name).read_bytes() == (tmp_path / "encoded" / name).read_bytes()


@pytest.mark.parametrize(
    ("encoding", "value"),
    [
        ("int8", 128),
        ("uint8", -1),
        ("int", 1 << 63),
        ("float32", 1e39),
        ("int", "7"),
        ("int", b"short"),
        ("str", 7),
        ("str", "\ud800"),
        ("ndarray:uint16:3", np.arange(4, dtype=np.uint16)),
        ("ndarray:uint16:3", np.arange(3, dtype=np.int16)),
        ("ndarray:uint16", array("H", [1, 2])),
        ("ndarray:uint16", np.zeros((), np.uint16)),
        ("ndarray", np.array([True])),
    ],
)
def test_a_value_of_another_type_raises_and_writes_nothing(tmp_path: Path, encoding: str, value: Any) -> None:
    with MDSWriter(columns={"a": "int", "x": encoding}, out=tmp_path / "x", size_limit=None) as writer:
        with pytest.raises(SampleError, match="column `x`"):
            writer.write({"a": 1, "x": value})
        with pytest.raises(SampleError, match="has no `x`"):
            writer.write({"a": 1})
    assert json.loads((tmp_path / "x" / "index.json").read_text())["shards"] == []
