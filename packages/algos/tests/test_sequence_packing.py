"""Sequence packing: full rows of whole sequences, which do not attend to each other."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.algos import (
    AlgorithmConfigError,
    IncompatibleError,
    PackingCollator,
    SequencePacking,
    pack_sequences,
)
from hocket.trainer.errors import TrainerConfigError
from support.methods import make_model, train


def _sequences(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(2, 32, (length,), generator=generator)} for length in lengths]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_every_sequence_is_packed_once_and_whole(lengths: list[int]) -> None:
    sequences = _sequences(lengths)
    packed = pack_sequences(sequences, 20)
    found = []
    for row in range(len(packed["input_ids"])):
        numbers = packed["sequence_ids"][row]
        for number in range(1, int(numbers.max()) + 1):
            place = numbers == number
            found.append(tuple(packed["input_ids"][row, place].tolist()))
            assert packed["position_ids"][row, place].tolist() == list(range(int(place.sum())))
            labels = packed["labels"][row, place]
            assert labels[0] == -100
            assert torch.equal(labels[1:], packed["input_ids"][row, place][1:])
    assert sorted(found) == sorted(tuple(one["input_ids"].tolist()) for one in sequences)
    assert (packed["labels"][packed["sequence_ids"] == 0] == -100).all()
    # With best fit, no two rows would fit into one.
    used = (packed["sequence_ids"] > 0).sum(1).sort().values
    assert len(used) == 1 or int(used[0] + used[1]) > 20


def test_too_long_sequences_are_truncated() -> None:
    packed = pack_sequences([{"input_ids": [1, 2, 3, 4], "labels": [5, 6, 7, 8]}], 3, pad_token_id=9)
    assert packed["input_ids"].tolist() == [[1, 2, 3]]
    assert packed["labels"].tolist() == [[-100, 6, 7]]


def test_masks_limit_attention_to_a_positions_own_sequence() -> None:
    sequences = _sequences([2, 3])
    causal = pack_sequences(sequences, 6)["attention_mask"]
    full = pack_sequences(sequences, 6, attention="full")["attention_mask"]
    numbers = pack_sequences(sequences, 6)["sequence_ids"][0]
    for row in range(6):
        for column in range(6):
            assert bool(full[0, 0, row, column]) == bool(numbers[row] == numbers[column])
            assert bool(causal[0, 0, row, column]) == bool(numbers[row] == numbers[column] and column <= row)
    plain = pack_sequences(sequences, 6, attention="none")["attention_mask"]
    assert plain.tolist() == [[1, 1, 1, 1, 1, 0]]


def test_a_models_logits_equal_those_of_the_single_sequences() -> None:
    model = make_model("text").eval()
    sequences = _sequences([7, 4, 9, 2])
    packed = pack_sequences(sequences, 16)
    logits = model(packed)
    alone = {
        tuple(one["input_ids"].tolist()): model({"input_ids": one["input_ids"][None]})[0] for one in sequences
    }
    for row in range(len(packed["input_ids"])):
        for number in range(1, int(packed["sequence_ids"][row].max()) + 1):
            place = packed["sequence_ids"][row] == number
            ids = tuple(packed["input_ids"][row, place].tolist())
            torch.testing.assert_close(logits[row, place], alone[ids], atol=1e-5, rtol=1e-4)


def test_a_hugging_face_model_works_with_the_masks_and_positions() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.GPT2Config(vocab_size=32, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    sequences = _sequences([7, 4])
    packed = pack_sequences(sequences, 12)
    inputs = {name: packed[name] for name in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        logits = model(**inputs).logits
        for sequence, start in zip(sequences, (0, 7), strict=True):
            alone = model(input_ids=sequence["input_ids"][None]).logits[0]
            torch.testing.assert_close(logits[0, start : start + len(alone)], alone, atol=1e-4, rtol=1e-3)


def test_a_loaders_batches_are_packed_into_fewer_rows() -> None:
    shapes: list[tuple[int, int]] = []
    model = make_model("text")
    model.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0]["input_ids"].shape)))
    train(["SequencePacking"], kind="text", model=model, algorithms=[SequencePacking(32)])
    assert {width for _, width in shapes} == {32}
    assert all(3 <= rows <= 5 for rows, _ in shapes)


def test_misuse_is_named() -> None:
    with pytest.raises(AlgorithmConfigError, match="`max_seq_length` is 0"):
        SequencePacking(0)
    with pytest.raises(AlgorithmConfigError, match="`max_seq_length` is -1"):
        PackingCollator(-1)
    with pytest.raises(AlgorithmConfigError, match="`attention` is 'flash'; expected one of `causal`"):
        SequencePacking(8, "flash")  # type: ignore[arg-type]
    for sequence in ({"labels": [1]}, {"input_ids": []}):
        with pytest.raises(IncompatibleError, match="a sequence to pack has no `input_ids`"):
            pack_sequences([sequence], 8)
    batch = (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(IncompatibleError, match="`collate_fn`, which a `list` does not have"):
        train([], kind="images", algorithms=[SequencePacking(8)], train_dataloader=[batch])
    with pytest.raises(IncompatibleError, match="needs a batch with `input_ids` and `attention_mask`"):
        train([], kind="images", algorithms=[SequencePacking(8)])
    with pytest.raises(TrainerConfigError, match="no longer fit their attention masks"):
        train(["SeqLengthWarmup", "SequencePacking"])


def test_collators_are_picklable_for_workers() -> None:
    import pickle

    from hocket.algos import PackingCollator

    collator: Any = pickle.loads(pickle.dumps(PackingCollator(8)))
    assert collator(_sequences([3, 4]))["input_ids"].shape == (1, 8)


def test_rows_without_tokens_are_left_out() -> None:
    padded = {
        "input_ids": torch.tensor([[5, 6, 0], [0, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 0], [0, 0, 0]]),
    }
    packed = PackingCollator(4, inner=lambda batch: batch)(padded)
    assert packed["input_ids"].tolist() == [[5, 6, 0, 0]]
    with pytest.raises(IncompatibleError, match="no sequence to pack"):
        PackingCollator(4, inner=lambda batch: batch)({name: one[1:] for name, one in padded.items()})
