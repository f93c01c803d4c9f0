"""Sequence length warmup: the schedule of lengths, and batches truncated or reshaped to them."""

from typing import Any

import pytest
import torch

from hocket.algos import AlgorithmConfigError, IncompatibleError, SeqLengthWarmup, set_batch_sequence_length
from support.methods import make_model, train


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(1, 25).view(2, 12)
    mask = torch.tensor([[1] * 12, [1] * 5 + [0] * 7])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids + 100}


def test_the_length_grows_evenly_over_the_duration() -> None:
    algorithm = SeqLengthWarmup(0.5, 8, 40, 8)
    lengths = [algorithm.length_at(step / 20) for step in range(21)]
    assert lengths[:10] == [8, 8, 8, 16, 16, 24, 24, 24, 32, 32]
    assert lengths[10:] == [40] * 11
    assert SeqLengthWarmup(0.0, 8, 40).length_at(0.0) == 40
    assert SeqLengthWarmup(0.5, 8, 8).length_at(0.1) == 8


@pytest.mark.parametrize("duration", ["10ba", "2ep", "80sp"])
def test_a_model_gets_the_scheduled_lengths_for_every_unit_of_the_duration(duration: str) -> None:
    lengths: list[int] = []
    model = make_model("text")
    model.register_forward_pre_hook(lambda module, args: lengths.append(args[0]["input_ids"].shape[1]))
    loader_steps = 5 if duration == "2ep" else 10
    train(
        [],
        kind="text",
        steps=loader_steps,
        model=model,
        algorithms=[SeqLengthWarmup(0.5, 4, 16, 4)],
        max_duration=duration,
    )
    assert lengths == [4, 4, 8, 8, 12, 16, 16, 16, 16, 16]


def test_truncated_sequences_lose_their_ends() -> None:
    batch = _batch()
    cut = set_batch_sequence_length(batch, 4)
    assert all(torch.equal(cut[name], batch[name][:, :4]) for name in batch)
    assert batch["input_ids"].shape == (2, 12)
    assert set_batch_sequence_length(batch, 12).keys() == batch.keys()


def test_truncated_sequences_keep_their_last_token_on_request() -> None:
    cut = set_batch_sequence_length(_batch(), 4, preserve_end_of_sequence=True)
    assert cut["input_ids"].tolist() == [[1, 2, 3, 12], [13, 14, 15, 17]]
    assert cut["labels"].tolist() == [[101, 102, 103, 112], [113, 114, 115, 117]]
    short = set_batch_sequence_length(_batch(), 6, preserve_end_of_sequence=True)
    assert short["input_ids"][1].tolist() == [13, 14, 15, 16, 17, 18]


def test_reshaped_batches_keep_their_tokens() -> None:
    reshaped = set_batch_sequence_length(_batch(), 5, truncate=False)
    assert reshaped["input_ids"].tolist() == torch.arange(1, 21).view(4, 5).tolist()
    assert reshaped["labels"].shape == (4, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"duration": 2}, "`duration` is 2; expected a number from 0 to 1"),
        ({"min_seq_length": 64, "max_seq_length": 32}, "expected a larger maximum"),
        ({"step_size": 0}, "`step_size` is 0"),
        ({"truncate": False, "preserve_end_of_sequence": True}, "needs `truncate=True`"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(AlgorithmConfigError, match=message):
        SeqLengthWarmup(**arguments)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"label": torch.zeros(2)}, {}, r"`label` has shape \(2,\). Remove it"),
        ({"texts": ["a", "b"]}, {}, "`texts` has list"),
        ({"extra": torch.zeros(2, 3)}, {}, r"lengths \[3, 12\], expected one"),
        (
            {"extra": torch.zeros(1, 12)},
            {"truncate": False},
            r"`extra` has \(1, 12\) and `input_ids` \(2, 12\)",
        ),
        ({"attention_mask": None}, {"preserve_end_of_sequence": True}, "needs `attention_mask`"),
        ({"input_ids": None}, {"truncate": False}, "needs `input_ids`"),
    ],
)
def test_unsuitable_batches_raise_with_the_key(change: Any, options: Any, message: str) -> None:
    batch = {name: value for name, value in {**_batch(), **change}.items() if value is not None}
    with pytest.raises(IncompatibleError, match=message):
        set_batch_sequence_length(batch, 4, **options)
    with pytest.raises(IncompatibleError, match=r"maps names to tensors.*it is a list"):
        set_batch_sequence_length([torch.zeros(2, 3)], 4)  # type: ignore[arg-type]


def test_masks_of_pairs_of_positions_are_cut_in_both_dims() -> None:
    mask = torch.ones(2, 12, 12).tril()
    batch = {**_batch(), "attention_mask": mask, "embeddings": torch.randn(2, 12, 12)}
    shortened = set_batch_sequence_length(batch, 5)
    assert torch.equal(shortened["attention_mask"], mask[:, :5, :5])
    assert shortened["embeddings"].shape == (2, 5, 12)
    with pytest.raises(IncompatibleError, match=r"but `attention_mask` has \(2, 12, 12\)"):
        set_batch_sequence_length(batch, 5, preserve_end_of_sequence=True)
