"""Weights of streams that change at samples of the run."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.stream import Stream, StreamingDataLoader, StreamingDataset
from hocket.stream.errors import ConfigError, StateMismatchError
from hocket.stream.settings.mix_schedule import MixPhase
from support.ranks import run_ranks

SIZES = {"web": 60, "code": 25, "math": 10}
PHASES: list[Any] = [
    (0, {"web": 0.7, "code": 0.3, "math": 0}),
    (100, {"web": 0.5, "code": 0.25, "math": 0.25}),
    (240, {"web": 0, "code": 1, "math": 1}),
]


@pytest.fixture
def make(write: Callable[..., str]) -> Callable[..., StreamingDataset]:
    """Return `make(**options)`, which opens three streams that change their weights."""
    streams = [Stream(local=write(size, name)) for name, size in SIZES.items()]

    def make(**options: Any) -> StreamingDataset:
        arguments = {"weights": PHASES, "global_batch_size": 8, "epoch_size": 90, "shuffle": True} | options
        return StreamingDataset(streams=streams, **arguments)

    return make


def owner(number: int) -> str:
    """Return the stream of a sample by its number in storage order."""
    return "web" if number < 60 else "code" if number < 85 else "math"


def run_ids(dataset: StreamingDataset, epochs: int) -> list[list[int]]:
    """Return the batches of epochs as lists of sample numbers."""
    return [
        dataset.sample_ids(batch, epoch=epoch)
        for epoch in range(epochs)
        for batch in range(dataset.plan.num_batches(epoch))
    ]


def test_counts_follow_the_weights_at_every_batch_and_nothing_comes_twice(
    make: Callable[..., StreamingDataset],
) -> None:
    batches = run_ids(make(), 4)
    assert [len(batch) for batch in batches] == [*[8] * 11, 2] * 4
    exact: Counter[str] = Counter()
    seen: dict[str, list[int]] = {name: [] for name in SIZES}
    position = 0
    for batch in batches:
        for number in batch:
            weights = next(weights for start, weights in reversed(PHASES) if start <= position)
            total = sum(Fraction(str(weight)) for weight in weights.values())
            for name, weight in weights.items():
                exact[name] += Fraction(str(weight)) / total
            seen[owner(number)].append(number)
            position += 1
        for name in SIZES:
            assert abs(len(seen[name]) - exact[name]) < 2, (position, name)
    for name, size in SIZES.items():
        times = Counter(seen[name])
        least, most = min(times[number] for number in range(95) if owner(number) == name), max(times.values())
        assert most - least <= 1, name
        assert len(seen[name]) // size == least


@pytest.mark.parametrize(("tail", "batch", "first"), [("short", 17, 90 + 5 * 8), ("drop", 17, 88 + 6 * 8)])
def test_a_phase_may_begin_at_a_batch(
    make: Callable[..., StreamingDataset], tail: str, batch: int, first: int
) -> None:
    only: Any = {"web": 0, "code": 0, "math": 1}
    dataset = make(weights=[PHASES[0], (f"{batch}ba", only)], tail=tail)
    batches = run_ids(dataset, 3)
    assert dataset.weights is not None
    assert [phase.start for phase in dataset.weights.phases] == [0, first]
    assert sum(map(len, batches[:batch])) == first
    assert [{owner(number) for number in batch} == {"math"} for batch in batches] == [
        number >= batch for number in range(len(batches))
    ]
    same = make(weights=[PHASES[0], (first, only)], tail=tail)
    assert run_ids(same, 3) == batches
    assert sum(same.stream_counts) == 90
    set_later = make(weights=[PHASES[0]], tail=tail)
    set_later.set_weights(only, at=f"{batch}ba")
    assert run_ids(set_later, 3) == batches


def test_phases_in_batches_follow_the_batch_size_and_are_refused_where_it_changes(
    make: Callable[..., StreamingDataset],
) -> None:
    weights = [PHASES[0], ("5ba", {"web": 0, "code": 1, "math": 0})]
    with pytest.raises(ConfigError, match=r"phase from '5ba', .* no batch size is known"):
        make(weights=weights, global_batch_size=None)
    dataset = make(weights=weights, global_batch_size=None, batch_size=4)
    dataset.follow_ranks(1, 3)
    assert dataset.weights is not None
    assert [phase.start for phase in dataset.weights.phases] == [0, 60]
    state = make(weights=weights, global_batch_size=12).state_dict()
    with pytest.raises(StateMismatchError, match="`global_batch_size` is 12 in the state and 8 here"):
        make(weights=weights).load_state_dict(state)
    dataset = make(weights=weights, global_batch_size=None, batch_size=4)
    dataset.set_weights({"web": 1, "code": 1, "math": 1}, at=50)
    with pytest.raises(ConfigError, match="whose size changes with the ranks"):
        dataset.follow_ranks(1, 3)


def test_the_digest_of_an_order_is_that_of_all_ranks_and_of_its_weights(
    make: Callable[..., StreamingDataset],
) -> None:
    orders = [make(rank=rank, world_size=3).order_digest() for rank in range(3)]
    assert len(set(orders)) == 1
    assert 0 < orders[0] < 2**52
    others = [make(shuffle_seed=1), make(global_batch_size=9), make(weights=PHASES[:2])]
    assert len({orders[0], *(other.order_digest() for other in others)}) == 4


def test_the_digest_of_an_order_is_that_of_equal_orders_in_other_words(write: Callable[..., str]) -> None:
    places = [write(50, "a"), write(40, "b")]

    def mixed(names: str, first: Any, second: Any) -> int:
        streams = [Stream(local=place, name=name) for place, name in zip(places, names, strict=True)]
        weights = [(0, dict(zip(names, (first, second), strict=True)))]
        return StreamingDataset(streams=streams, weights=weights, global_batch_size=8).order_digest()

    assert mixed("ab", 0.75, 0.25) == mixed("cd", 3, 1) != mixed("ab", 1, 3)
    plain: dict[str, Any] = {"local": places[0], "global_batch_size": 8, "num_canonical_nodes": 1}
    for shuffle, num_orders in ((False, 1), (True, 2)):
        made = [StreamingDataset(**plain, shuffle=shuffle, shuffle_seed=seed) for seed in (1, 2)]
        assert len({dataset.order_digest() for dataset in made}) == num_orders


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_counts_are_whole_shares_of_any_weights(data: st.DataObject) -> None:
    from hocket.native import _native

    num = data.draw(st.integers(1, 5))
    phase = st.lists(st.integers(0, 20), min_size=num, max_size=num).filter(any)
    starts = sorted(data.draw(st.sets(st.integers(1, 300), max_size=3)))
    phases = [(start, data.draw(phase)) for start in [0, *starts]]
    before = [0] * num
    for position in range(1, 400):
        counts = _native.mix_counts(phases, position)
        steps = [count - old for count, old in zip(counts, before, strict=True)]
        weights = [weights for start, weights in phases if start < position][-1]
        assert sorted(steps) == [0] * (num - 1) + [1]
        assert weights[steps.index(1)] > 0
        before = counts


@settings(max_examples=60, deadline=None)
@given(logits=st.lists(st.floats(-60, 60), min_size=1, max_size=5))
def test_computed_weights_of_many_digits_are_counted(logits: list[float]) -> None:
    from hocket.native import _native

    largest = max(logits)
    shares = [math.exp(logit - largest) for logit in logits]
    weights = tuple(share / sum(shares) for share in shares)
    whole = MixPhase(start=0, weights=weights).whole()
    assert all(1 <= count < 2**62 for count in whole)
    for count, weight in zip(whole, weights, strict=True):
        assert abs(count / sum(whole) - weight) < 1e-14
    assert sum(_native.mix_counts([(0, whole)], 1000)) == 1000


def test_batches_are_equal_on_any_number_of_ranks_and_workers(make: Callable[..., StreamingDataset]) -> None:
    expected = run_ids(make(rank=0, world_size=1), 2)
    for world_size, workers in [(1, 2), (3, 0), (4, 1)]:
        batches: list[list[int]] = [[] for _ in expected]
        for rank in range(world_size):
            dataset = make(rank=rank, world_size=world_size)
            loader = StreamingDataLoader(dataset, num_workers=workers)
            number = 0
            for _ in range(2):
                for batch in loader:
                    batches[number] += batch["id"][: loader.batch_share()[0]].tolist()
                    number += 1
        inside = [[number if number < 60 else number - 60 if number < 85 else number - 85 for number in batch]
                  for batch in expected]  # fmt: skip
        assert batches == inside


def test_set_weights_goes_on_within_an_epoch_and_in_states(make: Callable[..., StreamingDataset]) -> None:
    def train(dataset: StreamingDataset, workers: int | None) -> tuple[list[list[int]], list[str]]:
        loader: Any = dataset if workers is None else StreamingDataLoader(dataset, num_workers=workers)
        read, states = [], []
        for epoch in range(2):
            for number, batch in enumerate(dataset.batches() if workers is None else loader):
                read.append(batch["id"].tolist())
                states.append(json.dumps(dataset.state_dict()))
                if (epoch, number) == (0, 4):
                    dataset.set_weights({"web": 0, "code": 0, "math": 1})
                if (epoch, number) == (1, 2):
                    dataset.set_weights({"web": 1, "code": 0, "math": 0}, at=130)
        return read, states

    dataset = make()
    read, states = train(dataset, None)
    assert [train(make(), workers)[0] for workers in (0, 2)] == [read, read]
    ids = run_ids(dataset, 2)
    assert [len(batch) for batch in read] == [len(batch) for batch in ids]
    flat = [owner(number) for batch in ids for number in batch]
    assert set(flat[40:130]) == {"math"}
    assert set(flat[130:]) == {"web"}
    assert all(len(state) < 1024 for state in states)
    for number, end in [(7, 12), (16, 24), (20, 24)]:
        resumed = make(rank=1, world_size=2)
        resumed.load_state_dict(json.loads(states[number]))
        rest = [batch["id"].tolist()[: resumed.batch_share()[0]] for batch in resumed.batches()]
        assert rest == [batch[len(batch) // 2 :] for batch in read[number + 1 : end]]


def test_weights_that_were_set_are_those_of_other_ranks_too(
    make: Callable[..., StreamingDataset],
) -> None:
    dataset = make()
    dataset.set_weights({"web": 0, "code": 0, "math": 1})
    dataset.follow_ranks(1, 2)
    assert {owner(number) for number in dataset.sample_ids(3)} == {"math"}


def test_a_state_keeps_its_past_and_takes_other_weights_for_the_future(
    make: Callable[..., StreamingDataset],
) -> None:
    dataset = make()
    batches = dataset.batches()
    for _ in range(5):
        next(batches)
    state = json.loads(json.dumps(dataset.state_dict()))
    other = make(weights=[PHASES[0], (64, {"web": 0, "code": 0, "math": 1})])
    other.load_state_dict(state)
    assert other.cursor.batch == 5
    assert {owner(number) for number in other.sample_ids(8)} == {"math"}
    changed = make(weights=[(0, {"web": 0.6, "code": 0.4, "math": 0})])
    with pytest.raises(StateMismatchError, match=r"before sample 40 are \[\(0, \[7, 3, 0\]\)\].*\[3, 2, 0\]"):
        changed.load_state_dict(state)
    with pytest.raises(StateMismatchError, match="no `weights`"):
        make().load_state_dict(make(weights=None, epoch_size=None).state_dict())
    with pytest.raises(StateMismatchError, match="this data set has none"):
        make(weights=None, epoch_size=None).load_state_dict(state)


def test_a_state_with_weights_that_were_set_tells_of_phases_that_it_replaces(
    make: Callable[..., StreamingDataset], caplog: pytest.LogCaptureFixture
) -> None:
    only = {"web": 0, "code": 1, "math": 0}
    dataset = make()
    next(dataset.batches())
    dataset.set_weights(only, at=64)
    state = json.loads(json.dumps(dataset.state_dict()))
    resumed = make(weights=[PHASES[0], (16, PHASES[1][1]), (72, PHASES[2][1])])
    resumed.load_state_dict(state)
    # Phases before the one that was set are those of the argument, as without it.
    assert [phase.start for phase in resumed.weights.phases] == [0, 16, 64]  # type: ignore[union-attr]
    assert {owner(number) for number in resumed.sample_ids(9)} == {"code"}
    assert "from samples [72], which are not used" in caplog.text
    with pytest.raises(StateMismatchError, match="before sample 8 are"):
        make(weights=[(0, only)]).load_state_dict(state)
    caplog.clear()
    make(weights=[PHASES[0]]).load_state_dict(state)
    assert not caplog.text


def test_a_state_from_before_weights_were_set_is_without_them(make: Callable[..., StreamingDataset]) -> None:
    dataset = make()
    state = dataset.state_dict()
    dataset.set_weights({"web": 0, "code": 0, "math": 1}, at=16)
    dataset.load_state_dict(state)
    assert run_ids(dataset, 2) == run_ids(make(), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": []}, "list of pairs"),
        ({"weights": [(1, {"web": 1, "code": 1, "math": 1})]}, "starts at sample 1: expected 0"),
        ({"weights": [(0, {"web": 1, "code": 1})]}, r"missing streams \['math'\]"),
        ({"weights": [(0, {"web": 1, "code": 1, "math": 1, "mth": 1})]}, r"unknown streams \['mth'\]"),
        ({"weights": [(0, {"web": 0, "code": 0, "math": 0})]}, "at least one above 0"),
        ({"weights": [(0, {"web": -1, "code": 0, "math": 0})]}, "`web` is -1"),
        ({"weights": [PHASES[0], PHASES[0]]}, "ascending"),
        ({"tail": "pad"}, "'short' or 'drop'"),
        ({"batching_method": "stratified"}, "'random'"),
        ({"order": "mosaic"}, "mosaic"),
    ],
)
def test_weights_that_describe_no_mix_are_refused(
    make: Callable[..., StreamingDataset], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_set_weights_is_refused_for_the_past_and_without_a_schedule(
    make: Callable[..., StreamingDataset], write: Callable[..., str]
) -> None:
    dataset = make()
    next(dataset.batches())
    with pytest.raises(ConfigError, match="`at` is 3"):
        dataset.set_weights({"web": 1, "code": 0, "math": 0}, at=3)
    with pytest.raises(ConfigError, match="expected weights by stream name"):
        dataset.set_weights([("web", 1)])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs a data set with `weights`"):
        StreamingDataset(local=write(8, "one"), batch_size=2).set_weights({"one": 1})


def test_a_stream_without_samples_is_refused_in_every_phase(write: Callable[..., str]) -> None:
    streams = [Stream(local=write(20, "some")), Stream(local=write(0, "none"))]
    first = (0, {"some": 1, "none": 0})
    with pytest.raises(ConfigError, match="`none` has a weight and no samples"):
        StreamingDataset(streams=streams, weights=[first, (900, {"some": 1, "none": 1})])
    dataset = StreamingDataset(streams=streams, global_batch_size=4, weights=[first])
    with pytest.raises(ConfigError, match="`none` has a weight and no samples"):
        dataset.set_weights({"some": 0, "none": 1}, at=900)
    assert len(dataset.sample_ids(0, epoch=60)) == 4


def _set_unequal(folder: str) -> str:
    import torch.distributed as torch_dist

    dataset = StreamingDataset(local=folder, global_batch_size=4, weights=[(0, {"data": 1})])
    try:
        dataset.set_weights({"data": 1 + torch_dist.get_rank()})
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_ranks_that_set_different_weights_are_refused_on_all(write: Callable[..., str]) -> None:
    told = run_ranks(_set_unequal, 2, write(40), init="gloo")
    assert all("on rank 0" in text and "on rank 1" in text for text in told)
