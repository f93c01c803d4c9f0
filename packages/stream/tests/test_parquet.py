"""Parquet files are read in place: the values that conversion gives, in the order of any data set."""

from __future__ import annotations

import datetime as dt
import decimal
import functools
import itertools
import json
import operator
import pickle
import shutil
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.native.errors import StoreChangedError, StoreTransientError
from hocket.stream import MDSWriter, Stream, StreamingDataset
from hocket.stream.convert import from_parquet
from hocket.stream.errors import ConfigError, IndexNotFoundError, ShardCorruptError
from hocket.stream.read.parquet.index import _notice

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def make_table(start: int, count: int) -> Any:
    """Return rows `start` to `start + count`, each with values that derive from its number."""
    numbers = range(start, start + count)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "tokens": pa.array([list(range(n % 5)) for n in numbers], pa.list_(pa.int32())),
            "text": pa.array([f"é{n}" * (n % 4) for n in numbers]),
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return a folder of 3 files with 103 rows in 16 row groups of up to 7."""
    out = tmp_path / "parquet"
    out.mkdir()
    for number, (start, count) in enumerate([(0, 40), (40, 31), (71, 32)]):
        pq.write_table(make_table(start, count), out / f"part-{number}.parquet", row_group_size=7)
    return str(out)


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


def comparable(value: Any) -> Any:
    """Return a value with arrays as their type, shape and bytes, and NaN as text."""
    if isinstance(value, np.ndarray):
        return (value.dtype, value.shape, value.tobytes())
    return "nan" if isinstance(value, float) and value != value else value


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
    assert [file["key"] for file in kept["files"]] == [f"part-{n}.parquet" for n in range(3)]


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


def test_folders_named_as_columns_are_columns(tmp_path: Path) -> None:
    for name, number in [("day=1/kind=a", 0), ("day=2/kind=b", 50)]:
        (tmp_path / "in" / name).mkdir(parents=True)
        pq.write_table(make_table(number, 3), tmp_path / "in" / name / "x.parquet")
    from_parquet(tmp_path / "in", tmp_path / "out")
    actual = list(StreamingDataset(local=tmp_path / "in", batch_size=2))
    expected = list(StreamingDataset(local=tmp_path / "out", batch_size=2))
    plain = [{name: comparable(value) for name, value in sample.items()} for sample in actual]
    assert plain == [{name: comparable(value) for name, value in sample.items()} for sample in expected]
    assert [(sample["day"], sample["kind"]) for sample in actual[2:4]] == [(1, "a"), (2, "b")]


def test_a_column_beside_a_folder_of_its_name_can_be_left_out(tmp_path: Path) -> None:
    write_columns(tmp_path / "day=1", "a.parquet", day=[1], x=[2])
    with pytest.raises(ConfigError, match=r"column `day` is in .* leave it out by `columns`"):
        StreamingDataset(local=tmp_path)
    assert list(StreamingDataset(local=tmp_path, batch_size=1, columns=["x"])) == [{"x": 2}]


def write_columns(folder: Path, name: str, **columns: Any) -> None:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / name)


def test_files_whose_columns_differ_are_refused_with_both(tmp_path: Path) -> None:
    write_columns(tmp_path, "a.parquet", x=pa.array([1], pa.int32()), y=["a"])
    write_columns(tmp_path, "b.parquet", x=pa.array([1], pa.int64()), y=["a"])
    with pytest.raises(ConfigError, match=r"a\.parquet.*b\.parquet.*'int32'.*'int64'"):
        StreamingDataset(local=tmp_path)
    assert StreamingDataset(local=tmp_path, batch_size=2, columns=["y"])[1] == {"y": "a"}


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], names=["x", "x", "y"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"`a\.parquet` has several columns named `x`"):
        StreamingDataset(local=tmp_path)
    assert list(StreamingDataset(local=tmp_path, batch_size=1, columns=["y"])) == [{"y": 3}]


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


def test_a_folder_without_data_and_columns_of_an_index_are_refused(
    tmp_path: Path, write: Callable[..., str]
) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(IndexNotFoundError):
        StreamingDataset(local=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"ends with \.parquet"):
        StreamingDataset(local=tmp_path / "none", format="parquet")
    with pytest.raises(ConfigError, match="`columns` is given"):
        StreamingDataset(local=write(3), columns=["id"])


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


def test_files_of_several_splits_are_refused(tmp_path: Path) -> None:
    write_columns(tmp_path, "train-0.parquet", x=[1])
    write_columns(tmp_path, "test-0.parquet", x=[2])
    with pytest.raises(ConfigError, match=r"\['test', 'train'\]"):
        StreamingDataset(local=tmp_path)


@pytest.mark.parametrize("kind", [None, "parquet"])
def test_a_split_is_chosen_by_the_names_of_files_as_on_a_hub(tmp_path: Path, kind: str | None) -> None:
    hub = tmp_path / "hub"
    (hub / "data").mkdir(parents=True)
    for name, first in (("train-00000-of-00002", 0), ("train-00001-of-00002", 10), ("validation-00000", 20)):
        write_columns(hub, f"data/{name}.parquet", x=list(range(first, first + 10)))

    def make(split: str, **options: Any) -> StreamingDataset:
        return StreamingDataset(**({"local": hub} | options), split=split, format=kind, batch_size=4)

    def read(dataset: StreamingDataset) -> list[int]:
        return [sample["x"] for sample in dataset]

    assert read(make("train")) == list(range(20))
    assert read(make("dev")) == list(range(20, 30))
    assert read(make("all")) == list(range(30))
    with pytest.raises(ConfigError, match=r"`split` is `test`: .*\['train', 'validation'\], or `all`"):
        make("test")
    cached = make("train", remote=hub, local=tmp_path / "cache")
    assert read(cached) == list(range(20))
    assert [path.parent.name for path in (tmp_path / "cache").rglob("parquet.json")] == ["train"]
    started = make("train")
    next(started.batches())
    resumed = pickle.loads(pickle.dumps(make("train", remote=hub, local=tmp_path / "cache")))
    resumed.load_state_dict(started.state_dict())
    assert read(resumed) == list(range(4, 20))
    # A name with more words is that of its own files, and not of all that have one of the words.
    (tmp_path / "chat" / "data").mkdir(parents=True)
    for number, name in enumerate(["train_gen", "train_sft", "test_sft"]):
        write_columns(tmp_path / "chat", f"data/{name}-00000-of-00001-1a2b.parquet", x=[number])
    assert read(make("train_sft", local=tmp_path / "chat")) == [1]
    assert read(make("train", local=tmp_path / "chat")) == [0, 1]
    with pytest.raises(ConfigError, match=r"`split` is `train_large`: .*\['test', 'train'\]"):
        make("train_large", local=tmp_path / "chat")
    # A folder of the split's name comes first, and other data have splits by folders only.
    (hub / "train").mkdir()
    write_columns(hub, "train/part.parquet", x=[77])
    assert read(make("train")) == [77]
    with MDSWriter(columns={"x": "int"}, out=tmp_path / "mds" / "train") as writer:
        writer.write({"x": 5})
    with pytest.raises(IndexNotFoundError):
        StreamingDataset(local=tmp_path / "mds", split="trian")
    assert read(StreamingDataset(local=tmp_path / "mds", split="train", batch_size=1)) == [5]


def test_the_tools_of_the_command_choose_a_split_as_a_data_set_does(
    tmp_path: Path, call: Callable[..., tuple[object, str, str]]
) -> None:
    hub = tmp_path / "hub"
    (hub / "data").mkdir(parents=True)
    for name, numbers in (("train-0", range(20)), ("validation-0", range(20, 23)), ("test-0", range(30, 35))):
        write_columns(hub, f"data/{name}.parquet", x=list(numbers))
    for verb in ("inspect", "verify", "stats", "simulate", "bench"):
        exit_code, _, said = call(verb, hub)
        assert exit_code == 2
        assert "give `--split`, as `validation`, or `all`" in " ".join(said.split())
        assert call(verb, hub, "--split", "trian")[0] == 3
        assert call(verb, hub, "--split", "all")[0] == 0
    found = json.loads(call("inspect", hub, "--split", "dev", "--sample", "2", "--json")[1])
    dataset = StreamingDataset(local=hub, split="dev", batch_size=1)
    assert (found["samples"], found["fingerprint"]) == (3, dataset._reader.fingerprint)
    assert found["sample"]["values"]["x"] == 22
    assert json.loads(call("verify", hub, "--split", "train", "--json")[1])["shards"] == 1
    assert json.loads(call("stats", hub, "--split", "train", "--json")[1])["columns"][0]["num_values"] == 20
    few = ("--batch-size", "1", "--json")
    assert json.loads(call("simulate", hub, "--split", "test", *few)[1])["num_samples"] == 5
    assert json.loads(call("bench", hub, "--split", "test", *few)[1])["samples"] == 5
    (hub / "test").mkdir()
    write_columns(hub, "test/part.parquet", x=[77])
    for verb, name in (("simulate", "num_samples"), ("bench", "samples"), ("inspect", "samples")):
        assert json.loads(call(verb, hub, "--split", "test", *few[2 * (verb == "inspect") :])[1])[name] == 1


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


def test_footers_of_an_object_store_are_read_once(
    folder: str,
    s3d: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    call: Callable[..., tuple[object, str, str]],
) -> None:
    from hocket.native import Store

    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    store = Store(s3d.uri(tmp_path.name))
    for path in sorted(Path(folder).iterdir()):
        store.put(path.name, path.read_bytes())
    options: dict[str, Any] = {"remote": store.uri, "local": tmp_path / "cache", "batch_size": 8}
    s3d.reset()
    assert [sample["id"] for sample in StreamingDataset(**options)] == list(range(103))
    s3d.reset()
    dataset = StreamingDataset(**options, format="parquet")
    assert [sample["id"] for sample in dataset] == list(range(103))
    assert set(s3d.stats()["requests"]) == {"ListObjectsV2"}
    exit_code, out, _ = call("inspect", store.uri, "--json", "--sample", "40")
    assert (exit_code, json.loads(out)["sample"]["values"]["id"]) == (0, 40)
    assert call("verify", store.uri)[0] == 0
    behind = StreamingDataset(remote=store.uri, local=tmp_path / "other", batch_size=8)
    changed = Path(folder, "part-1.parquet").read_bytes()
    store.put("part-1.parquet", changed[:-8] + bytes(4) + changed[-4:])
    with pytest.raises(StoreChangedError, match=r"part-1\.parquet"):
        list(behind)


def test_a_complete_cache_is_read_without_its_store(
    folder: str, s3d_faults: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from hocket.native import Store

    server = s3d_faults()
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    store = Store(server.uri("data"))
    for path in sorted(Path(folder).iterdir()):
        store.put(path.name, path.read_bytes())
    options: dict[str, Any] = {"remote": store.uri, "local": tmp_path / "cache", "batch_size": 8}
    assert [sample["id"] for sample in StreamingDataset(**options)] == list(range(103))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for chosen in ("parquet", None):
        dataset = StreamingDataset(**options, format=chosen, download_timeout=1)
        assert [sample["id"] for sample in dataset] == list(range(103))
    with pytest.raises(StoreTransientError, match=r"index\.json"):
        StreamingDataset(**options | {"local": tmp_path / "other"}, download_timeout=1)


def test_the_tools_of_the_command_open_parquet(
    folder: str, call: Callable[..., tuple[object, str, str]], tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    dataset = StreamingDataset(local=folder, batch_size=8)
    exit_code, out, _ = call("inspect", folder, "--json", "--sample", "21")
    found = json.loads(out)
    assert (exit_code, found["samples"]) == (0, dataset.size)
    assert found["fingerprint"] == dataset._reader.fingerprint
    assert found["sample"]["values"]["id"] == dataset[21]["id"]
    assert all(".parquet, row group " in shard["name"] for shard in found["shards"])
    sizes = sum(path.stat().st_size for path in before)
    assert 0 < sum(shard["stored_bytes"] for shard in found["shards"]) < sizes
    exit_code, out, _ = call("verify", folder, "--json")
    assert (exit_code, json.loads(out)["sound"], json.loads(out)["shards"]) == (0, True, len(found["shards"]))
    exit_code, out, _ = call("simulate", folder, "--batch-size", "8", "--nodes", "2", "--json")
    nodes = json.loads(out)["nodes"]
    assert sum(node["num_samples"] for node in nodes) == dataset.size
    assert all(node["fetched_bytes"] > 0 for node in nodes)
    assert call("stats", folder)[0] == 0
    exit_code, out, _ = call("bench", folder, "--batch-size", "8", "--json")
    assert (exit_code, json.loads(out)["samples"]) == (0, dataset.size)
    assert {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()} == before

    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    victim = sorted(damaged.rglob("*.parquet"))[0]
    data = bytearray(victim.read_bytes())
    data[8:40] = bytes(32)
    victim.write_bytes(data)
    exit_code, out, _ = call("verify", damaged, "--json")
    bad = json.loads(out)["bad"]
    assert exit_code == 1
    assert [shard["name"] for shard in bad] == [f"{victim.name}, row group 0"]
    (tmp_path / "empty").mkdir()
    exit_code, _, said = call("inspect", tmp_path / "empty")
    assert exit_code == 3
    assert "or one of Parquet files" in said


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
