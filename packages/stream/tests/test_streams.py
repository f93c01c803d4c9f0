"""Several streams in one run: exact shares, batching and sampling methods, and states."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.stream import JSONWriter, MDSWriter, Stream, StreamingDataset, merge_index
from hocket.stream.errors import ConfigError, StateMismatchError
from hocket.stream.settings.weights import parse_count, resolve_counts

SIZES = (60, 25, 11)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Write three data sets whose samples are numbered consecutively, as by `sample_ids`."""
    root = tmp_path_factory.mktemp("streams")
    first = 0
    for number, size in enumerate(SIZES):
        with MDSWriter(columns={"id": "int"}, out=root / str(number), size_limit=300) as writer:
            for place in range(first, first + size):
                writer.write({"id": place})
        first += size
    return [str(root / str(number)) for number in range(len(SIZES))]


def open_streams(folders: list[str], weights: list[dict[str, Any]], **options: Any) -> StreamingDataset:
    streams = [Stream(local=folder, **weight) for folder, weight in zip(folders, weights, strict=True)]
    options = {"global_batch_size": 12, "shuffle": True, "shuffle_block_size": 20} | options
    return StreamingDataset(streams=streams, **options)


def stream_of(sample: int) -> int:
    return next(number for number in range(3) if sample < sum(SIZES[: number + 1]))


def by_stream(samples: list[int]) -> list[int]:
    counts = Counter(map(stream_of, samples))
    return [counts[number] for number in range(3)]


def read_all(dataset: StreamingDataset) -> list[list[int]]:
    """Read the batches of an epoch and check them against the plan."""
    planned = [dataset.sample_ids(number) for number in range(dataset.num_batches)]
    read = [batch["id"].tolist() for batch in dataset.batches()]
    assert read == planned
    return read


NONE: list[dict[str, Any]] = [{}, {}, {}]
PROPORTIONS = [{"proportion": 1}, {"proportion": 2}, {"proportion": 0.5}]


@pytest.mark.parametrize(
    ("weights", "options", "expected"),
    [
        (NONE, {}, [60, 25, 11]),
        (PROPORTIONS, {}, [27, 55, 14]),
        (PROPORTIONS, {"epoch_size": "1k"}, [286, 571, 143]),
        (NONE, {"epoch_size": 48}, [30, 13, 5]),
        ([{"repeat": 0.5}, {"choose": 70}, {}], {}, [30, 70, 11]),
    ],
)
def test_an_epoch_has_the_weighted_counts(
    folders: list[str], weights: list[dict[str, Any]], options: dict[str, Any], expected: list[int]
) -> None:
    dataset = open_streams(folders, weights, **options)
    samples = list(chain.from_iterable(read_all(dataset)))
    assert by_stream(samples) == dataset.stream_counts == expected
    # The samples of a repeated stream occur equally often, within one.
    counts = Counter(samples)
    for number, (size, wanted) in enumerate(zip(SIZES, expected, strict=True)):
        often = [count for sample, count in counts.items() if stream_of(sample) == number]
        assert set(often) <= {wanted // size, wanted // size + 1}


@pytest.mark.parametrize("tail", ["short", "drop", "pad"])
def test_stratified_batches_have_the_same_counts(folders: list[str], tail: str) -> None:
    dataset = open_streams(folders, PROPORTIONS, batching_method="stratified", epoch_size=100, tail=tail)
    batches = read_all(dataset)
    # The streams' exact shares of 12 samples are 3.43, 6.86 and 1.71.
    full = [batch for batch in batches if len(batch) == 12]
    assert len(full) >= 7
    assert {tuple(by_stream(batch)) for batch in full} == {(3, 7, 2)}
    assert len(batches) - len(full) == (tail == "short")


def test_a_ranks_slice_of_a_stratified_batch_has_every_stream(folders: list[str]) -> None:
    options = {"batching_method": "stratified", "global_batch_size": 14, "world_size": 2}
    for rank in (0, 1):
        dataset = open_streams(folders, PROPORTIONS, rank=rank, **options)
        batch = next(dataset.batches())
        assert by_stream(batch["id"].tolist()) == [2, 4, 1]


def test_per_stream_batches_have_one_stream_each_and_alternate(folders: list[str]) -> None:
    batches = read_all(open_streams(folders, NONE, batching_method="per_stream"))
    owners = [{stream_of(sample) for sample in batch} for batch in batches]
    assert all(len(owner) == 1 for owner in owners)
    assert [len(batch) for batch in batches].count(12) == 5 + 2
    assert sorted(chain.from_iterable(batches)) == list(range(sum(SIZES)))
    assert owners[:5].count({0}) in (2, 3)


def test_fixed_sampling_repeats_its_samples_and_balanced_sampling_varies_them(folders: list[str]) -> None:
    for method, distinct in (("fixed", 1), ("balanced", 3)):
        dataset = open_streams(folders, [{"choose": 10}, {}, {}], sampling_method=method)
        parts = {frozenset(s["id"] for s in dataset if s["id"] < SIZES[0]) for _ in range(3)}
        assert len(parts) == distinct
        assert {len(part) for part in parts} == {10}


def test_without_shuffling_streams_follow_each_other_in_storage_order(folders: list[str]) -> None:
    dataset = open_streams(folders, [{"choose": 10}, {}, {"repeat": 2}], shuffle=False)
    for _ in range(2):
        samples = [sample["id"] for sample in dataset]
        assert samples[:10] == sorted(samples[:10])
        assert samples[10:] == [*range(60, 85), *range(85, 96), *range(85, 96)]


@settings(max_examples=8, deadline=None)
@given(
    method=st.sampled_from(["random", "stratified", "per_stream"]),
    steps=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    worlds=st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 3),
    shuffle=st.booleans(),
)
def test_runs_of_several_streams_resume_on_any_world_size(
    folders: list[str], method: str, steps: tuple[int, int], worlds: tuple[int, int, int], shuffle: bool
) -> None:
    options = {"batching_method": method, "shuffle": shuffle}

    def run(world_size: int, state: Any, count: int) -> tuple[list[list[int]], Any]:
        batches: list[list[int]] = [[] for _ in range(count)]
        for rank in range(world_size):
            dataset = open_streams(folders, PROPORTIONS, rank=rank, world_size=world_size, **options)
            if state is not None:
                dataset.load_state_dict(json.loads(json.dumps(state)))
            step = 0
            while step < count:
                for batch in dataset.batches():
                    batches[step] += batch["id"][: dataset.batch_share()[0]].tolist()
                    step += 1
                    if step == count:
                        break
            after = dataset.state_dict()
        return batches, after

    whole, _ = run(1, None, sum(steps) + 4)
    pieces, state = [], None
    for count, world_size in zip((*steps, 4), worlds, strict=True):
        batches, state = run(world_size, state, count)
        pieces += batches
    assert pieces == whole


def test_the_state_is_small_and_names_the_field_that_differs(folders: list[str]) -> None:
    dataset = open_streams(folders * 30, [{"repeat": 0.9}] * 90)
    assert len(json.dumps(dataset.state_dict())) < 1024
    state = open_streams(folders, PROPORTIONS).state_dict()
    changes: list[tuple[str, list[str], list[dict[str, Any]], dict[str, Any]]] = [
        ("fingerprint", folders[::-1], PROPORTIONS, {}),
        ("mixture", folders, PROPORTIONS[::-1], {}),
        ("mixture", folders, PROPORTIONS, {"epoch_size": 97}),
        ("batching_method", folders, PROPORTIONS, {"batching_method": "per_stream"}),
        ("sampling_method", folders, PROPORTIONS, {"sampling_method": "fixed"}),
        ("sampling_granularity", folders, PROPORTIONS, {"sampling_granularity": 2}),
    ]
    for field, where, weights, options in changes:
        with pytest.raises(StateMismatchError, match=f"^`{field}` is "):
            open_streams(where, weights, **options).load_state_dict(state)


def test_random_access_reads_across_streams(folders: list[str]) -> None:
    dataset = open_streams(folders, NONE)
    assert dataset[61] == {"id": 61}
    assert [sample["id"] for sample in dataset[58:90:4]] == list(range(58, 90, 4))
    assert [sample["id"] for sample in dataset[[-1, 3, 3]]] == [95, 3, 3]
    assert dataset[5:5] == []
    with pytest.raises(IndexError, match="sample 96: expected a number from -96 to 95"):
        dataset[96]


def test_invalid_streams_raise(folders: list[str], tmp_path: Path) -> None:
    def fail(match: str, weights: list[dict[str, Any]], **options: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            open_streams(folders, weights, **options)

    fail("stream 1 has no `proportion`", [{"proportion": 1}, {}, {"proportion": 1}])
    fail("at most one kind", [{"proportion": 1, "repeat": 2}, {}, {}])
    fail("beside `repeat`", [{"repeat": 2}, {}, {}], epoch_size=10)
    fail("expected a number from 0", [{"repeat": -1}, {}, {}])
    fail("during the run are not supported", [{"proportion": [1, 2]}, {}, {}])
    fail("depend on the number of ranks", NONE, order="native", batching_method="device_per_stream")
    fail(
        "too few for one sample in each stratified batch",
        PROPORTIONS,
        batching_method="stratified",
        global_batch_size=3,
    )
    fail("add up to 0", [{"proportion": 0}] * 3)
    fail("`epoch_size` is '1x'", NONE, epoch_size="1x")
    fail("expected one of the two", NONE, remote="s3://b/p")
    cache = tmp_path / "cache"
    with pytest.raises(ConfigError, match="both cached in"):
        StreamingDataset(streams=[Stream(remote=folder, local=cache) for folder in folders])
    (tmp_path / "link").symlink_to(tmp_path)
    for other in (tmp_path / "none" / ".." / "cache", tmp_path / "link" / "cache"):
        streams = [Stream(remote=folders[0], local=cache), Stream(remote=folders[1], local=other)]
        with pytest.raises(ConfigError, match=f"both cached in `{cache}`"):
            StreamingDataset(streams=streams)
    # A data set named by two paths is one data set.
    streams = [Stream(remote=folders[0], local=cache), Stream(remote=folders[0], local=other)]
    dataset = StreamingDataset(streams=streams, batch_size=4, cache_limit="1mb")
    assert len(list(dataset)) == 2 * SIZES[0]


def test_streams_with_different_columns_are_mixed(tmp_path: Path) -> None:
    writes: list[tuple[dict[str, str], dict[str, Any]]] = [
        ({"a": "int", "x": "bytes"}, {"a": 1, "x": b"one"}),
        ({"a": "int", "x": "ndarray:uint8"}, {"a": 2, "x": np.array([2], np.uint8)}),
        ({"a": "int", "b": "str", "x": "bytes"}, {"a": 3, "b": "three", "x": b"three"}),
    ]
    for number, (columns, sample) in enumerate(writes):
        with MDSWriter(columns=columns, out=tmp_path / str(number)) as writer:
            writer.write(sample)
    MDSWriter(columns={"z": "int"}, out=tmp_path / "empty").finish()
    streams = [Stream(local=tmp_path / name) for name in ("empty", "0", "1", "2")]
    dataset = StreamingDataset(streams=streams, batch_size=3)
    (batch,) = dataset.batches()
    assert batch["a"].tolist() == [1, 2, 3]
    assert batch["b"] == [None, None, "three"]
    assert (batch["x"][0], batch["x"][1].tolist(), batch["x"][2]) == (b"one", [2], b"three")
    assert [dataset[number]["a"] for number in (2, 0, 1)] == [3, 1, 2]
    assert dataset[1]["x"].tolist() == [2]
    # One of the streams alone, then two of them in another order.
    one = StreamingDataset(streams=streams[1:2], batch_size=1)
    assert list(one) == [{"a": 1, "x": b"one"}]
    turned = StreamingDataset(streams=[streams[3], streams[1]], batch_size=2)
    assert list(turned) == [{"a": 3, "b": "three", "x": b"three"}, {"a": 1, "b": None, "x": b"one"}]


def test_int_and_int64_columns_are_one_array(tmp_path: Path) -> None:
    for name, kind in (("0", "int"), ("1", "int64"), ("2", "int32")):
        with MDSWriter(columns={"a": kind}, out=tmp_path / name) as writer:
            for value in range(3):
                writer.write({"a": 10 * int(name) + value})
    with MDSWriter(columns={"b": "int"}, out=tmp_path / "3") as writer:
        writer.write({"b": 1})
    for order in ("01", "10"):
        streams = [Stream(local=tmp_path / name) for name in order]
        dataset = StreamingDataset(streams=streams, batch_size=4)
        batches = [batch["a"] for batch in dataset.batches()]
        assert [batch.dtype for batch in batches] == [np.dtype("int64")] * 2
        expected = [10 * int(name) + value for name in order for value in range(3)]
        assert np.concatenate(batches).tolist() == expected
        assert [dataset[number]["a"] for number in range(6)] == expected
    # Where a stream lacks the column, or has integers of another size, its batches stay lists.
    for others in ("013", "012"):
        streams = [Stream(local=tmp_path / name) for name in others]
        assert all(
            isinstance(batch["a"], list)
            for batch in StreamingDataset(streams=streams, batch_size=4).batches()
        )


def test_int_and_int64_shards_of_one_index_are_one_array(tmp_path: Path) -> None:
    for name, column in (
        ("a", {"x": "int64"}),
        ("b", {"x": "int"}),
        ("c", {"x": "int32"}),
        ("d", {"y": "int"}),
    ):
        with MDSWriter(columns=column, out=tmp_path / "all" / name, size_limit=32) as writer:
            for value in range(4):
                writer.write({next(iter(column)): 10 * "abcd".index(name) + value})
    with JSONWriter(columns={"x": "int"}, out=tmp_path / "all" / "e") as text_writer:
        text_writer.write({"x": 40})

    def read(*names: str) -> StreamingDataset:
        merge_index([tmp_path / "all" / name for name in names], tmp_path / "all")
        return StreamingDataset(local=tmp_path / "all", batch_size=3)

    for names in ("abe", "ba"):
        dataset = read(*names)
        batches = [batch["x"] for batch in dataset.batches()]
        assert {type(batch) for batch in batches} == {np.ndarray}
        assert {batch.dtype for batch in batches} == {np.dtype("int64")}
        expected = [
            10 * "abcde".index(name) + value for name in names for value in range(4 if name != "e" else 1)
        ]
        assert np.concatenate(batches).tolist() == expected
        assert [dataset[number]["x"] for number in range(len(expected))] == expected
    # The same index beside another stream of one of the two encodings.
    mixed = [Stream(local=tmp_path / "all"), Stream(local=tmp_path / "all" / "b")]
    assert all(
        isinstance(one["x"], np.ndarray) for one in StreamingDataset(streams=mixed, batch_size=3).batches()
    )
    for names in ("abc", "abd"):
        assert all(isinstance(batch["x"], list) for batch in read(*names).batches())


def test_an_empty_list_of_streams_is_ignored_if_a_location_is_given(folders: list[str]) -> None:
    dataset = StreamingDataset(streams=[], local=folders[0], batch_size=4)
    assert dataset.size == SIZES[0]
    with pytest.raises(ConfigError, match="`streams` is empty"):
        StreamingDataset(streams=[], batch_size=4)


@given(
    shares=st.lists(st.floats(0, 100), min_size=1, max_size=6).filter(lambda shares: sum(shares) > 0),
    total=st.integers(1, 10**12),
)
def test_shares_are_exact_within_one(shares: list[float], total: int) -> None:
    counts = resolve_counts(
        [Stream(proportion=share) for share in shares], [7] * len(shares), epoch_size=total
    )
    assert sum(counts) == total
    assert all(
        abs(count - total * share / sum(shares)) <= 1 + 1e-12 * total
        for count, share in zip(counts, shares, strict=True)
    )


def test_counts_with_a_unit_are_parsed_exactly() -> None:
    assert [parse_count("n", text) for text in ("7", "100k", "64M", "2b", "1t", "1.5k")] == [
        7, 100_000, 64_000_000, 2 * 10**9, 10**12, 1500,
    ]  # fmt: skip
    for bad in ("", "k", "-1", "0", "0.5", "1.0001k", "1kb"):
        with pytest.raises(ConfigError, match="expected a whole number"):
            parse_count("n", bad)


def test_weights_are_taken_as_exact_decimal_numbers() -> None:
    repeated = [Stream(local="d", repeat=repeat) for repeat in (0.7, np.float64(0.29), 2.3, 1e-3, 1)]
    assert resolve_counts(repeated, [1000, 100, 10, 1000, 7]) == [700, 29, 23, 1, 7]
    shares = [Stream(local="d", proportion=share) for share in (0.1, 0.7, 0.2)]
    assert resolve_counts(shares, [1, 1, 1], epoch_size=10) == [1, 7, 2]
