"""Compressions, hashes, text shards, and data sets whose shards differ in format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.native import _native
from hocket.stream import (
    CSVWriter,
    JSONWriter,
    MDSWriter,
    StreamingDataset,
    TSVWriter,
    XSVWriter,
    errors,
    merge_index,
)
from support.sampling import cases

COMPRESSIONS = [None, "br", "br:1", "bz2", "bz2:1", "gz", "gz:0", "snappy", "zstd", "zstd:22"]
HASHES = [
    "md5",
    "sha1",
    "sha224",
    "sha256",
    "sha384",
    "sha512",
    "sha3_224",
    "sha3_256",
    "sha3_384",
    "sha3_512",
]
HASHES += ["blake2b", "blake2s"]


def read(folder: str | Path) -> list[dict[str, Any]]:
    return list(StreamingDataset(local=folder, batch_size=3))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_compression_round_trips(
    write: Callable[..., str], sample: Callable[[int], Any], compression: str | None, tmp_path: Path
) -> None:
    folder = Path(write(60, compression=compression))
    names = {path.name.split(".", 3)[-1] for path in folder.glob("shard.*")}
    assert names == ({"mds"} if compression is None else {compression.partition(":")[0]})
    for number, got in enumerate(StreamingDataset(remote=folder, local=tmp_path / "cache", batch_size=7)):
        expected = sample(number)
        assert (got["tokens"] == expected.pop("tokens")).all()
        assert {name: got[name] for name in expected} == expected


def test_digests_equal_those_of_hashlib(write: Callable[..., str]) -> None:
    assert set(HASHES) < set(_native.hash_names())
    folder = Path(write(20, hashes=_native.hash_names()))
    shard = json.loads((folder / "index.json").read_text())["shards"][0]
    data = (folder / shard["raw_data"]["basename"]).read_bytes()
    digests = shard["raw_data"]["hashes"]
    assert {name: digests[name] for name in HASHES} == {
        name: hashlib.new(name, data).hexdigest() for name in HASHES
    }
    for name in digests:
        assert len(list(StreamingDataset(local=folder, batch_size=4, validate_hash=name))) == 20


def test_decompression_stops_at_the_size_in_the_index(tmp_path: Path) -> None:
    for compression in COMPRESSIONS[1:]:
        folder = tmp_path / str(compression)
        with MDSWriter(columns={"x": "bytes"}, out=folder, compression=compression) as writer:
            writer.write({"x": bytes(1 << 20)})
        index = json.loads((folder / "index.json").read_text())
        index["shards"][0]["raw_data"]["bytes"] -= 1
        size = index["shards"][0]["raw_data"]["bytes"]
        (folder / "index.json").write_text(json.dumps(index))
        with pytest.raises(errors.ShardCorruptError, match=f"decompress.*expected {size} bytes"):
            read(folder)


TEXT = {"name": "str", "count": "int", "share": "float"}
WRITERS: dict[str, Callable[..., Any]] = {
    "json": JSONWriter,
    "csv": CSVWriter,
    "tsv": TSVWriter,
    "xsv": lambda **settings: XSVWriter(separator="::", newline="\r\n", **settings),
}
text_samples = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.text(st.characters(exclude_characters=",\t:\r\n", codec="utf-8"), max_size=9),
            "count": st.integers(-(1 << 63), (1 << 63) - 1),
            "share": st.floats(allow_nan=False, allow_infinity=False),
        }
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=cases(full=1200, sample=48), deadline=None)
@given(kind=st.sampled_from(sorted(WRITERS)), samples=text_samples)
def test_text_shards_round_trip(
    tmp_path_factory: pytest.TempPathFactory, kind: str, samples: list[dict[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("text")
    with WRITERS[kind](
        columns=TEXT, out=folder, size_limit=100, compression="zstd:1", hashes=["xxh64"]
    ) as writer:
        for sample in samples:
            writer.write(sample)
    assert read(folder) == samples


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("json", b'{"count": 1, "name": "\\u00e9", "share": 0.5}\n'),
        ("csv", "count,name,share\n1,é,0.5\n".encode()),
        ("tsv", "count\tname\tshare\n1\té\t0.5\n".encode()),
        ("xsv", "count::name::share\r\n1::é::0.5\r\n".encode()),
    ],
)
def test_text_shards_have_the_expected_bytes(tmp_path: Path, kind: str, data: bytes) -> None:
    with WRITERS[kind](columns=TEXT, out=tmp_path) as writer:
        writer.write({"name": "é", "count": 1, "share": 0.5})
    assert (tmp_path / f"shard.00000.{kind}").read_bytes() == data
    begin = 0 if kind == "json" else data.index(b"1")
    meta = (tmp_path / f"shard.00000.{kind}.meta").read_bytes()
    assert [int.from_bytes(meta[at : at + 4], "little") for at in (0, 4, 8)] == [1, begin, len(data)]
    entry = json.loads((tmp_path / "index.json").read_text())["shards"][0]
    described = {"raw_data", "zip_data", "raw_meta", "zip_meta", "samples"}
    assert json.loads(meta[12:]) == {key: value for key, value in entry.items() if key not in described}
    assert ("separator" in entry) == (kind == "xsv")


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("json", {"name": 5}, "`name`: 5 is a int: expected str"),
        ("json", {"count": 1 << 63}, "64 bits"),
        ("json", {"share": float("nan")}, "finite"),
        ("csv", {"name": "a,b"}, "holds ','.*no quoting"),
        ("xsv", {"name": "a\r\nb"}, "no quoting"),
        ("tsv", {"count": True}, "expected int"),
        ("json", {"name": "a\ud800"}, r"`name`: 'a\\ud800': .* UTF-8 can encode"),
        ("csv", {"name": "a\ud800"}, r"`name`: 'a\\ud800': .* UTF-8 can encode"),
    ],
)
def test_text_samples_that_the_format_cannot_hold_raise(
    tmp_path: Path, kind: str, value: dict[str, Any], message: str
) -> None:
    writer = WRITERS[kind](columns=TEXT, out=tmp_path)
    with pytest.raises(errors.SampleError, match=message):
        writer.write({"name": "", "count": 1, "share": 1.0} | value)
    writer.finish()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda out: JSONWriter(columns={"a": "bytes"}, out=out), "`bytes`: expected one of"),
        (lambda out: CSVWriter(columns={"a,b": "str"}, out=out), "holds ','"),
        (lambda out: XSVWriter(columns=TEXT, separator="", out=out), "`separator` is empty"),
        (lambda out: TSVWriter(columns=TEXT, newline="", out=out), "`newline` is empty"),
    ],
)
def test_invalid_text_columns_and_separators_raise(
    tmp_path: Path, make: Callable[[Path], Any], message: str
) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        make(tmp_path)


@pytest.mark.parametrize(
    ("separator", "newline", "values"),
    [("::", "\n", ["x:", "y"]), ("aba", "\n", ["ab", "x"]), (",", "\n\n", ["x", "y\n"])],
)
def test_values_that_would_be_split_differently_when_read_raise(
    tmp_path: Path, separator: str, newline: str, values: list[str]
) -> None:
    columns = {"a": "str", "b": "str"}
    good = {"a": "x", "b": ":y"}
    with XSVWriter(columns=columns, separator=separator, newline=newline, out=tmp_path) as writer:
        writer.write(good)
        with pytest.raises(errors.SampleError, match="would be read back as"):
            writer.write(dict(zip(columns, values, strict=True)))
    assert list(read(tmp_path)) == [good]


def test_a_corrupt_text_shard_raises(tmp_path: Path) -> None:
    with CSVWriter(columns=TEXT, out=tmp_path, hashes=None) as writer:
        writer.write({"name": "a", "count": 1, "share": 1.0})
    shard = tmp_path / "shard.00000.csv"
    shard.write_bytes(shard.read_bytes().replace(b"1,a", b"x,a"))
    with pytest.raises(
        errors.ShardCorruptError, match=r"sample 0 of shard .* expected an integer of 64 bits as `count`"
    ):
        read(tmp_path)
    meta = tmp_path / "shard.00000.csv.meta"
    meta.write_bytes(b"\xff" * 4 + meta.read_bytes()[4:])
    with pytest.raises(errors.ShardCorruptError, match="expected 1 samples"):
        read(tmp_path)


def test_shards_may_differ_in_format_columns_and_compression(tmp_path: Path) -> None:
    with MDSWriter(columns={"a": "int", "b": "str"}, out=tmp_path / "0", compression="gz") as writer:
        writer.write({"a": 1, "b": "x"})
    with MDSWriter(columns={"a": "int", "b": "json", "c": "uint8"}, out=tmp_path / "1") as writer:
        writer.write({"a": 2, "b": [None], "c": 7})
    MDSWriter(columns={"a": "int"}, out=tmp_path / "2").finish()
    with JSONWriter(columns={"a": "int"}, out=tmp_path / "3", compression="br") as writer:
        writer.write({"a": 3})
    merge_index(str(tmp_path))
    samples = read(tmp_path)
    assert samples == [
        {"a": 1, "b": "x", "c": None},
        {"a": 2, "b": [None], "c": 7},
        {"a": 3, "b": None, "c": None},
    ]
    batch = next(iter(StreamingDataset(local=tmp_path, batch_size=3).batches()))
    assert batch["a"].tolist() == [1, 2, 3]
    assert batch["b"] == ["x", [None], None]
