"""The writer's files equal, byte for byte, those recorded from mosaicml-streaming's writer."""

from __future__ import annotations

import hashlib
import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import zstandard

from hocket.stream import MDSWriter, StreamingDataset
from hocket.stream.encodings import resolve_encoding


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    columns = {"b": "str", "a": "int", "c": "ndarray"}
    with MDSWriter(
        columns=columns, out=tmp_path, compression="zstd:7", hashes=["sha1", "xxh3_64"], size_limit=1 << 20
    ) as writer:
        writer.write({"a": 5, "b": "hi", "c": np.array([[1, 2, 3]], np.int16)})
        writer.write({"a": -1, "b": "", "c": np.array([7], np.float32)})
    return tmp_path


def test_the_shard_is_the_recorded_one(golden: Path) -> None:
    raw = zstandard.ZstdDecompressor().decompress((golden / "shard.00000.mds.zstd").read_bytes())
    assert len(raw) == 290
    assert np.frombuffer(raw, "<u4", 4).tolist() == [2, 239, 267, 290]
    assert raw[239:267].hex() == "020000000a0000000500000000000000" + "6869" + "11080103010002000300"
    assert raw[267:].hex() == "0000000007000000ffffffffffffffff" + "2204010000e040"
    assert hashlib.sha1(raw).hexdigest() == "c7bf4d885a9acb8f883d43c4552ed7e9e7ba677e"


def test_the_index_is_the_recorded_one(golden: Path) -> None:
    text = (golden / "index.json").read_text()
    index = json.loads(text)
    packed = (golden / "shard.00000.mds.zstd").read_bytes()
    zip_data = index["shards"][0].pop("zip_data")
    assert index == {
        "shards": [
            {
                "column_encodings": ["int", "str", "ndarray"],
                "column_names": ["a", "b", "c"],
                "column_sizes": [8, None, None],
                "compression": "zstd:7",
                "format": "mds",
                "hashes": ["sha1", "xxh3_64"],
                "raw_data": {
                    "basename": "shard.00000.mds",
                    "bytes": 290,
                    "hashes": {
                        "sha1": "c7bf4d885a9acb8f883d43c4552ed7e9e7ba677e",
                        "xxh3_64": "d02a354e92e5a0d0",
                    },
                },
                "samples": 2,
                "size_limit": 1 << 20,
                "version": 2,
            }
        ],
        "version": 2,
    }
    assert zip_data["basename"] == "shard.00000.mds.zstd"
    assert zip_data["bytes"] == len(packed)
    assert zip_data["hashes"]["sha1"] == hashlib.sha1(packed).hexdigest()
    assert text == json.dumps(json.loads(text), sort_keys=True)


def test_the_data_set_reads_back(golden: Path) -> None:
    samples = list(StreamingDataset(local=golden, batch_size=2))
    assert [(s["a"], s["b"], s["c"].tolist(), s["c"].dtype.name) for s in samples] == [
        (5, "hi", [[1, 2, 3]], "int16"),
        (-1, "", [7.0], "float32"),
    ]


@pytest.mark.parametrize(
    ("encoding", "value", "expected"),
    [
        ("int", 258, "0201000000000000"),
        ("float16", 1.5, "003e"),
        ("str", "hé", "68c3a9"),
        ("ndarray", np.arange(6, dtype=np.int16).reshape(2, 3), "11080203" + "000001000200030004000500"),
        ("ndarray", np.zeros(300, np.uint8), "08052c01" + "00" * 300),
        ("ndarray:int16", np.arange(6, dtype=np.int16).reshape(2, 3), "080203" + "000001000200030004000500"),
        ("ndarray:int16:2,3", np.arange(6, dtype=np.int16).reshape(2, 3), "000001000200030004000500"),
        ("str_int", 10**20, b"100000000000000000000".hex()),
        ("str_float", 0.1, b"0.1".hex()),
        ("str_decimal", Decimal("1.10"), b"1.10".hex()),
        ("json", {"b": [1, 2.5], "a": None}, b'{"b": [1, 2.5], "a": null}'.hex()),
        ("json", np.arange(3), b"[0, 1, 2]".hex()),
        ("jpeg_array", [b"one", b""], "02000000" + "03000000" + "00000000" + b"one".hex()),
        ("list[png]", [b"one", b"x"], "00000000" + "02000000" + "03000000" + "01000000" + b"onex".hex()),
        ("list[jpeg]", [], "00000000" + "00000000"),
    ],
)
def test_encoded_values_are_the_recorded_ones(encoding: str, value: object, expected: str) -> None:
    assert resolve_encoding(encoding).encode(value).hex() == expected


def test_raw_images_are_the_recorded_ones() -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (2, 1), (1, 2, 3))
    expected = "02000000" + "01000000" + "03000000" + b"RGB".hex() + "010203" * 2
    assert resolve_encoding("pil").encode(image).hex() == expected


def count_samples(folder: Path) -> list[tuple[int, int]]:
    shards = json.loads((folder / "index.json").read_text())["shards"]
    return [(shard["samples"], shard["raw_data"]["bytes"]) for shard in shards]


def test_the_size_limit_counts_bytes_as_mosaicml_streaming_does(tmp_path: Path) -> None:
    with MDSWriter(columns={"x": "bytes"}, out=tmp_path, size_limit=400, hashes=None) as writer:
        for _ in range(10):
            writer.write({"x": bytes(60)})
    assert [samples for samples, _ in count_samples(tmp_path)] == [3, 3, 3, 1]
    assert count_samples(tmp_path)[0] == (3, 375)
    assert (tmp_path / "shard.00000.mds").stat().st_size == 375


def test_a_first_sample_larger_than_the_limit_leaves_a_readable_empty_shard(tmp_path: Path) -> None:
    with MDSWriter(columns={"x": "bytes"}, out=tmp_path, size_limit=400) as writer:
        writer.write({"x": b"a" * 1000})
        writer.write({"x": b"b"})
    assert [samples for samples, _ in count_samples(tmp_path)] == [0, 1, 1]
    assert [s["x"][:1] for s in StreamingDataset(local=tmp_path, batch_size=1)] == [b"a", b"b"]
