"""`DataSpec`: a user's own transforms, counts and splits of batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.trainer.data.data_spec import DataSpec, as_data_spec, with_model_weights
from hocket.trainer.errors import DataError, TrainerConfigError
from support.training import Net, Watch, data, loader, make, parameters


class Named(Net):
    def forward(self, batch):
        return self.layers(batch["x"])

    def loss(self, outputs, batch):
        return torch.nn.functional.cross_entropy(outputs, batch["y"])


def trained(train_dataloader, model=None, **arguments):
    with make(model=model, train_dataloader=train_dataloader, max_duration="2ep", **arguments) as trainer:
        trainer.fit()
        return parameters(trainer), trainer.state.timestamp.counts


def test_batches_are_transformed_before_counting_and_microbatches_before_forward():
    spec = DataSpec(
        loader(),
        batch_transforms=lambda batch: {"inputs": batch[0] * 2, "targets": batch[1]},
        microbatch_transforms=lambda batch: {"x": batch["inputs"] / 2, "y": batch["targets"]},
    )
    for size in (None, 2, 3):
        whole, counts = trained(spec, Named(), device_train_microbatch_size=size)
        plain, plain_counts = trained(loader(), device_train_microbatch_size=size)
        for name in plain:  # equal numbers at other addresses, for which kernels may round differently
            torch.testing.assert_close(whole[name], plain[name])
        assert counts[:10] == plain_counts[:10]


def split_like_composer(batch, microbatch_size):
    return list(zip(batch[0].split(microbatch_size), batch[1].split(microbatch_size), strict=True))


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_a_users_split_gives_any_part_of_a_batch(total, size, drawn):
    batch = (torch.arange(total), torch.arange(total) * 2)
    theirs, ours = DataSpec([], split_batch=split_like_composer), DataSpec([])
    starts = list(range(0, total, size))
    start = drawn.draw(st.sampled_from([*starts, total - 1, 0]))
    stop = total if start == total - 1 else min(start + size, total)
    for one, other in zip(theirs.split(batch, start, stop), ours.split(batch, start, stop), strict=True):
        assert torch.equal(one, other)


def test_splits_of_either_form_train_the_same():
    plain, _ = trained(loader(), device_train_microbatch_size=3)
    by_size, _ = trained(DataSpec(loader(), split_batch=split_like_composer), device_train_microbatch_size=3)
    by_bounds, _ = trained(
        DataSpec(loader(), split_batch=lambda batch, start, stop: [part[start:stop] for part in batch]),
        device_train_microbatch_size=3,
    )
    assert all(torch.equal(plain[name], by_size[name]) for name in plain)
    assert all(torch.equal(plain[name], by_bounds[name]) for name in plain)


def tokens(batch):
    """Count the targets as tokens, those of class 0 as tokens without a loss."""
    return {"total": 5 * len(batch[1]), "loss_generating": int((batch[1] > 0).sum())}


class Masked(Net):
    """A model whose loss is the mean over the targets that are not 0."""

    def loss(self, outputs, batch):
        return torch.nn.functional.cross_entropy(outputs, batch[1], ignore_index=0)


def test_the_loss_is_weighted_by_loss_generating_tokens():
    spec = DataSpec(loader(), get_num_tokens_in_batch=tokens)
    assert spec.loss_weights(data(6)[:]) == [float(target > 0) for target in data(6)[:][1]]
    whole, counts = trained(spec, Masked())
    assert counts.token == 2 * 5 * 20
    split, _ = trained(spec, Masked(), device_train_microbatch_size=1)
    for name in whole:
        torch.testing.assert_close(split[name], whole[name])


def test_tokens_are_counted_by_the_data_sets_sequence_length():
    class Sequences(torch.utils.data.TensorDataset):
        max_seq_len = 7

    spec = DataSpec(torch.utils.data.DataLoader(Sequences(*data(4)[:]), batch_size=2))
    assert spec.count_tokens(data(4)[:]) == 28
    assert spec.count_tokens({"input_ids": torch.zeros(2, 3)}) == 6
    assert DataSpec(loader()).count_tokens(data(4)[:]) == 0


def test_a_models_loss_weights_are_used_if_the_spec_has_none():
    class Weighed(Net):
        def loss_weights(self, batch):
            return [2.0] * len(batch[1])

    assert with_model_weights(DataSpec([]), Weighed()).loss_weights(data(2)[:]) == [2.0, 2.0]
    own = DataSpec([], get_loss_weights=lambda batch: [1.0])
    assert with_model_weights(own, Weighed()) is own
    assert with_model_weights(own, Net()) is own


def test_invalid_specs_raise():
    with pytest.raises(TrainerConfigError, match=r"`batch_transform` is no.*you mean `batch_transforms`"):
        as_data_spec({"dataloader": loader(), "batch_transform": None})
    with pytest.raises(TrainerConfigError, match=r"has \['num_samples'\] but no `dataloader`"):
        as_data_spec({"num_samples": 3})
    with pytest.raises(TrainerConfigError, match="`split_batch` of the `DataSpec` is a `int`"):
        DataSpec([], split_batch=3)
    with pytest.raises(DataError, match=r"returned \['tokens'\]; expected a number, or a dict"):
        DataSpec([], get_num_tokens_in_batch=lambda batch: {"tokens": 3}).count_tokens([])


def test_a_batch_transform_may_rename_the_batchs_keys():
    seen = []
    spec = {"dataloader": loader(), "batch_transforms": lambda batch: {"x": batch[0], "y": batch[1]}}
    with make(
        model=Named(),
        train_dataloader=spec,
        callbacks=Watch(lambda state: seen.append(sorted(state.batch))),
        max_duration="1ba",
    ) as trainer:
        trainer.fit()
    assert seen == [["x", "y"]]
