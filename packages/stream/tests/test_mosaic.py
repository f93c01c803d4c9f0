"""`order="mosaic"`: recorded batches of mosaicml-streaming, its states, and runs that change topology."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.stream import MDSWriter, MosaicOrder, Stream, StreamingDataLoader, StreamingDataset
from hocket.stream.errors import ConfigError, StateMismatchError
from hocket.stream.mosaic.partitions import partition
from hocket.stream.mosaic.sampling import draw
from hocket.stream.mosaic.shuffles import ALGORITHMS, Shuffle

#: Orders recorded from mosaicml-streaming, by algorithm and canonical nodes: 16 samples in shards of 5, 7 and
#: 4, seed 9176, epoch 0, blocks of 8.
GOLDENS = {
    ("naive", 1): [7, 2, 5, 14, 6, 8, 10, 9, 13, 11, 1, 15, 12, 3, 0, 4],
    ("naive", 2): [7, 2, 5, 14, 6, 8, 10, 9, 13, 11, 1, 15, 12, 3, 0, 4],
    ("py1s", 1): [1, 2, 4, 3, 0, 7, 10, 5, 8, 11, 6, 9, 14, 12, 13, 15],
    ("py1s", 2): [6, 7, 8, 5, 14, 13, 12, 15, 9, 10, 11, 2, 1, 0, 3, 4],
    ("py2s", 1): [4, 0, 3, 1, 2, 5, 6, 7, 8, 9, 10, 11, 15, 13, 14, 12],
    ("py2s", 2): [5, 10, 7, 8, 15, 14, 12, 13, 0, 2, 1, 3, 4, 9, 6, 11],
    ("py1br", 1): [2, 5, 0, 3, 8, 6, 9, 4, 1, 7, 15, 12, 14, 11, 10, 13],
    ("py1br", 2): [7, 6, 8, 5, 12, 13, 14, 15, 2, 11, 4, 9, 3, 0, 1, 10],
    ("py1e", 1): [1, 2, 4, 3, 0, 7, 10, 5, 8, 11, 6, 14, 9, 12, 13, 15],
    ("py1e", 2): [7, 6, 8, 14, 5, 13, 12, 15, 10, 3, 11, 2, 9, 4, 1, 0],
}


@pytest.mark.parametrize(("algo", "nodes"), GOLDENS)
def test_a_shuffle_is_the_recorded_one(algo: str, nodes: int) -> None:
    shuffle = Shuffle(unit_sizes=[5, 7, 4], num_canonical_nodes=nodes, seed=9176, epoch=0, block_size=8)
    assert shuffle.run(algo).tolist() == GOLDENS[algo, nodes]


@pytest.mark.parametrize(
    ("num_samples", "canonical", "nodes", "ranks", "size", "drop", "expected"),
    [
        (17, 6, 1, 2, 1, 0, [[0, 5, 11, 1, 6, 12, 1, 7, 13], [2, 8, 14, 3, 9, 15, 4, 10, 16]]),
        (9, 4, 4, 1, 3, 0, [[0, 1, 1], [2, 3, 3], [4, 5, 5], [6, 7, 8]]),
        (25, 1, 2, 1, 16, 8, [[*range(8, 25, 2), *[-1] * 7], [*range(9, 25, 2), 23, *[-1] * 7]]),
        (19, 8, 2, 1, 5, 0, [[0, 4, 9, 14, 1, 5, 10, 15, 1, 6, 10, 15, -1, -1, -1],
                             [2, 7, 11, 16, 3, 8, 12, 17, 3, 8, 13, 18, -1, -1, -1]]),
    ],
)  # fmt: skip
def test_a_partition_is_the_recorded_one(
    num_samples: int, canonical: int, nodes: int, ranks: int, size: int, drop: int, expected: list[list[int]]
) -> None:
    for algo in ("orig", "relaxed"):
        found = partition(
            algo,
            num_samples,
            num_canonical_nodes=canonical,
            num_nodes=nodes,
            ranks_per_node=ranks,
            batch_size=size,
            drop_first=drop,
        )
        assert found.reshape(nodes * ranks, -1).tolist() == expected


@pytest.mark.parametrize(
    ("nodes", "ranks", "expected"),
    [
        (1, 2, [range(8), range(500, 508)]),
        (2, 2, [range(0, 8, 2), range(1, 8, 2), range(500, 508, 2), range(501, 508, 2)]),
    ],
)
def test_the_first_global_batch_of_two_canonical_nodes_is_the_recorded_one(
    nodes: int, ranks: int, expected: list[range]
) -> None:
    options: Any = {"num_canonical_nodes": 2, "num_nodes": nodes, "ranks_per_node": ranks}
    found = partition("orig", 1000, batch_size=16 // (nodes * ranks), **options)
    first = found.reshape(nodes * ranks, -1)[:, : 16 // (nodes * ranks)]
    assert first.tolist() == [list(part) for part in expected]


def test_a_draw_of_samples_is_the_recorded_one() -> None:
    options: Any = {"seed": 9176, "shuffle": True, "sampling_method": "balanced", "granularity": 1}
    shards = [[7, 7, 7, 7, 2]]
    units, ids = draw(shards, [7], epoch=0, **options)
    assert (units, ids.tolist()) == ([3, 1, 2, 1], [4, 5, 6, 12, 21, 26, 28])
    units, ids = draw(shards, [7], epoch=1, **options)
    assert (units, ids.tolist()) == ([1, 2, 3, 1], [5, 8, 12, 14, 16, 17, 26])


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    algo=st.sampled_from(sorted(ALGORITHMS)),
    nodes=st.integers(1, 9),
    epoch=st.integers(0, 3),
    block=st.integers(2, 60),
)
def test_a_shuffle_has_every_sample_once(
    sizes: list[int], algo: str, nodes: int, epoch: int, block: int
) -> None:
    shuffle = Shuffle(unit_sizes=sizes, num_canonical_nodes=nodes, seed=5, epoch=epoch, block_size=block)
    assert sorted(shuffle.run(algo).tolist()) == list(range(sum(sizes)))


@given(st.integers(1, 200), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))
def test_a_partition_has_every_sample_and_equal_ranks(
    count: int, nodes: int, factor: int, ranks: int, size: int
) -> None:
    options: Any = {"num_canonical_nodes": nodes * factor, "num_nodes": nodes, "ranks_per_node": ranks}
    places = partition("orig", count, batch_size=size, **options)
    assert set(places[places >= 0].tolist()) == set(range(count))
    assert len({(rank >= 0).sum() for rank in places}) == 1


#: The batches of each rank.
Ranks = list[list[list[int]]]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[StreamingDataset]]:
    """Return `launch(folder, nodes, ranks, **options)`, which opens the data set as each rank would."""

    def launch(folder: str, nodes: int, ranks: int, **options: Any) -> list[StreamingDataset]:
        world_size = nodes * ranks
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        made = []
        for rank in range(world_size):
            monkeypatch.setenv("RANK", str(rank))
            made.append(
                StreamingDataset(local=folder, batch_size=24 // world_size, order="mosaic", **options)
            )
        return made

    return launch


def read(datasets: list[StreamingDataset], count: int | None = None) -> Ranks:
    """Return up to `count` further batches of each rank."""
    ranks = []
    for dataset in datasets:
        batches = dataset.batches()
        ranks.append([b["id"].tolist() for b in itertools.islice(batches, count)])
        batches.close()  # type: ignore[attr-defined]
    return ranks


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def sets(ranks: Ranks) -> list[list[int]]:
    """Return each global batch as a sorted list of its samples."""
    return [sorted(flat(parts)) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("algo", sorted(ALGORITHMS))
def test_global_batches_are_the_same_sets_on_any_topology_and_after_a_resume(
    write: Callable[..., str], launch: Callable[..., list[StreamingDataset]], algo: str
) -> None:
    folder = write(240)
    options: Any = {"shuffle": True, "shuffle_algo": algo, "num_canonical_nodes": 4, "shuffle_block_size": 32}
    expected = sets(read(launch(folder, 1, 1, **options)))
    assert sorted(flat(expected)) == list(range(240))
    for nodes, ranks in [(2, 1), (2, 2), (4, 1), (1, 3)]:
        first = launch(folder, nodes, ranks, **options)
        assert sets(read(first, 3)) == expected[:3]
        states = [dataset.state_dict() for dataset in first]
        assert all(state == states[0] for state in states)
        second = launch(folder, 1, 2, **options)
        for dataset in second:
            dataset.load_state_dict(json.loads(json.dumps(states[0])))
            assert dataset.num_batches == len(expected)
        assert sets(read(second)) == expected[3:]
        assert [dataset.state_dict()["epoch"] for dataset in second] == [1, 1]


def test_the_state_has_mosaics_form_and_resumes_with_another_batch_size(write: Callable[..., str]) -> None:
    folder = write(103)
    options: Any = {"local": folder, "shuffle": True, "order": MosaicOrder(shuffle_algo="py1s")}
    dataset = StreamingDataset(batch_size=8, **options)
    batches = dataset.batches()
    done = flat(next(batches)["id"].tolist() for _ in range(3))
    state = dataset.state_dict()
    assert state == {
        "epoch": 0,
        "sample_in_epoch": 24,
        "num_canonical_nodes": 64,
        "shuffle_seed": 9176,
        "initial_physical_nodes": 1,
    }
    rest = flat(batch["id"].tolist() for batch in batches)
    assert set(done + rest) == set(range(103))
    other = StreamingDataset(batch_size=5, **options)
    other.load_state_dict(state)
    assert flat(batch["id"].tolist() for batch in other.batches()) == rest
    assert len(dataset) == len(done + rest)


def test_a_state_at_the_end_of_an_epoch_resumes_with_the_next(write: Callable[..., str]) -> None:
    options: Any = {"local": write(30), "order": "mosaic", "batch_size": 8}
    dataset = StreamingDataset(**options)
    batches = dataset.batches()
    for _ in range(4):
        next(batches)
    state = dataset.state_dict()
    assert state["sample_in_epoch"] == 30
    other = StreamingDataset(**options)
    other.load_state_dict(state)
    assert list(other.batches()) == []
    assert [s["id"] for s in other] == list(range(30))
    other.load_state_dict(state | {"epoch": -1, "sample_in_epoch": 0})
    assert (other.cursor.epoch, other.cursor.batch) == (0, 0)


@pytest.mark.parametrize("method", ["random", "stratified", "per_stream", "device_per_stream"])
def test_a_state_past_the_end_of_the_epoch_raises(write: Callable[..., str], method: str) -> None:
    streams = [Stream(local=write(18, "a")), Stream(local=write(12, "b"))]
    dataset = StreamingDataset(streams=streams, order="mosaic", batch_size=4, batching_method=method)
    batches = dataset.batches()
    next(batches)
    state = dataset.state_dict()
    # 8 batches of both streams have room for 32 samples: the last one may have been filled up on other ranks.
    end = {"random": 32, "stratified": 24, "per_stream": 28, "device_per_stream": 28}[method]
    for past in (end + 1, 10**30):
        with pytest.raises(StateMismatchError, match=f"`sample_in_epoch` is {past} .* at most {end}, which"):
            dataset.load_state_dict(state | {"sample_in_epoch": past})
    assert dataset.state_dict() == state
    rest = [batch["id"].tolist() for batch in batches]
    dataset.load_state_dict(state)
    assert [batch["id"].tolist() for batch in dataset.batches()] == rest
    dataset.load_state_dict(state | {"sample_in_epoch": end})
    assert dataset.state_dict()["sample_in_epoch"] == end
    assert list(dataset.batches()) == []
    assert dataset.cursor.epoch == 1
    assert len(list(dataset.batches())) == len(rest) + 1


def test_the_end_of_an_epoch_is_the_end_on_other_topologies(
    write: Callable[..., str], launch: Callable[..., list[StreamingDataset]]
) -> None:
    folder = write(23)
    wide = launch(folder, 2, 2, num_canonical_nodes=2)
    for dataset in wide:
        dataset.load_state_dict(dataset.state_dict() | {"sample_in_epoch": 5})
        for _ in dataset.batches():
            state = dataset.state_dict()
    assert state["sample_in_epoch"] == 24
    for dataset in [*wide, *launch(folder, 1, 1, num_canonical_nodes=2)]:
        dataset.load_state_dict(state)
        assert list(dataset.batches()) == []


def test_a_node_count_that_divides_no_canonical_nodes_needs_the_relaxed_partition(
    write: Callable[..., str], launch: Callable[..., list[StreamingDataset]]
) -> None:
    folder = write(101)
    options: Any = {"shuffle": True, "shuffle_block_size": 32}
    first = launch(folder, 2, 1, **options)
    whole = sets(read(first))
    read(stopped := launch(folder, 2, 1, **options), 2)
    state = stopped[0].state_dict()
    second = launch(folder, 3, 1, partition_algo="relaxed", **options)
    for dataset in second:
        dataset.load_state_dict(state)
    assert all(len(dataset.plan.batch_ids(0, 4)) == 6 for dataset in second)
    assert sets(read(second))[:2] == whole[2:4]
    # One rank has none of the last batch's 6 samples, so its share of that step is 0.
    for dataset in second:
        dataset.load_state_dict(state)
    ends = [[dataset.batch_share() for _ in dataset.batches()][-1] for dataset in second]
    assert sum(local for local, _ in ends) == 6
    assert {total for _, total in ends} == {6}
    for dataset in launch(folder, 3, 1, partition_algo="orig", **options):
        with pytest.raises(ConfigError, match="to divide the other"):
            dataset.load_state_dict(state)


def test_workers_read_mixed_streams_in_the_planned_order(write: Callable[..., str]) -> None:
    streams = [Stream(local=write(40, "a"), repeat=1.5), Stream(local=write(30, "b"), choose=7)]
    options: Any = {"streams": streams, "order": "mosaic", "shuffle": True, "batch_size": 8}
    plain = StreamingDataset(**options)
    assert plain.stream_counts == [60, 7]
    expected = [batch["id"].tolist() for batch in plain.batches()]
    assert [len(batch) for batch in expected] == [8] * 8 + [3]
    loader = StreamingDataLoader(StreamingDataset(**options), num_workers=2)
    assert [batch["id"].tolist() for batch in loader] == expected
    again = [batch["id"].tolist() for batch in loader]
    assert again != expected
    assert [StreamingDataset(**options).sample_ids(0, epoch=1)] == [plain.sample_ids(0, epoch=1)]


#: Batches recorded from mosaicml-streaming, by batching method, shuffle and number of ranks: those of epoch 1
#: after the first, rank by rank. One stream has 13 samples, the other 9 with `repeat=1.5`; shards have five
#: samples; 2 canonical nodes and blocks of 12.
STREAM_GOLDENS: dict[tuple[str, bool, int], list[list[int]]] = {
    ("stratified", False, 1): [[1, 7, 14, 16], [2, 8, 15, 17], [3, 9, 16, 19], [4, 10, 17, 20],
                               [5, 11, 18, 21], [5, 12, 18, 20]],
    ("stratified", False, 4): [[1, 7, 14, 16], [2, 8, 15, 17], [3, 9, 16, 19], [4, 10, 17, 20],
                               [5, 11, 18, 21], [5, 12, 18, 20]],
    ("stratified", True, 1): [[9, 1, 14, 14], [10, 3, 16, 16], [8, 2, 19, 15], [7, 11, 21, 20],
                              [12, 0, 20, 13], [12, 5, 20, 18]],
    ("stratified", True, 4): [[9, 1, 14, 14], [10, 3, 16, 16], [8, 2, 19, 15], [7, 11, 21, 20],
                              [12, 0, 20, 13], [12, 5, 20, 18]],
    ("per_stream", False, 1): [[2, 8, 3, 9], [13, 14, 14, 16], [15, 17, 16, 19], [4, 10, 5, 11],
                               [17, 20, 18, 21]],
    ("per_stream", False, 4): [[2, 3, 8, 9], [13, 14, 14, 16], [15, 16, 17, 19], [17, 18, 20, 21],
                               [4, 5, 10, 11], [5, 5, 12, 11], [18, 18, 20, 21]],
    ("per_stream", True, 1): [[16, 16, 19, 15], [6, 4, 9, 1], [10, 3, 8, 2], [21, 20, 20, 13],
                              [7, 11, 12, 0]],
    ("device_per_stream", False, 1): [[2, 8, 3, 9], [13, 14, 14, 16], [15, 17, 16, 19], [4, 10, 5, 11],
                                      [17, 20, 18, 21]],
    ("device_per_stream", False, 4): [[2, 7, 13, 16], [3, 17, 14, 19], [15, 8, 16, 9], [17, 10, 18, 20],
                                      [4, 11, 18, 21], [18, 20, 5, 12], [5, 11, 5, 21]],
    ("device_per_stream", True, 1): [[16, 16, 19, 15], [6, 4, 9, 1], [10, 3, 8, 2], [21, 20, 20, 13],
                                     [7, 11, 12, 0]],
    ("device_per_stream", True, 4): [[14, 4, 16, 1], [9, 16, 10, 15], [19, 20, 8, 3], [21, 13, 20, 2],
                                     [7, 11, 20, 0], [12, 18, 12, 13], [20, 5, 12, 0]],
    ("per_stream", True, 4): [[6, 9, 4, 1], [16, 19, 16, 15], [10, 8, 3, 2], [21, 20, 20, 13],
                              [7, 12, 11, 0], [20, 20, 18, 13], [12, 12, 5, 0]],
}  # fmt: skip


@pytest.mark.parametrize(("method", "shuffle", "ranks"), STREAM_GOLDENS)
def test_batches_of_separate_streams_are_the_recorded_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, shuffle: bool, ranks: int
) -> None:
    for name, numbers in (("a", range(13)), ("b", range(13, 22))):
        with MDSWriter(columns={"id": "int"}, out=tmp_path / name, size_limit=240, hashes=None) as writer:
            for number in numbers:
                writer.write({"id": number})
    streams = [Stream(local=tmp_path / "a"), Stream(local=tmp_path / "b", repeat=1.5)]
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(ranks, 2)))
    options: Any = {"streams": streams, "shuffle": shuffle, "order": "mosaic", "batching_method": method}
    options |= {"batch_size": 4 // ranks, "shuffle_block_size": 12, "num_canonical_nodes": 2}
    found = []
    for rank in range(ranks):
        monkeypatch.setenv("RANK", str(rank))
        dataset = StreamingDataset(**options)
        state = dataset.state_dict() | {"epoch": 1, "sample_in_epoch": 4}
        dataset.load_state_dict(state)
        found.append([batch["id"].tolist() for batch in dataset.batches()])
        assert dataset.num_batches == 1 + len(found[0])
        # A state within a batch resumes at the batch's start, as in mosaicml-streaming.
        dataset.load_state_dict(state | {"sample_in_epoch": 6})
        begun = dataset.batches()
        assert next(begun)["id"].tolist() == found[rank][0]
        assert dataset.state_dict()["sample_in_epoch"] == 6 + 4
        assert [batch["id"].tolist() for batch in begun] == found[rank][1:]
    assert [flat(parts) for parts in zip(*found, strict=True)] == STREAM_GOLDENS[method, shuffle, ranks]


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("stratified", {"batch_size": 4}, "stream 1 has a share of 0.0196 .* 0 of a batch's 4 samples"),
        ("per_stream", {"batch_size": 4}, "stream 1 has 1 samples in the epoch: expected at least the 4"),
        ("device_per_stream", {"batch_size": 4}, "stream 1 has 1 samples on node 0: expected at least the 4"),
        ("stratified", {"batch_size": 60}, "does not fill its part"),
        ("stratified", {"batch_size": 50, "shuffle_block_size": 60}, "of which stream 1 has 1 samples"),
    ],
)
def test_streams_too_small_for_their_share_of_a_batch_raise_with_their_number(
    write: Callable[..., str], method: str, options: dict[str, Any], message: str
) -> None:
    streams = [Stream(local=write(50, "a")), Stream(local=write(30, "b"), choose=1)]
    with pytest.raises(ConfigError, match=message):
        StreamingDataset(streams=streams, shuffle=True, order="mosaic", batching_method=method, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle_algo": "py1b"}, "`shuffle_algo` is 'py1b': expected one of"),
        ({"order": "native", "partition_algo": "orig"}, "beside `order='native'`"),
        ({"order": MosaicOrder(), "partition_algo": "orig"}, "beside `order=MosaicOrder("),
        ({"order": "random"}, "`order` is 'random': expected 'native', 'mosaic' or a `MosaicOrder`"),
        ({"order": "mosaic", "tail": "pad"}, "`tail` is 'pad' beside `order='mosaic'`"),
        ({"batching_method": "device_per_stream"}, "whose batches depend on the number of ranks"),
        ({"order": "mosaic", "rank": 0, "world_size": 3, "global_batch_size": 16}, "expected a multiple"),
        ({"order": "mosaic", "shuffle_block_size": 1}, "expected at least 2"),
    ],
)
def test_incompatible_arguments_raise(
    write: Callable[..., str], options: dict[str, Any], message: str
) -> None:
    size = {} if "global_batch_size" in options else {"batch_size": 4}
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        StreamingDataset(local=write(20), **size, **options)


def test_an_unknown_argument_raises_pythons_type_error(write: Callable[..., str]) -> None:
    with pytest.raises(
        TypeError, match="`StreamingDataset` has no argument `shuffle_algorithm`; did you mean `shuffle_algo`"
    ):
        StreamingDataset(local=write(20), batch_size=4, shuffle_algorithm="py1s")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("predownload", "prefetch_bytes="),
        ("drop_last", "tail='drop'"),
        ("max_cache_size", "cache_limit="),
        ("seed", "shuffle_seed="),
    ],
)
def test_an_argument_of_another_library_is_refused_with_what_takes_its_place(
    write: Callable[..., str], name: str, remedy: str
) -> None:
    with pytest.raises(TypeError, match=f"`StreamingDataset` has no argument `{name}`; give `{remedy}"):
        StreamingDataset(local=write(20), batch_size=4, **{name: 1})


def test_a_state_of_another_order_raises_with_the_field(write: Callable[..., str]) -> None:
    dataset = StreamingDataset(local=write(50), order="mosaic", batch_size=4, num_canonical_nodes=2)
    state = dataset.state_dict()
    for name in ("shuffle_seed", "num_canonical_nodes"):
        with pytest.raises(StateMismatchError, match=f"`{name}` is 7 in the state"):
            dataset.load_state_dict(state | {name: 7})
    for wrong in ({}, state | {"epoch": "0"}, state | {"sample_in_epoch": -1}, state | {"more": 1}):
        with pytest.raises(ConfigError, match="expected the keys"):
            dataset.load_state_dict(wrong)


def test_random_access_takes_slices_and_numpy_numbers(write: Callable[..., str]) -> None:
    dataset = StreamingDataset(local=write(12), order="mosaic", batch_size=4)
    assert [s["id"] for s in dataset[2:5]] == [2, 3, 4]
    assert dataset[np.int64(-1)]["id"] == 11
