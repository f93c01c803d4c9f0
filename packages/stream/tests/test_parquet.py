"""Parquet files are read in place: the values that conversion gives, in the order of any data set."""

from __future__ import annotations

import datetime as dt
import decimal
import functools
import itertools
import json
import operator
import pickle
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.native.errors import StoreChangedError
from hocket.stream import Stream, StreamingDataset
from hocket.stream.convert import from_parquet
from hocket.stream.errors import ConfigError, ShardCorruptError
from hocket.stream.read.parquet.index import _notice
from support.parquet_files import comparable, make_table, write_columns, write_folder

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return a folder of 3 files with 103 rows in 16 row groups of up to 7."""
    return write_folder(tmp_path / "parquet")


def all_types() -> Any:
    """Return a table with a column of each type that can be read."""
    moment = dt.datetime(2024, 2, 29, 12, 30, 15, 123456)
    moments = [moment, dt.datetime(1969, 12, 31, 23, 59, 59), dt.datetime(2000, 1, 1)]
    columns: dict[str, Any] = {
        f"{kind}": pa.array([0, 1, 100], getattr(pa, kind)())
        for kind in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    }
    columns["most"] = pa.array([2**64 - 1, 0, 2**63], pa.uint64())
    columns["most32"] = pa.array([2**32 - 1, 0, 2**31], pa.uint32())
    columns["half"] = pa.array(np.array([1.5, -2.0, 6e-8], np.float16))
    columns["single"] = pa.array([0.1, -1e30, float("inf")], pa.float32())
    columns["double"] = pa.array([0.1, -1e300, 5e-324], pa.float64())
    columns["flag"] = pa.array([True, False, True])
    columns["text"] = pa.array(["", 'é\n"', "x" * 1000])
    columns["large"] = pa.array(["a", "b", "a"], pa.large_string())
    columns["word"] = pa.array(["a", "b", "a"]).dictionary_encode()
    columns["data"] = pa.array([b"", b"\xff\x00", b"abc"])
    columns["fixed"] = pa.array([b"abcd", b"\x00" * 4, b"wxyz"], pa.binary(4))
    columns["uuid"] = pa.array([uuid.UUID(int=n).bytes for n in (0, 7, 2**127)], pa.uuid())
    for precision in (5, 15, 30, 60):
        values = [decimal.Decimal("1.50"), decimal.Decimal("-0.03"), decimal.Decimal("123.45")]
        make = pa.decimal256 if precision > 38 else pa.decimal128
        columns[f"decimal{precision}"] = pa.array(values, make(precision, 2))
    columns["tiny"] = pa.array(
        [decimal.Decimal(1), decimal.Decimal(0), decimal.Decimal("1e-9")], pa.decimal128(38, 9)
    )
    columns["date"] = pa.array([dt.date(1, 1, 1), dt.date(2024, 2, 29), dt.date(9999, 12, 31)])
    for unit in ("s", "ms", "us", "ns"):
        columns[f"moment_{unit}"] = pa.array(moments, pa.timestamp("us")).cast(pa.timestamp(unit), safe=False)
        columns[f"utc_{unit}"] = columns[f"moment_{unit}"].cast(pa.timestamp(unit, "UTC"))
    columns["time"] = pa.array([dt.time(0), dt.time(23, 59, 59, 1), dt.time(1, 2, 3)], pa.time64("us"))
    columns["tokens"] = pa.array([[1, 2], [], [3]], pa.list_(pa.uint16()))
    columns["floats"] = pa.array([[0.5], [1.5, 2.5], []], pa.large_list(pa.float64()))
    columns["null_int"] = pa.array([1, None, 3])
    columns["null_text"] = pa.array(["a", None, "c"])
    columns["null_double"] = pa.array([0.1, None, float("nan")])
    columns["words"] = pa.array([["a", None], [], None], pa.list_(pa.string()))
    columns["pairs"] = pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int64()))
    columns["nested"] = pa.array(
        [
            {"a": 1, "b": [{"c": "x", "d": [1.5, None]}], "e": b"\x01\x02"},
            {"a": None, "b": [], "e": b""},
            None,
        ]
    )
    columns["deep"] = pa.array([[[1], []], [], [[2, 3], [4]]], pa.list_(pa.list_(pa.int64())))
    columns["flags"] = pa.array([[True, None], [], None], pa.list_(pa.bool_()))
    columns["when"] = pa.array([{"t": moment}, {"t": None}, None], pa.struct([("t", pa.timestamp("us"))]))
    columns["empty"] = pa.array([None, None, None])
    return pa.table(columns)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip", "brotli", "lz4"])
def test_every_type_has_the_values_of_conversion(tmp_path: Path, compression: str) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    table = all_types()
    version = {"data_page_version": "2.0"} if compression == "zstd" else {}
    pq.write_table(
        table,
        source / "a.parquet",
        compression=compression,
        row_group_size=2,
        write_page_checksum=True,
        **version,
    )
    from_parquet(source, out)
    expected = StreamingDataset(local=out, batch_size=3)
    actual = StreamingDataset(local=source, batch_size=3)
    assert actual.size == 3
    for one, other in zip(actual, expected, strict=True):
        assert {name: comparable(value) for name, value in one.items()} == {
            name: comparable(value) for name, value in other.items()
        }


@pytest.mark.parametrize("year", [1, 1969, 2262, 9999])
def test_times_of_96_bits_are_exact_or_refused(tmp_path: Path, year: int) -> None:
    moments = pa.array([dt.datetime(year, 12, 31, 23, 59, 59, 5)], pa.timestamp("us"))
    pq.write_table(pa.table({"x": moments}), tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    dataset = StreamingDataset(local=tmp_path, batch_size=1)
    if year == 1969:
        assert list(dataset) == [{"x": "1969-12-31T23:59:59.000005"}]
        return
    with pytest.raises(ShardCorruptError, match=r"INT96.* outside of the years 1678 to 2261"):
        list(dataset)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_nested_rows_are_those_of_pyarrow(data: st.DataObject, tmp_path_factory: Any) -> None:
    kind = data.draw(
        st.recursive(
            st.sampled_from([pa.int32(), pa.string(), pa.bool_(), pa.float64()]),
            lambda inner: st.one_of(
                inner.map(pa.list_),
                st.tuples(inner, inner).map(lambda two: pa.struct([("a", two[0]), ("b", two[1])])),
            ),
            max_leaves=4,
        )
    )
    rows = data.draw(st.lists(values_of(kind), min_size=1, max_size=12))
    folder = tmp_path_factory.mktemp("nested")
    table = pa.table({"x": pa.array(rows, kind)})
    pq.write_table(table, folder / "x.parquet", row_group_size=data.draw(st.integers(1, 5)))
    dataset = StreamingDataset(local=folder, batch_size=len(rows), encodings={"x": "json"})
    assert [sample["x"] for sample in dataset] == table["x"].to_pylist()


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return values of an Arrow type, with nulls at every level."""
    if pa.types.is_list(kind):
        inner: st.SearchStrategy[Any] = st.lists(values_of(kind.value_type), max_size=3)
    elif pa.types.is_struct(kind):
        inner = st.fixed_dictionaries({field.name: values_of(field.type) for field in kind})
    elif pa.types.is_string(kind):
        inner = st.text(max_size=3)
    elif pa.types.is_boolean(kind):
        inner = st.booleans()
    elif pa.types.is_floating(kind):
        inner = st.floats(allow_nan=False, allow_infinity=False)
    else:
        inner = st.integers(-(2**31), 2**31 - 1)
    return st.none() | inner


def read_globally(world_size: int, workers: int, **options: Any) -> list[list[int]]:
    """Return the global batches of an epoch, joined from all ranks in order."""
    from hocket.stream import StreamingDataLoader

    batches: list[list[int]] = []
    for rank in range(world_size):
        dataset = StreamingDataset(global_batch_size=24, rank=rank, world_size=world_size, **options)
        loader = StreamingDataLoader(dataset, num_workers=workers)
        for number, batch in enumerate(loader):
            if rank == 0:
                batches.append([])
            batches[number] += batch["id"][: loader.batch_share()[0]].tolist()
    return batches


def test_global_batches_are_equal_on_any_number_of_ranks_and_workers(folder: str, tmp_path: Path) -> None:
    from_parquet(folder, tmp_path / "mds", size_limit=1000)
    options = {"shuffle": True, "shuffle_block_size": 16}
    reference = StreamingDataset(local=folder, global_batch_size=24, rank=0, world_size=1, **options)
    expected = [reference.sample_ids(number) for number in range(reference.num_batches)]
    assert sorted(itertools.chain(*expected)) == list(range(103))
    for world_size, workers in [(1, 0), (2, 0), (4, 2), (8, 0)]:
        assert read_globally(world_size, workers, local=folder, **options) == expected


def test_a_cached_row_group_is_neither_fetched_nor_decoded_again(folder: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"remote": folder, "local": tmp_path / "cache", "batch_size": 8}
    first = StreamingDataset(**options)
    expected = [sample["id"] for sample in first]
    assert expected == list(range(103))
    assert first.metrics()["stream/fetches"] == 16
    again = StreamingDataset(**options)
    assert [sample["id"] for sample in again] == expected
    assert again.metrics()["stream/fetches"] == 0
    assert again[100]["id"] == 100
    kept = json.loads((tmp_path / "cache" / "parquet.json").read_text())
    assert [key for key, *_ in kept["files"]] == [f"part-{n}.parquet" for n in range(3)]


def test_a_new_file_leaves_cached_row_groups_as_they_are(folder: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"remote": folder, "local": tmp_path / "cache", "batch_size": 8}
    assert [sample["id"] for sample in StreamingDataset(**options)] == list(range(103))
    pq.write_table(make_table(103, 5), Path(folder, "part-3.parquet"))
    dataset = StreamingDataset(**options)
    assert [sample["id"] for sample in dataset] == list(range(108))
    assert dataset.metrics()["stream/fetches"] == 1


def test_only_the_columns_that_are_read_are_fetched(folder: str, tmp_path: Path) -> None:
    fetched = []
    for number, columns in enumerate([None, ["id"]]):
        dataset = StreamingDataset(remote=folder, local=tmp_path / f"{number}", batch_size=8, columns=columns)
        samples = list(dataset)
        assert [sample["id"] for sample in samples] == list(range(103))
        fetched.append(dataset.metrics()["stream/fetched_bytes"])
    assert list(samples[0]) == ["id"]
    assert fetched[1] < fetched[0]


def test_a_state_goes_on_with_other_ranks_and_beside_other_streams(
    folder: str, write: Callable[..., str]
) -> None:
    streams = [Stream(local=folder, columns=["id", "text"]), Stream(local=write(50))]

    def make(rank: int, world_size: int) -> StreamingDataset:
        return StreamingDataset(
            streams=streams, global_batch_size=12, shuffle=True, rank=rank, world_size=world_size
        )

    whole = make(0, 1)
    batches = whole.batches()
    expected = [next(batches)["id"].tolist() for _ in range(5)]
    state = whole.state_dict()
    expected = [batch["id"].tolist() for batch in batches]
    parts = []
    for rank in range(3):
        dataset = make(rank, 3)
        dataset.load_state_dict(json.loads(json.dumps(state)))
        parts.append([batch["id"][: dataset.batch_share()[0]].tolist() for batch in dataset.batches()])
    assert [functools.reduce(operator.iadd, three, []) for three in zip(*parts, strict=True)] == expected


def test_a_pickled_data_set_reads_on(folder: str) -> None:
    dataset = pickle.loads(pickle.dumps(StreamingDataset(local=folder, batch_size=8, columns=["id"])))
    assert [sample["id"] for sample in dataset] == list(range(103))


def test_a_limited_cache_evicts_row_groups(folder: str, tmp_path: Path) -> None:
    # Little is read ahead: row groups that are awaited are not evicted.
    dataset = StreamingDataset(
        remote=folder,
        local=tmp_path / "cache",
        batch_size=8,
        shuffle=True,
        cache_limit="40kb",
        prefetch_batches=1,
        prefetch_bytes="1kb",
    )
    for _ in range(2):
        assert sorted(sample["id"] for sample in dataset) == list(range(103))
    assert dataset.metrics()["stream/evicted"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"columns": ["idd"]}, r"`columns` names \['idd'\].*'id'"),
        ({"columns": []}, "at least one"),
        ({"columns": "id"}, "list of names"),
        ({"encodings": {"no": "json"}}, r"`encodings` names \['no'\]"),
        ({"encodings": {"text": "int32"}}, r"cannot be read as `int32`.*'str', 'json'"),
        ({"format": "parket"}, "'parket'.*'mds', 'parquet'"),
        ({"validate_hash": "xxh3_64"}, "`validate_hash`"),
        ({"format": "mds", "columns": ["id"]}, "`columns`"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(folder: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamingDataset(local=folder, **arguments)


def test_one_warning_tells_of_many_small_row_groups(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for size, told in [(5, 1), (100, 0)]:
        pq.write_table(pa.table({"x": range(100)}), tmp_path / "a.parquet", row_group_size=size)
        dataset = StreamingDataset(local=tmp_path, batch_size=10)
        for _ in range(2):
            assert sum(len(batch["x"]) for batch in dataset.batches()) == 100
        notices = [text for text in caplog.messages if "`hocket-stream convert` would write 1 shards" in text]
        assert len(notices) == told
        assert all("the 20 row groups of" in text for text in notices)
        caplog.clear()


def test_a_null_where_a_value_is_needed_is_refused_with_its_row(tmp_path: Path) -> None:
    write_columns(tmp_path, "a.parquet", x=pa.array([[1], [None], [2]], pa.list_(pa.int32())))
    with pytest.raises(ConfigError, match=r'row 1 has no value in column `x`.*encodings=\{"x": "json"\}'):
        list(StreamingDataset(local=tmp_path, batch_size=3))
    dataset = StreamingDataset(local=tmp_path, batch_size=3, encodings={"x": "json"})
    assert [sample["x"] for sample in dataset] == [[1], [None], [2]]
    write_columns(tmp_path / "b", "b.parquet", x=pa.array([b"1", None]))
    with pytest.raises(ConfigError, match="column `x` has nulls"):
        StreamingDataset(local=tmp_path / "b")


def test_arrays_get_the_shape_that_is_given(tmp_path: Path) -> None:
    write_columns(tmp_path, "a.parquet", x=pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]), n=[1, 2])
    dataset = StreamingDataset(local=tmp_path, batch_size=2, encodings={"x": "ndarray:int64:2,2", "n": "int"})
    (batch,) = dataset.batches()
    assert batch["x"].tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    with pytest.raises(ConfigError, match=r"32 bytes in column `x`: expected 24"):
        list(StreamingDataset(local=tmp_path, batch_size=2, encodings={"x": "ndarray:int64:3"}))


def test_images_of_datasets_are_images(tmp_path: Path) -> None:
    from PIL import Image

    datasets = pytest.importorskip("datasets")
    images = [Image.new("RGB", (4, 3), (shade, 0, 0)) for shade in (0, 200)]
    features = datasets.Features(
        {"image": datasets.Image(), "grid": datasets.Array2D((2, 2), "float32"), "both": [datasets.Image()]}
    )
    grids = [np.arange(4, dtype=np.float32).reshape(2, 2) + number for number in range(2)]
    rows = {"image": images, "grid": grids, "both": [images, []]}
    made = datasets.Dataset.from_dict(rows, features=features)
    made.to_parquet(str(tmp_path / "a.parquet"))
    samples = list(StreamingDataset(local=tmp_path, batch_size=2))
    assert [sample["image"].getpixel((0, 0)) for sample in samples] == [(0, 0, 0), (200, 0, 0)]
    assert [len(sample["both"]) for sample in samples] == [2, 0]
    assert np.array_equal(samples[1]["grid"], grids[1])


def test_a_damaged_page_and_a_changed_file_are_reported(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "sums" / "a.parquet"
    path.parent.mkdir()
    pq.write_table(
        make_table(0, 2000), path, compression="none", write_page_checksum=True, use_dictionary=False
    )
    whole = path.read_bytes()
    for place in (20, 2000, 5000):
        dataset = StreamingDataset(local=path.parent, batch_size=500)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        with pytest.raises(ShardCorruptError, match=r"row group 0 of a\.parquet"):
            list(dataset)
        path.write_bytes(whole)
    path.write_bytes(whole + b"PAR1")
    with pytest.raises(StoreChangedError, match=f"of {len(whole) + 4} bytes"):
        list(dataset)
    path.write_bytes(b"no Parquet at all")
    with pytest.raises(ShardCorruptError, match="PAR1"):
        StreamingDataset(local=path.parent)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_damage_is_an_error_or_keeps_the_number_of_rows(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(all_types(), path, compression="snappy" if seed % 2 else "none")
    whole, random = path.read_bytes(), np.random.default_rng(seed)
    outcomes = Counter[str]()
    for _ in range(60):
        damaged = bytearray(whole)
        for place in random.integers(4, len(whole) - 8, random.integers(1, 4)):
            damaged[place] = random.integers(256)
        path.write_bytes(damaged)
        try:
            rows = list(StreamingDataset(local=tmp_path, batch_size=3))
        except (ShardCorruptError, ConfigError):
            outcomes["refused"] += 1
        else:
            assert len(rows) == 3  # the file has no checksums, so that a value may be another
            outcomes["read"] += 1
    assert outcomes["refused"] > 0


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ([600 << 20] * 3, "each is decoded whole"),
        ([600 << 20], "each is decoded whole"),
        ([500_000] * 40, "each takes a request of its own"),
        ([500_000] * 16, None),
        ([2 << 20] * 400, None),
        ([100 << 20] * 4, None),
    ],
)
def test_the_notice_of_row_groups_is_for_those_beyond_either_size(sizes: list[int], told: str | None) -> None:
    notice = _notice("s3://bucket/data", [{"raw_data": {"bytes": size}} for size in sizes])
    if told is None:
        assert notice is None
        return
    assert notice is not None
    assert f"the {len(sizes)} row groups of `s3://bucket/data` have" in notice
    assert told in notice
    assert f"would write {-(-sum(sizes) // 67_108_864)} shards" in notice
