"""Filters on the rows of Parquet files, streams made of them, and files whose columns differ."""

from __future__ import annotations

import functools
import itertools
import json
import operator
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.native.errors import StoreTransientError
from hocket.stream import Stream, StreamingDataLoader, StreamingDataset
from hocket.stream.errors import ConfigError
from support.parquet_files import write_columns

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

COMPARISONS = ("==", "=", "!=", "<", "<=", ">", ">=")


def write_corpus(folder: Path, *, row_group_size: int = 7) -> str:
    """Write 90 rows in three languages, with a length and a score that may be null; return the folder."""
    for number, lang in enumerate(("de", "en", "fr")):
        part = folder / f"lang={lang}"
        part.mkdir(parents=True)
        ids = range(30 * number, 30 * number + 30)
        table = pa.table(
            {
                "id": pa.array(ids, pa.int64()),
                "length": pa.array([(7 * n) % 31 for n in ids], pa.int32()),
                "score": pa.array([None if n % 6 == 5 else n / 90 for n in ids], pa.float64()),
                "tokens": pa.array([list(range(n % 4)) for n in ids], pa.list_(pa.int32())),
                "text": pa.array([None if n % 5 == 4 else f"t{n:02}" for n in ids]),
            }
        )
        pq.write_table(table, part / "x.parquet", row_group_size=row_group_size)
    return str(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("rows") / "corpus")


def read_ids(folder: str | Path, **options: Any) -> list[int]:
    dataset = StreamingDataset(local=folder, batch_size=8, **options)
    return [sample["id"] for sample in dataset]


def conditions() -> st.SearchStrategy[tuple[str, str, Any]]:
    """Return conditions on all columns that are compared, the folders' among them."""
    # Without -0.0, which pyarrow takes for 0.0 in `==` and not in `in`.
    scores = st.floats(-0.1, 1.1, allow_nan=False).map(lambda score: score + 0.0)
    lengths = st.integers(-2, 33)
    texts = st.integers(0, 90).map(lambda n: f"t{n:02}")
    langs = st.sampled_from(["de", "en", "fr", "xx"])
    values = {"length": lengths, "score": scores, "text": texts, "lang": langs, "id": st.integers(-5, 95)}

    def of(name: str) -> st.SearchStrategy[tuple[str, str, Any]]:
        one = st.tuples(st.just(name), st.sampled_from(COMPARISONS), values[name])
        lists = st.lists(values[name], min_size=1, max_size=20)
        return one | st.tuples(st.just(name), st.sampled_from(["in", "not in"]), lists)

    return st.sampled_from(sorted(values)).flatmap(of)


@settings(max_examples=60, deadline=None)
@given(filters=st.lists(st.lists(conditions(), min_size=1, max_size=3), min_size=1, max_size=3))
def test_any_filter_keeps_the_rows_that_pyarrow_keeps(corpus: str, filters: list[Any]) -> None:
    for chosen in (filters, filters[0]):
        expected = sorted(pq.read_table(corpus, filters=chosen)["id"].to_pylist())
        if not expected:
            with pytest.raises(ConfigError, match="which keeps no row of"):
                read_ids(corpus, filters=chosen)
            continue
        assert read_ids(corpus, filters=chosen) == expected


def test_rows_that_are_read_have_the_values_of_those_that_are_not_filtered(corpus: str) -> None:
    whole = list(StreamingDataset(local=corpus, batch_size=8))
    few = list(StreamingDataset(local=corpus, batch_size=8, filters=[("length", "<", 9)]))
    assert [dict(sample, tokens=sample["tokens"].tolist()) for sample in few] == [
        dict(sample, tokens=sample["tokens"].tolist()) for sample in whole if sample["length"] < 9
    ]
    # A null is refused in the rows that are read, and not in others. Row groups are decoded at once, so any
    # of them may fail first.
    options: dict[str, Any] = {"columns": ["id", "text"], "encodings": {"text": "str"}}
    with pytest.raises(ConfigError, match=r"row \d has no value in column `text`"):
        read_ids(corpus, **options)
    filters = [("text", ">=", "")]
    with pytest.raises(ConfigError, match=r"row \d has no value in column `text`"):
        read_ids(corpus, filters=filters, **options)
    known = [n for n in range(90) if n % 5 != 4]
    assert read_ids(corpus, columns=["id"], filters=filters) == known
    assert read_ids(corpus, filters=[("id", "in", known)], **options) == known


def test_files_in_folders_that_a_filter_leaves_out_are_not_opened(tmp_path: Path) -> None:
    folder = Path(write_corpus(tmp_path / "corpus"))
    (folder / "lang=de" / "x.parquet").write_bytes(b"no Parquet")
    (folder / "lang=fr" / "x.parquet").write_bytes(b"no Parquet")
    assert read_ids(folder, filters=[("lang", "==", "en")]) == list(range(30, 60))
    dataset = StreamingDataset(
        remote=folder, local=tmp_path / "cache", batch_size=8, filters=[("lang", "==", "en")], columns=["id"]
    )
    assert [sample["id"] for sample in dataset] == list(range(30, 60))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix == ".bits"]


def test_numbers_of_folders_are_compared_as_numbers(tmp_path: Path) -> None:
    for day in (2, 10):
        write_columns(tmp_path / f"day={day}", "a.parquet", id=[day])
    assert read_ids(tmp_path, filters=[("day", "<", 10)]) == [2]
    with pytest.raises(
        ConfigError, match=r"\('day', '==', '10'\) of `filters` compares text with 10 .*a number"
    ):
        read_ids(tmp_path, filters=[("day", "==", "10")])
    assert read_ids(tmp_path, filters=[("day", "==", "10")], encodings={"day": "str"}) == [10]


@pytest.mark.parametrize("shuffle", [False, True])
def test_filtered_streams_are_equal_on_any_ranks_and_workers_and_resume(corpus: str, shuffle: bool) -> None:
    def make(rank: int, world_size: int) -> StreamingDataset:
        streams = [
            Stream(local=corpus, columns=["id"], name=name, filters=[("length", sign, 12)])
            for name, sign in (("short", "<"), ("long", ">="))
        ]
        weights = [(0, {"short": 0.9, "long": 0.1}), (50, {"short": 0.25, "long": 0.75})]
        return StreamingDataset(
            streams=streams,
            weights=weights,
            epoch_size=100,
            global_batch_size=10,
            shuffle=shuffle,
            rank=rank,
            world_size=world_size,
        )

    dataset = make(0, 1)
    states, expected = [], []
    for _ in range(3):
        for batch in dataset.batches():
            expected.append(batch["id"].tolist())
            states.append(json.dumps(dataset.state_dict()))
    lengths = [[(7 * number) % 31 for number in batch] for batch in expected]
    assert [sum(length < 12 for length in batch) for batch in lengths[:5]] == [9] * 5
    assert sum(length < 12 for batch in lengths[5:] for length in batch) == round(250 / 4)
    for is_short, name in ((True, "short"), (False, "long")):
        times = Counter(n for batch in expected for n in batch if ((7 * n) % 31 < 12) == is_short)
        assert max(times.values()) - min(times.values()) <= 1, name
        assert len(times) == sum(((7 * n) % 31 < 12) == is_short for n in range(90))
    for world_size, workers in [(2, 0), (4, 2), (3, 1)]:
        read: list[list[int]] = [[] for _ in range(17)]
        for rank in range(world_size):
            dataset = make(rank, world_size)
            loader = StreamingDataLoader(dataset, num_workers=workers)
            dataset.load_state_dict(json.loads(states[12]))
            numbers = itertools.count()
            for _ in range(2):
                for batch in loader:
                    read[next(numbers)] += batch["id"][: loader.batch_share()[0]].tolist()
        assert read == expected[13:]


def test_another_filter_is_another_data_set(corpus: str) -> None:
    from hocket.stream.errors import StateMismatchError

    dataset = StreamingDataset(local=corpus, batch_size=8, filters=[("length", "in", [0, 7])])
    state = dataset.state_dict()
    other = StreamingDataset(local=corpus, batch_size=8, filters=[("length", "in", [0, 14])])
    assert other.size == dataset.size
    with pytest.raises(StateMismatchError, match="`fingerprint`"):
        other.load_state_dict(state)
    same = pickle.loads(
        pickle.dumps(StreamingDataset(local=corpus, batch_size=8, filters=[("length", "in", [7, 0])]))
    )
    same.load_state_dict(state)


def test_chosen_rows_are_kept_in_the_cache_and_found_again(tmp_path: Path, monkeypatch: Any) -> None:
    from hocket.stream.read.parquet import rows

    folder, cache = write_corpus(tmp_path / "corpus"), tmp_path / "cache"
    options: dict[str, Any] = {"remote": folder, "local": cache, "batch_size": 8, "columns": ["id"]}
    filters: list[Any] = [("length", "<", 9), ("lang", "!=", "fr")]
    scans = []
    scan = rows._scan
    monkeypatch.setattr(rows, "_scan", lambda *args: scans.append(args) or scan(*args))
    expected = [n for n in range(60) if (7 * n) % 31 < 9]
    for _ in range(2):
        dataset = StreamingDataset(**options, filters=filters)
        assert [sample["id"] for sample in dataset] == expected
    assert len(scans) == 1
    (kept,) = cache.glob("rows-*.bits")
    kept.write_bytes(kept.read_bytes()[:-1] + b"\xff")
    assert [sample["id"] for sample in StreamingDataset(**options, filters=filters)] == expected
    assert len(scans) == 2
    # A file that changed is read again; the row groups of other files stay in the cache.
    table = pq.read_table(f"{folder}/lang=de/x.parquet", partitioning=None)
    pq.write_table(
        table.set_column(1, "length", pa.array([0] * 30, pa.int32())), f"{folder}/lang=de/x.parquet"
    )
    assert [sample["id"] for sample in StreamingDataset(**options, filters=filters)] == [
        *range(30),
        *(n for n in expected if n >= 30),
    ]
    assert len(scans) == 3


def test_kept_footers_of_some_files_do_not_stand_for_all(tmp_path: Path, monkeypatch: Any) -> None:
    from hocket.stream.read.parquet import files

    options: dict[str, Any] = {
        "remote": write_corpus(tmp_path / "in"),
        "local": tmp_path / "cache",
        "columns": ["id"],
    }
    few = StreamingDataset(**options, batch_size=8, filters=[("lang", "==", "en")])

    def unreachable(*args: Any) -> Any:
        raise StoreTransientError("out of reach")

    with monkeypatch.context() as patch:
        patch.setattr(files, "_list", unreachable)
        again = StreamingDataset(**options, batch_size=8, filters=[("lang", "==", "en")])
        assert again.size == few.size == 30
        with pytest.raises(StoreTransientError):
            StreamingDataset(**options, batch_size=8, format="parquet")
    assert StreamingDataset(**options, batch_size=8).size == 90
    monkeypatch.setattr(files, "_list", unreachable)
    assert StreamingDataset(**options, batch_size=8, format="parquet").size == 90


def test_rows_of_a_store_are_chosen_by_the_bytes_of_one_column(
    s3d: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from hocket.native import Store

    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    folder, store = Path(write_corpus(tmp_path / "corpus")), Store(s3d.uri(tmp_path.name))
    for path in sorted(folder.rglob("*.parquet")):
        store.put(str(path.relative_to(folder)), path.read_bytes())
    filters = [[("length", "<", 9), ("lang", "!=", "fr")], [("lang", "==", "de")]]
    expected = [n for n in range(60) if n < 30 or (7 * n) % 31 < 9]
    options: dict[str, Any] = {"remote": store.uri, "local": tmp_path / "cache", "filters": filters}
    dataset = StreamingDataset(**options, columns=["id"], batch_size=8)
    loader = StreamingDataLoader(dataset, num_workers=2, multiprocessing_context="spawn")
    assert [number for batch in loader for number in batch["id"].tolist()] == expected
    s3d.reset()
    again = StreamingDataset(**options, columns=["id"], batch_size=8, format="parquet")
    assert [sample["id"] for sample in again] == expected
    assert set(s3d.stats()["requests"]) == {"ListObjectsV2"}


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ([], "expected a list of conditions"),
        ("length < 9", "expected a list of conditions"),
        ([("length", "<")], "expected a list of conditions"),
        ([("length", "<<", 9)], r"operator '<<' on `length`: expected one of"),
        ([("length", "in", "abc")], "'abc' after `in` on `length`: expected a list"),
        ([("length", "in", [1, "a"])], r"\['a number', 'text'\] in one list"),
        ([("length", "<", None)], "expected a number, text or a boolean"),
        ([("length", "<", "9")], r"compares text with 0 in column `length`: expected a number"),
        ([("text", "==", 1)], r"compares a number with 't00' in column `text`: expected text"),
        ([("lenght", "<", 9)], r"`filters` names \['lenght'\]: .*'lang', 'id', 'length'"),
        ([("tokens", "==", 9)], r"`filters` names `tokens`, which is read as `ndarray:int32`"),
        ([("lang", "==", "it")], r"\('lang', '==', 'it'\)\], which keeps no row"),
        ([("length", ">", 90)], r"\('length', '>', 90\)\], which keeps no row"),
    ],
)
def test_filters_that_cannot_be_meant_are_refused(corpus: str, filters: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_ids(corpus, filters=filters)


def test_filters_of_other_formats_are_refused(write: Any) -> None:
    folder = write(5)
    for argument in ({"filters": [("id", "<", 3)]}, {"schema": "union"}):
        with pytest.raises(ConfigError, match=f"`{next(iter(argument))}` is given"):
            StreamingDataset(local=folder, **argument)


def test_integers_and_floats_are_compared_exactly(tmp_path: Path) -> None:
    big = 2**53
    write_columns(
        tmp_path,
        "a.parquet",
        id=[0, 1, 2],
        x=[big, big + 1, big + 2],
        y=pa.array([0.1, 0.5, 1], pa.float32()),
    )
    assert read_ids(tmp_path, columns=["id"], filters=[("x", ">", float(big))]) == [1, 2]
    assert read_ids(tmp_path, columns=["id"], filters=[("x", "==", big + 1)]) == [1]
    assert read_ids(tmp_path, columns=["id"], filters=[("y", ">", 0.1)]) == [
        0,
        1,
        2,
    ]  # 0.1 in 32 bits is larger
    assert read_ids(tmp_path, columns=["id"], filters=[("y", "==", np.float32(0.1))]) == [0]


def read_rows(folder: Path, **options: Any) -> list[dict[str, Any]]:
    return list(StreamingDataset(local=folder, batch_size=2, **options))


def test_a_union_has_nulls_where_a_file_lacks_a_column(tmp_path: Path) -> None:
    write_columns(tmp_path, "a.parquet", id=[0, 1], old=["x", "y"])
    write_columns(tmp_path, "b.parquet", id=[2], new=[5], none=pa.array([None], pa.null()))
    write_columns(tmp_path, "c.parquet", id=[3], old=["z"], none=["w"])
    with pytest.raises(ConfigError, match=r"a\.parquet` and of `b\.parquet` differ.*schema='union'"):
        read_rows(tmp_path)
    expected = pa.concat_tables(
        [pq.read_table(path) for path in sorted(tmp_path.iterdir())], promote_options="default"
    ).to_pylist()
    assert read_rows(tmp_path, schema="union") == expected
    assert read_rows(tmp_path, schema="union", columns=["id", "new"]) == [
        {"id": row["id"], "new": row["new"]} for row in expected
    ]
    assert [row["id"] for row in read_rows(tmp_path, schema="union", filters=[("old", ">=", "y")])] == [1, 3]
    assert [row["id"] for row in read_rows(tmp_path, schema="union", filters=[("new", "!=", 4)])] == [2]


def test_a_column_that_cannot_be_null_may_not_be_missing(tmp_path: Path) -> None:
    write_columns(tmp_path, "a.parquet", id=[0], x=pa.array([[1]], pa.list_(pa.int32())), data=[b"1"])
    write_columns(tmp_path, "b.parquet", id=[1])
    for name, kind in (("x", "ndarray:int32"), ("data", "bytes")):
        with pytest.raises(ConfigError, match=f"column `{name}` is not in `b.parquet`.* read as `{kind}`"):
            read_rows(tmp_path, schema="union", columns=["id", name])
    rows = read_rows(tmp_path, schema="union", columns=["x"], encodings={"x": "json"})
    assert rows == [{"x": [1]}, {"x": None}]


NUMBERS = [
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
]


@pytest.mark.parametrize("pair", list(itertools.combinations(NUMBERS, 2)), ids="-".join)
def test_types_of_numbers_are_widened_exactly_or_refused(tmp_path: Path, pair: tuple[str, str]) -> None:
    values = []
    for number, kind in enumerate(pair):
        info: Any = np.finfo(kind) if "float" in kind else np.iinfo(kind)
        values.append([info.min, info.max, info.dtype.type(1)])
        write_columns(tmp_path, f"{number}.parquet", x=pa.array(np.array(values[-1], kind)))
    with pytest.raises(
        ConfigError, match=rf"`x` is `{pair[0]}` in `0\.parquet` and `{pair[1]}` in `1\.parquet`"
    ):
        read_rows(tmp_path, schema="union")
    floats = ["float" in kind for kind in pair]
    if any(floats) != all(floats) or "uint64" in pair:
        with pytest.raises(ConfigError, match=rf"`{pair[0]}` in `0\.parquet` and `{pair[1]}`"):
            read_rows(tmp_path, schema="permissive")
        return
    wide = "float64" if all(floats) else "int64"
    expected = [
        int(value) if wide == "int64" else float(value) for value in functools.reduce(operator.iadd, values)
    ]
    for options in ({"schema": "permissive"}, {"schema": "union", "encodings": {"x": wide}}):
        rows = read_rows(tmp_path, **options)
        assert [row["x"] for row in rows] == expected
        assert {row["x"].dtype for row in rows} == {np.dtype(wide)}


def test_other_types_are_refused_with_both_files(tmp_path: Path) -> None:
    write_columns(tmp_path, "a.parquet", id=[0], x=[1])
    write_columns(tmp_path, "b.parquet", id=[1], x=["1"])
    for schema in ("union", "permissive"):
        with pytest.raises(
            ConfigError, match=r"`x` is `int64` in `a\.parquet` and `str` in `b\.parquet`.*'json'"
        ):
            read_rows(tmp_path, schema=schema)
    assert [row["x"] for row in read_rows(tmp_path, schema="union", encodings={"x": "json"})] == [1, "1"]
    with pytest.raises(ConfigError, match=r"`schema` is 'merge': expected one of"):
        read_rows(tmp_path, schema="merge")
