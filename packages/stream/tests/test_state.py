"""A saved state continues exactly where it was taken, on any number of ranks."""

from __future__ import annotations

import itertools
import json
import pickle
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hocket.stream import MDSWriter, StreamingDataLoader, StreamingDataset
from hocket.stream.errors import ConfigError, StateMismatchError
from support.ranks import run_ranks
from support.sampling import cases

BATCH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("data") / "d"
    with MDSWriter(columns={"id": "int"}, out=out, size_limit=400) as writer:
        for number in range(67):
            writer.write({"id": number})
    return str(out)


def open_rank(folder: str, rank: int, world_size: int, **options: Any) -> StreamingDataset:
    options = {"shuffle": True, "shuffle_block_size": 10, "global_batch_size": BATCH} | options
    return StreamingDataset(local=folder, rank=rank, world_size=world_size, **options)


def run_job(
    folder: str, world_size: int, state: dict[str, Any] | None, steps: int
) -> tuple[list[list[int]], dict[str, Any]]:
    """Run steps of all ranks from a state; return the global batches and the state after them."""
    batches: list[list[int]] = [[] for _ in range(steps)]
    states = []
    for rank in range(world_size):
        dataset = open_rank(folder, rank, world_size)
        if state is not None:
            dataset.load_state_dict(json.loads(json.dumps(state)))
        step = 0
        while step < steps:
            for batch in dataset.batches():
                batches[step] += batch["id"][: dataset.batch_share()[0]].tolist()
                step += 1
                if step == steps:
                    break
        states.append(dataset.state_dict())
    assert all(other == states[0] for other in states)
    return batches, states[0]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(1, 8)),
    worlds=st.tuples(*[st.sampled_from([1, 2, 3, 4, 8])] * 3),
)
def test_two_successive_saves_do_not_change_the_batches(
    folder: str, steps: tuple[int, int, int], worlds: tuple[int, int, int]
) -> None:
    uninterrupted, last = run_job(folder, 1, None, sum(steps))
    state = None
    pieces: list[list[int]] = []
    for count, world_size in zip(steps, worlds, strict=True):
        batches, state = run_job(folder, world_size, state, count)
        pieces += batches
    assert pieces == uninterrupted
    assert state == last


def run_turns(
    folder: str, world_size: int, workers: int, place: tuple[int, int], steps: int
) -> tuple[list[list[int]], tuple[int, int]]:
    """Run steps from (epoch, batch), with each rank's batches divided over workers, as in a loader."""
    batches: list[list[int]] = []
    epoch, first = place
    while len(batches) < steps:
        numbered: dict[int, list[int]] = {}
        for rank in range(world_size):
            dataset = open_rank(folder, rank, world_size)
            for worker in range(workers):
                turns = dataset.read_batches(epoch=epoch, start=first, first=first + worker, stride=workers)
                for batch in turns:
                    numbered.setdefault(batch.number, []).extend(batch.columns["id"][: batch.local].tolist())
        last = first + min(steps - len(batches), len(numbered))
        assert sorted(numbered) == list(range(first, dataset.num_batches))
        batches += [numbered[number] for number in range(first, last)]
        epoch, first = (epoch, last) if last < dataset.num_batches else (epoch + 1, 0)
    return batches, (epoch, first)


@pytest.mark.slow
@settings(max_examples=cases(full=60, sample=6), deadline=None)
@given(
    steps=st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(1, 8)),
    topologies=st.tuples(*[st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))] * 3),
)
def test_a_resume_may_change_ranks_and_workers_together(
    folder: str, steps: tuple[int, int, int], topologies: tuple[tuple[int, int], ...]
) -> None:
    uninterrupted, _ = run_job(folder, 1, None, sum(steps))
    place = (0, 0)
    pieces: list[list[int]] = []
    for count, (world_size, workers) in zip(steps, topologies, strict=True):
        batches, place = run_turns(folder, world_size, workers, place, count)
        pieces += batches
    assert pieces == uninterrupted


def train(folder: str, state: dict[str, Any] | None, steps: int, workers: int) -> tuple[list[list[int]], Any]:
    """Run steps through the loader on a rank; return the samples of each step, and the state."""
    dataset = StreamingDataset(local=folder, global_batch_size=BATCH, shuffle=True, shuffle_block_size=10)
    loader = StreamingDataLoader(dataset, num_workers=workers, timeout_s=30 if workers else 0)
    if state is not None:
        loader.load_state_dict(state)
    read: list[list[int]] = []
    while len(read) < steps:
        for batch in loader:
            read.append(batch["id"][: loader.batch_share()[0]].tolist())
            if len(read) == steps:
                break
    return read, loader.state_dict()


def join(parts: list[tuple[list[list[int]], Any]]) -> list[list[int]]:
    return [list(chain.from_iterable(read[step] for read, _ in parts)) for step in range(len(parts[0][0]))]


def test_rank_processes_resume_on_another_number_of_ranks(folder: str) -> None:
    uninterrupted, last = train(folder, None, 11, 0)
    first = run_ranks(train, 2, folder, None, 7, 1)
    second = run_ranks(train, 1, folder, first[1][1], 4, 0)
    assert join(first) + join(second) == uninterrupted
    assert second[0][1] == last


def read_by_workers(
    folder: str, world_size: int, workers: int, state: dict[str, Any] | None, steps: int, **options: Any
) -> tuple[list[list[int]], dict[str, Any]]:
    """Run steps from a state with loaders of each rank and their workers; return batches and the state."""
    parts = []
    for rank in range(world_size):
        loader = StreamingDataLoader(
            open_rank(folder, rank, world_size),
            num_workers=workers,
            timeout_s=120 if workers else 0,
            **options,
        )
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        read: list[list[int]] = []
        while len(read) < steps:
            for batch in itertools.islice(loader, steps - len(read)):
                read.append(batch["id"][: loader.batch_share()[0]].tolist())
        parts.append((read, loader.state_dict()))
    assert all(after == parts[0][1] for _, after in parts)
    return join(parts), parts[0][1]


def read_rest(folder: str, world_size: int, workers: int, state: dict[str, Any]) -> list[list[int]]:
    """Read the rest of an epoch through torch's own loader."""
    parts = []
    for rank in range(world_size):
        dataset = open_rank(folder, rank, world_size)
        dataset.load_state_dict(state)
        loader = DataLoader(
            dataset,
            batch_size=BATCH // world_size,
            num_workers=workers,
            collate_fn=lambda samples: [sample["id"] for sample in samples],
            timeout=120 if workers else 0,
        )
        parts.append(list(loader))
    return [list(chain.from_iterable(step)) for step in itertools.zip_longest(*parts, fillvalue=[])]


TOPOLOGIES = list(itertools.product([2, 4], [1, 2, 4]))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:This DataLoader will create 4 worker processes"
)  # on a machine with fewer CPUs
@pytest.mark.parametrize("after", TOPOLOGIES, ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("before", TOPOLOGIES, ids="{0[0]}x{0[1]}".format)
def test_real_workers_resume_on_any_other_number(
    folder: str, before: tuple[int, int], after: tuple[int, int]
) -> None:
    uninterrupted, _ = run_job(folder, 1, None, 12)
    first, state = read_by_workers(folder, *before, None, 4)
    second, state = read_by_workers(folder, *after, state, 4)
    assert (state["epoch"], state["batch"]) == (1, 2)
    assert first + second + read_rest(folder, *before, state) == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_workers_of_any_start_method_resume_on_another_number(folder: str, context: str) -> None:
    uninterrupted, _ = run_job(folder, 1, None, 6)
    assert sorted(chain(*uninterrupted)) == list(range(67))
    # Ranks and workers per rank. Every worker imports torch, so a plain run starts with one.
    number = cases(full=2, sample=1)
    first, state = read_by_workers(folder, number, number, None, 3, multiprocessing_context=context)
    second, _ = read_by_workers(folder, 1, 2, state, 3, multiprocessing_context=context)
    assert first + second == uninterrupted


def test_the_state_is_of_the_last_yielded_batch_whatever_is_prefetched(folder: str) -> None:
    for workers in (0, 2):
        loader = StreamingDataLoader(open_rank(folder, 0, 1), num_workers=workers)
        for number, _ in enumerate(loader):
            assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (0, number + 1)
        assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (1, 0)


def test_a_state_at_the_end_of_an_epoch_yields_nothing_and_then_the_next_epoch(folder: str) -> None:
    loader = StreamingDataLoader(open_rank(folder, 0, 1))
    for _ in loader:
        at_end = loader.state_dict()
    assert at_end["batch"] == len(loader)
    resumed = StreamingDataLoader(open_rank(folder, 0, 1))
    resumed.load_state_dict(at_end)
    assert list(resumed) == []
    assert resumed.state_dict() == loader.state_dict()


def test_stopping_at_the_last_batch_starts_the_next_epoch(folder: str) -> None:
    whole = open_rank(folder, 0, 1)
    expected = [[whole.sample_ids(k, epoch=epoch) for k in range(whole.num_batches)] for epoch in range(3)]
    loader = StreamingDataLoader(open_rank(folder, 0, 1))
    dataset, samples = open_rank(folder, 0, 1), open_rank(folder, 0, 1)
    for epoch in range(3):
        given = itertools.islice(loader, len(loader))
        assert [batch["id"].tolist() for batch in given] == expected[epoch]
        batches = dataset.batches()
        assert [next(batches)["id"].tolist() for _ in expected[epoch]] == expected[epoch]
        iterator = iter(samples)
        assert [next(iterator)["id"] for _ in range(len(samples))] == [*chain(*expected[epoch])]
    assert (dataset.state_dict()["epoch"], dataset.state_dict()["batch"]) == (2, whole.num_batches)


def test_the_state_is_small_and_json(folder: str) -> None:
    dataset = open_rank(folder, 0, 1)
    next(iter(dataset.batches()))
    text = json.dumps(dataset.state_dict())
    assert len(text) < 1024
    assert json.loads(text) == dataset.state_dict()
    assert {
        name for name in dataset.state_dict() if "rank" in name or "world" in name or "worker" in name
    } == set()


def test_the_state_of_a_large_data_set_is_no_larger(write: Callable[..., str], tmp_path: Path) -> None:
    shard = {
        "column_encodings": ["int"], "column_names": ["id"], "column_sizes": [8], "compression": None,
        "format": "mds", "hashes": [], "samples": 1_000_000_000 // 8000, "size_limit": 1, "version": 2,
        "zip_data": None,
    }  # fmt: skip
    shards = [
        shard | {"raw_data": {"basename": f"shard.{number:05d}.mds", "bytes": 2_000_000, "hashes": {}}}
        for number in range(8000)
    ]
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    small, large = (open_rank(of, 0, 1) for of in (write(1000), str(tmp_path / "large")))
    assert (small.size, large.size) == (1000, 1_000_000_000)
    texts = []
    for dataset in (small, large):
        state = dataset.state_dict()
        dataset.load_state_dict(state | {"epoch": 3, "batch": dataset.num_batches - 1})
        texts.append(json.dumps(dataset.state_dict()))
        assert len(texts[-1]) < 1024
    # Equal except for numbers and the hexadecimal digits of the fingerprint.
    fingerprint = r'"fingerprint": "[0-9a-f]{32}"'
    without = [re.sub(r"\d+", "0", re.sub(fingerprint, "", text)) for text in texts]
    assert without[0] == without[1]


def other_data(tmp_path: Path) -> str:
    out = tmp_path / "other"
    with MDSWriter(columns={"id": "int"}, out=out, size_limit=500) as writer:
        for number in range(67):
            writer.write({"id": number})
    return str(out)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"global_batch_size": 24, "shuffle_seed": 1}, "shuffle_seed"),
        ({"num_canonical_nodes": 6}, "num_canonical_nodes"),
        ({"shuffle_seed": 1}, "shuffle_seed"),
        ({"shuffle_block_size": 11}, "shuffle_block_size"),
        ({"shuffle": False, "num_canonical_nodes": 4}, "shuffle"),
        ({"tail": "pad"}, "tail"),
    ],
)
def test_a_state_of_another_order_raises_with_the_field(
    folder: str, changed: dict[str, Any], field: str
) -> None:
    state = open_rank(folder, 0, 1).state_dict()
    other = open_rank(folder, 0, 1, **changed)
    ours = other.state_dict()[field]
    with pytest.raises(
        StateMismatchError, match=rf"`{field}` is {state[field]!r} .*{ours!r} here.*give `{field}="
    ):
        other.load_state_dict(state)


def epoch_of(datasets: list[StreamingDataset], limit: int | None = None) -> list[list[int]]:
    """Return the next global batches of an epoch, joined from the data sets of all ranks."""
    joined: list[list[int]] = []
    for parts in itertools.islice(zip(*(data.batches() for data in datasets), strict=True), limit):
        rows = [
            part["id"][: data.batch_share()[0]].tolist() for data, part in zip(datasets, parts, strict=True)
        ]
        assert {data.batch_share()[1] for data in datasets} == {sum(map(len, rows))}
        joined.append(list(chain(*rows)))
    return joined


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("sizes", [(4, 8, 2), (12, 4, 1), (12, 9, 3), (5, 7, 3), (12, 24, 3)])
def test_a_state_continues_with_another_batch_size_after_the_same_samples(
    folder: str, shuffle: bool, sizes: tuple[int, int, int]
) -> None:
    before, after, steps = sizes

    def open_all(size: int, num_ranks: int) -> list[StreamingDataset]:
        options = {"global_batch_size": size, "shuffle": shuffle}
        return [open_rank(folder, rank, num_ranks, **options) for rank in range(num_ranks)]

    (whole,) = open_all(before, 1)
    order = list(chain(*epoch_of([whole])))
    for num_ranks in (1, 3) if shuffle else (3,):
        first = open_all(before, num_ranks)
        done = epoch_of(first, steps)
        state = json.loads(json.dumps(first[0].state_dict()))
        rest = open_all(after, num_ranks)
        for data in rest:
            data.load_state_dict(state)
            assert data.num_batches == steps + -(-(67 - before * steps) // after)
        # Loading it again after one batch, and with the first size again, loses and repeats nothing.
        more = epoch_of(rest, 1)
        (back,) = open_all(before, 1)
        back.load_state_dict(rest[0].state_dict())
        assert sorted(chain(*done, *more, *epoch_of([back]))) == list(range(67))
        again = open_all(after, num_ranks)
        for data in again:
            data.load_state_dict(rest[0].state_dict())
        last = epoch_of(again)
        assert [len(batch) for batch in more + last][:-1] == [after] * (len(more + last) - 1)
        assert sorted(chain(*done, *more, *last)) == sorted(order) == list(range(67))
        assert again[0].state_dict() == open_rank(
            folder, 0, 1, global_batch_size=after, shuffle=shuffle
        ).state_dict() | {"epoch": 1}
        # The next epoch is that of a run that had the new size from the start.
        (new,) = open_all(after, 1)
        new.set_epoch(1)
        assert epoch_of(again) == epoch_of([new])


@pytest.mark.parametrize(("tail", "num"), [("drop", 60), ("pad", 68)])
def test_the_tail_of_an_epoch_with_two_batch_sizes(folder: str, tail: str, num: int) -> None:
    first = open_rank(folder, 0, 1, global_batch_size=12, tail=tail)
    done = epoch_of([first], 3)
    rest = open_rank(folder, 0, 1, global_batch_size=8, tail=tail)
    rest.load_state_dict(first.state_dict())
    batches = epoch_of([rest])
    assert {len(batch) for batch in batches} == {8}
    seen = list(chain(*done, *batches))
    assert len(seen) == num
    assert len(set(seen)) == min(num, 67)
    assert seen[67:] == done[0][: max(0, num - 67)]


def test_the_end_of_an_epoch_is_its_end_with_another_batch_size(folder: str) -> None:
    first = open_rank(folder, 0, 1)
    iterator = first.batches()
    for _ in range(first.num_batches):
        next(iterator)
    rest = open_rank(folder, 0, 1, global_batch_size=20)
    rest.load_state_dict(first.state_dict())
    assert list(StreamingDataLoader(rest)) == []
    assert sorted(chain(*epoch_of([rest]))) == list(range(67))


def test_batches_of_several_streams_keep_their_size(folder: str) -> None:
    first = open_rank(folder, 0, 1, batching_method="per_stream")
    epoch_of([first], 2)
    with pytest.raises(StateMismatchError, match=r"`global_batch_size` is 12 .* 24 here"):
        open_rank(folder, 0, 1, batching_method="per_stream", global_batch_size=24).load_state_dict(
            first.state_dict()
        )


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_continue_with_another_batch_size(folder: str, workers: int) -> None:
    first = StreamingDataLoader(open_rank(folder, 0, 1), num_workers=workers)
    done = [batch["id"].tolist() for batch in itertools.islice(first, 2)]
    rest = StreamingDataLoader(open_rank(folder, 0, 1, global_batch_size=7), num_workers=workers)
    rest.load_state_dict(first.state_dict())
    batches = [batch["id"].tolist() for batch in rest]
    assert len(rest) == 10
    assert sorted(chain(*done, *batches)) == list(range(67))
    assert list(map(len, batches)) == [7] * 6 + [1]


def test_a_state_of_other_data_raises_with_the_fingerprint(folder: str, tmp_path: Path) -> None:
    with pytest.raises(StateMismatchError, match=r"`fingerprint` is .* point `remote` or `local`"):
        open_rank(other_data(tmp_path), 0, 1).load_state_dict(open_rank(folder, 0, 1).state_dict())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: state.pop("tail"),
        lambda state: state.update(version=1),
        lambda state: state.update(extra=1),
        lambda state: state.update(batch=7),
        lambda state: state.update(batch=-1),
        lambda state: state.update(epoch=1.0),
    ],
)
def test_invalid_states_raise(folder: str, spoil: Callable[[dict[str, Any]], Any]) -> None:
    dataset = open_rank(folder, 0, 1)
    state = dataset.state_dict()
    spoil(state)
    with pytest.raises(ConfigError, match="the state is"):
        dataset.load_state_dict(state)


def test_loading_a_state_ends_an_older_iteration_with_an_error(folder: str) -> None:
    dataset = open_rank(folder, 0, 1)
    old = dataset.batches()
    next(old)
    dataset.load_state_dict(dataset.state_dict())
    with pytest.raises(ConfigError, match="this iteration has ended"):
        next(old)


def test_unpickling_raises_if_the_data_was_rewritten(folder: str, tmp_path: Path) -> None:
    dataset = open_rank(other_data(tmp_path), 0, 1)
    assert pickle.loads(pickle.dumps(dataset)).state_dict() == dataset.state_dict()
    packed = pickle.dumps(dataset)
    with MDSWriter(columns={"id": "int"}, out=tmp_path / "other", exist_ok=True) as writer:
        writer.write({"id": 1})
    with pytest.raises(Exception, match="was rewritten; restart"):
        pickle.loads(packed)
