"""Token sequences packed into rows of one length."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hocket.stream import (
    MDSWriter,
    PackedDataLoader,
    PackedDataset,
    Stream,
    StreamingDataLoader,
    StreamingDataset,
)
from hocket.stream.errors import ConfigError, StateMismatchError
from hocket.stream.packing import count_tokens, sequence_offsets
from hocket.stream.packing.best_fit import cut_sequences, pack_pieces, permutation

LENGTH = 32


def sequence(number: int, *, longest: int = LENGTH) -> NDArray[np.uint16]:
    """Return the tokens of a sample: its number, as often as follows from it; each thirteenth has none."""
    return np.full(0 if number % 13 == 12 else 1 + number * 7 % longest, 1 + number, np.uint16)


@pytest.fixture
def corpus(tmp_path: Path) -> Callable[..., str]:
    """Return `corpus(count, name="data", longest=…)`, which writes samples and returns their folder."""

    def corpus(count: int, name: str = "data", *, first: int = 0, longest: int = LENGTH) -> str:
        columns = {"tokens": "ndarray:uint16", "labels": "ndarray:int32"}
        with MDSWriter(columns=columns, out=str(tmp_path / name), size_limit=1000) as writer:
            for number in range(first, first + count):
                tokens = sequence(number, longest=longest)
                writer.write({"tokens": tokens, "labels": tokens.astype(np.int32) * 10})
        return str(tmp_path / name)

    return corpus


def make(folder: str, **options: Any) -> PackedDataset:
    """Return packed rows of a folder for one process, unless the options say otherwise."""
    arguments: dict[str, Any] = {"length": LENGTH, "window": 64, "shuffle": True, "local": folder}
    if "rank" not in options:
        arguments |= {"rank": 0, "world_size": 1}
    if "batch_size" not in options:
        arguments |= {"global_batch_size": 5}
    return PackedDataset(**arguments | options)


def rows_of(dataset: PackedDataset, *, epochs: int = 1) -> list[list[list[int]]]:
    """Return the rows of each batch as lists, without those that do not count."""
    return [
        batch["input_ids"][: dataset.batch_share()[0]].tolist()
        for _ in range(epochs)
        for batch in dataset.batches()
    ]


def joined(batches: Iterable[list[list[int]]]) -> list[list[int]]:
    """Return the rows of all batches."""
    return list(itertools.chain.from_iterable(batches))


@settings(max_examples=150, deadline=None)
@given(lengths=st.lists(st.integers(0, 60), max_size=80), capacity=st.integers(1, 20))
def test_best_fit_places_each_token_once_and_no_two_rows_fit_into_one(
    lengths: list[int], capacity: int
) -> None:
    rows = pack_pieces(cut_sequences(lengths, capacity), capacity)
    placed = [(piece.sequence, at) for row in rows for piece in row for at in range(piece.start, piece.stop)]
    assert sorted(placed) == [(number, at) for number, length in enumerate(lengths) for at in range(length)]
    used = sorted(sum(piece.stop - piece.start for piece in row) for row in rows)
    assert all(0 < tokens <= capacity for tokens in used)
    # A row is only begun for a piece that fits into no other one.
    assert all(one + other > capacity for one, other in itertools.pairwise(used))
    assert all(row == sorted(row) for row in rows)


def test_the_permutation_of_rows_is_fixed_for_all_versions() -> None:
    assert permutation(8, 9176, 0, 3).tolist() == [7, 5, 4, 3, 2, 6, 0, 1]
    assert permutation(8, 9176, 1, 3).tolist() != permutation(8, 9176, 0, 3).tolist()
    assert sorted(permutation(1000, 1).tolist()) == list(range(1000))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_batch_holds_whole_sequences_with_positions_ids_and_labels(
    corpus: Callable[..., str], shuffle: bool
) -> None:
    dataset = make(corpus(150), label_column="labels", shuffle=shuffle, pad_token_id=9999)
    seen: list[int] = []
    total = 0
    for batch in dataset.batches():
        for ids, labels, positions, numbers in zip(
            *(batch[name] for name in ("input_ids", "labels", "position_ids", "sequence_ids")), strict=True
        ):
            filled = numbers > 0
            assert not filled[int(filled.sum()) :].any(), "padding is at the end of a row"
            assert set(ids[~filled].tolist()) <= {9999}
            assert set(positions[~filled].tolist()) <= {0}
            assert set(labels[~filled].tolist()) <= {-100}
            for number in range(1, numbers.max() + 1):
                where = numbers == number
                (token,) = set(ids[where].tolist())
                assert len(sequence(token - 1)) == where.sum()
                assert positions[where].tolist() == list(range(where.sum()))
                assert labels[where].tolist() == [-100, *[token * 10] * (int(where.sum()) - 1)]
                seen.append(token - 1)
        counted = count_tokens(batch)
        assert dataset.token_share() == (counted["total"], counted["total"])
        total += counted["total"]
    expected = [number for number in range(150) if len(sequence(number))]
    assert sorted(seen) == expected
    assert (seen == expected) is False  # best fit joins distant samples in storage order, too
    assert dataset.num_tokens == total == sum(len(sequence(number)) for number in range(150))


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_rows_are_equal_on_any_ranks_and_resume_on_others_and_with_other_batches(data: st.DataObject) -> None:
    folder = data.draw(st.sampled_from(_FOLDERS))
    epochs, size = 2, data.draw(st.integers(4, 9))
    options: dict[str, Any] = {
        "window": data.draw(st.sampled_from([7, 32, 500])),
        "shuffle": data.draw(st.booleans()),
        "tail": data.draw(st.sampled_from(["short", "drop"])),
    }
    expected = rows_of(make(folder, global_batch_size=size, **options), epochs=epochs)
    num_ranks = data.draw(st.integers(1, 4))
    parts = [
        rows_of(
            make(folder, rank=rank, world_size=num_ranks, global_batch_size=size, **options), epochs=epochs
        )
        for rank in range(num_ranks)
    ]
    assert [joined(rows) for rows in zip(*parts, strict=True)] == expected

    stop = data.draw(st.integers(0, len(expected) - 1))
    started = make(folder, rank=num_ranks - 1, world_size=num_ranks, global_batch_size=size, **options)
    left = stop
    while left:
        for _ in started.batches():
            left -= 1
            if not left:
                break
    state = json.loads(json.dumps(started.state_dict()))
    assert len(json.dumps(state)) < 1024
    resumed = make(folder, global_batch_size=size, **options)
    resumed.load_state_dict(state)
    assert resumed.num_tokens == sum(bool(t) for batch in expected[:stop] for row in batch for t in row)
    found: list[list[list[int]]] = []
    while len(found) < len(expected) - stop:
        found += rows_of(resumed)
    assert found == expected[stop:]

    # Another batch size goes on at the same row of the epoch.
    if options["tail"] == "short":
        other = make(folder, global_batch_size=3, **options)
        other.load_state_dict(state)
        # Epochs in another order may fill another number of rows.
        first = len(rows_of(make(folder, global_batch_size=size, **options)))
        of_epoch = joined(expected[:first] if started.epoch == 0 else expected[first:])
        assert joined(rows_of(other)) == of_epoch[started.batch * size :]


_FOLDERS: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Write the data sets of the property test, once."""
    for count in (40, 203):
        folder = str(tmp_path_factory.mktemp("packed") / str(count))
        with MDSWriter(columns={"tokens": "ndarray:uint16"}, out=folder, size_limit=800) as writer:
            for number in range(count):
                writer.write({"tokens": sequence(number)})
        _FOLDERS.append(folder)


def test_epochs_differ_and_a_broken_one_is_followed_by_the_next(corpus: Callable[..., str]) -> None:
    folder = corpus(120)
    dataset = make(folder)
    first, second = rows_of(dataset), rows_of(dataset)
    assert first != second
    assert sorted(joined(first)) != sorted(joined(second)), "windows of an epoch have samples of their own"
    other = make(folder)
    next(other.batches())
    assert rows_of(other) == second
    other.set_epoch(0)
    assert rows_of(other) == first


def test_a_long_sample_is_refused_by_its_place_or_split(corpus: Callable[..., str]) -> None:
    folder = corpus(60, longest=90)
    longest = max(range(60), key=lambda number: len(sequence(number, longest=90)))
    with pytest.raises(
        ConfigError, match=rf"sample {longest} \(row \d+ of `shard.* has 81 tokens, and a row 32"
    ):
        rows_of(make(folder))
    dataset = make(folder, long="split")
    found: dict[int, int] = {}
    for batch in dataset.batches():
        starts = batch["position_ids"][batch["sequence_ids"] > 0] == 0
        assert (batch["labels"][batch["sequence_ids"] > 0][starts] == -100).all()
        for token in batch["input_ids"][batch["sequence_ids"] > 0].tolist():
            found[token - 1] = found.get(token - 1, 0) + 1
    lengths = {number: len(sequence(number, longest=90)) for number in range(60)}
    assert found == {number: length for number, length in lengths.items() if length}
    assert dataset.num_tokens == sum(lengths.values())


def test_a_larger_window_needs_less_padding(corpus: Callable[..., str]) -> None:
    folder = corpus(400)
    num_rows = [
        sum(len(batch) for batch in rows_of(make(folder, window=window, global_batch_size=4)))
        for window in (1, 8, 400)
    ]
    tokens = sum(len(sequence(number)) for number in range(400))
    assert num_rows[0] > num_rows[1] > num_rows[2]
    assert num_rows[2] < 1.02 * tokens / LENGTH + 1


def test_a_mix_changes_at_the_next_window_and_a_state_has_it(corpus: Callable[..., str]) -> None:
    streams = [Stream(local=corpus(90, "low")), Stream(local=corpus(90, "high", first=1000))]
    options: dict[str, Any] = {"local": None, "streams": streams, "window": 16, "epoch_size": 96}
    dataset = make("", weights=[(0, {"low": 1, "high": 0})], **options)
    batches = dataset.batches()
    next(batches)
    with pytest.raises(ConfigError, match="`at` is 3: expected an integer from 16"):
        dataset.set_weights({"low": 0, "high": 1}, at=3)
    dataset.set_weights({"low": 0, "high": 1})
    state = dataset.state_dict()
    rest = [batch["input_ids"].tolist() for batch in batches]
    tokens = [token for rows in rest for row in rows for token in row if token]
    assert min(tokens) <= 90, "the rest of the window that was begun"
    assert max(tokens) > 1000
    assert sum(token > 1000 for token in tokens) > len(tokens) / 2
    resumed = make("", weights=[(0, {"low": 1, "high": 0})], rank=0, world_size=1, **options)
    resumed.load_state_dict(state)
    assert rows_of(resumed) == rest
    with pytest.raises(ConfigError, match="`at` has '2ba', which counts batches"):
        resumed.set_weights({"low": 0, "high": 1}, at="2ba")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`weights` has '2ba', which counts batches"):
        make("", weights=[(0, {"low": 1, "high": 0}), ("2ba", {"low": 0, "high": 1})], **options)


def test_the_loader_yields_tensors_and_follows_ranks(corpus: Callable[..., str]) -> None:
    folder = corpus(150)
    loader = PackedDataLoader(make(folder))
    batches = list(loader)
    assert all(isinstance(part, torch.Tensor) for batch in batches for part in batch.values())
    expected = rows_of(make(folder))
    assert [batch["input_ids"].tolist() for batch in batches] == expected
    assert loader.metrics()["stream/tokens"] == loader.dataset.num_tokens
    loader.end_epoch()
    assert loader.dataset.epoch == 2
    # A trainer of ranks that share samples.
    loader = PackedDataLoader(PackedDataset(local=folder, length=LENGTH, batch_size=2))
    loader.follow_ranks(1, 2)
    assert (loader.data_parallel, loader.dataset.global_batch_size) == ((1, 2), 4)


def test_attention_of_sequence_offsets_equals_that_of_each_sequence(corpus: Callable[..., str]) -> None:
    from torch.nn.functional import scaled_dot_product_attention as attend

    batch = next(make(corpus(60)).batches())
    offsets, longest = sequence_offsets(torch.from_numpy(batch["sequence_ids"]))
    assert offsets.dtype == np.int32
    assert longest <= LENGTH
    assert (offsets[0], offsets[-1]) == (0, batch["sequence_ids"].size)
    flat = torch.randn(batch["sequence_ids"].size, 4)
    ids = torch.from_numpy(batch["sequence_ids"])
    mask = (ids.unsqueeze(2) == ids.unsqueeze(1)).tril()
    rows = flat.view(*ids.shape, 4)
    expected = attend(rows, rows, rows, attn_mask=mask).reshape(-1, 4)
    found = torch.cat(
        [
            attend(part, part, part, is_causal=True)[0]
            for begin, end in itertools.pairwise(offsets.tolist())
            for part in [flat[None, begin:end]]
        ]
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "`length` is 0"),
        ({"window": 0}, "`window` is 0"),
        ({"long": "cut"}, "`long` is 'cut': expected one of"),
        ({"tail": "pad"}, "'short' or 'drop'"),
        ({"column": "token"}, "did you mean `tokens`"),
        ({"label_column": "label"}, "did you mean `labels`"),
        ({"order": "mosaic"}, "native order"),
        ({"batching_method": "per_stream"}, "batching_method='random'"),
        ({"global_batch_size": 2, "rank": 0, "world_size": 3}, "2 samples for 3"),
    ],
)
def test_arguments_that_give_no_rows_are_refused(
    corpus: Callable[..., str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(corpus(20), **options)


def test_misspelt_arguments_of_the_samples_are_refused_by_the_nearest(corpus: Callable[..., str]) -> None:
    with pytest.raises(TypeError, match="did you mean `shuffle_seed`"):
        make(corpus(20), shuffel_seed=1)


def test_samples_and_states_that_do_not_fit_are_refused(corpus: Callable[..., str], tmp_path: Path) -> None:
    folder = corpus(40)
    state = make(folder).state_dict()
    for name, value in {"length": 64, "window": 32, "long": "split"}.items():
        with pytest.raises(StateMismatchError, match=rf"`{name}` is .* in the state and .*{value}.* here"):
            make(folder, **{name: value}).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="fingerprint"):
        make(corpus(41, "other")).load_state_dict(state)
    with pytest.raises(ConfigError, match="of a `PackedDataset`"):
        make(folder).load_state_dict(StreamingDataset(local=folder, batch_size=2).state_dict())
    with pytest.raises(ConfigError, match="no batch of 500 rows with `tail='drop'`"):
        rows_of(make(folder, global_batch_size=500, tail="drop"))
    with pytest.raises(ConfigError, match="`PackedDataLoader`"):
        StreamingDataLoader(make(folder))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`StreamingDataLoader`"):
        PackedDataLoader(StreamingDataset(local=folder, batch_size=2))  # type: ignore[arg-type]
    out = str(tmp_path / "wrong")
    with MDSWriter(columns={"tokens": "ndarray:float32", "text": "str"}, out=out) as writer:
        writer.write({"tokens": np.zeros(3, np.float32), "text": "x"})
    with pytest.raises(ConfigError, match=r"column `tokens` of sample 0 .* has 1 dims of float32"):
        rows_of(make(out))
    with pytest.raises(ConfigError, match=r"column `text` of sample 0 .* whole numbers"):
        rows_of(make(out, column="text"))
    out = str(tmp_path / "large")
    with MDSWriter(columns={"tokens": "ndarray:uint64"}, out=out) as writer:
        writer.write({"tokens": np.array([1, 2**63 - 1], np.uint64)})
        writer.write({"tokens": np.array([1, 2**63], np.uint64)})
    with pytest.raises(
        ConfigError, match=r"column `tokens` of sample 1 .* has the number 9223372036854775808"
    ):
        rows_of(make(out))
    with pytest.raises(ConfigError, match="two of integers"):
        sequence_offsets(np.zeros(3, np.int64))
