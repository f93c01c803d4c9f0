"""Microbatches: the split of a batch does not change the update, for means over samples and over labels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hocket.trainer import Algorithm, ComposerModel, DataSpec, Event, LossSum
from hocket.trainer.data.batches import loss_weights, num_samples, num_tokens, slice_batch
from hocket.trainer.errors import DataError, TrainerConfigError
from hocket.trainer.loggers import InMemoryLogger
from hocket.trainer.ranks.step_sync import GlobalStep
from hocket.trainer.step.accumulation import LossMean, microbatches
from support.training import Net, data, make, parameters

TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


def reference(num_steps, batch_size):
    """Train with plain torch on whole batches, of which the last one of an epoch may be shorter."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    samples = data(10)
    starts = [start for _ in range(num_steps) for start in range(0, 10, batch_size)][:num_steps]
    for start in starts:
        batch = samples[start : start + batch_size]
        optimizer.zero_grad()
        model.loss(model(batch), batch).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("size", [None, 1, 2, 3, 4, 7])
def test_microbatches_of_any_size_give_the_update_of_the_whole_batch(size):
    # 10 samples in batches of 4: the last batch of each epoch has 2.
    with make(
        train_dataloader=DataLoader(data(10), batch_size=4),
        device_train_microbatch_size=size,
        max_duration="6ba",
    ) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.sample == "20sp"
        for name, value in reference(6, 4).items():
            torch.testing.assert_close(parameters(trainer)[name], value, **TOLERANCE)


class Words(ComposerModel):
    """Predicts labels of positions, some of which are ignored; `sums` sets the form of the loss."""

    def __init__(self, sums=None):
        super().__init__()
        torch.manual_seed(1)
        self.sums = sums
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, batch):
        return self.head(self.embed(batch["input_ids"]))

    def loss(self, outputs, batch):
        labels = batch["labels"]
        total = nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum")
        weight = (labels != -100).sum()
        if self.sums == "tensor":
            return LossSum(total, weight)
        if self.sums == "number":
            return LossSum(total, int(weight))
        return total / weight


def padded(lengths):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 11, (len(lengths), 9), generator=generator)
    labels = ids.roll(-1, 1)
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("size", [5, 1, 2, 3])
def test_samples_have_equal_weights_on_request(size):
    # A microbatch's mean over its labels is weighted by its samples, so the update depends on the split.
    batch = padded([9, 2, 3, 5, 1])
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num = -(-5 // size)
    size = -(-5 // num)
    for start in range(0, 5, size):
        part = {name: value[start : start + size] for name, value in batch.items()}
        (model.loss(model(part), part) * len(part["labels"]) / 5).backward()
    optimizer.step()
    trained = Words()
    with make(
        model=trained,
        optimizers=torch.optim.SGD(trained.parameters(), lr=0.1),
        train_dataloader=[batch],
        device_train_microbatch_size=size,
        accumulate_train_batch_on_tokens=False,
        max_duration="1ba",
    ) as trainer:
        trainer.fit()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(parameters(trainer)[name], value, **TOLERANCE)


@pytest.mark.parametrize("sums", [None, "tensor", "number"])
@pytest.mark.parametrize("size", [None, 1, 2, 3])
def test_padded_batches_are_weighted_by_the_labels_that_count(sums, size):
    # The second sample is padding only: as a microbatch of its own, its mean is not a number.
    batches = [padded([9, 0, 3, 5, 1]), padded([2, 0, 8])]
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        model.loss(model(batch), batch).backward()
        optimizer.step()
    trained = Words(sums)
    with make(
        model=trained,
        optimizers=torch.optim.SGD(trained.parameters(), lr=0.1),
        train_dataloader=batches,
        device_train_microbatch_size=size,
        max_duration="2ba",
    ) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.token == "72tok"
        torch.testing.assert_close(
            trainer.state.loss,
            model.loss(Words.forward(_before_last(batches), batches[1]), batches[1]).detach(),
        )
        for name, value in model.state_dict().items():
            torch.testing.assert_close(parameters(trainer)[name], value, **TOLERANCE)


def _before_last(batches):
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.loss(model(batches[0]), batches[0]).backward()
    optimizer.step()
    return model


def test_a_batch_without_labels_changes_nothing():
    empty, full = padded([0, 0]), padded([4, 4])
    model = Words()
    with make(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
        train_dataloader=[full, empty],
        device_train_microbatch_size=1,
        max_duration="1ba",
    ) as trainer:
        trainer.fit()
        before = parameters(trainer)
        trainer.fit("1ba")
        assert trainer.state.timestamp.batch == "2ba"
        assert all(torch.equal(before[name], value) for name, value in parameters(trainer).items())


def test_a_stated_weight_is_used():
    samples = data(4)[:4]
    spec = DataSpec(dataloader=[samples], get_loss_weights=lambda batch: [1.0, 0.0, 0.0, 3.0])
    model = Net()
    outputs = model(samples)
    losses = nn.functional.cross_entropy(outputs, samples[1], reduction="none")
    gradients = torch.autograd.grad((losses[0] + 3 * losses[3]) / 4, list(model.parameters()))
    found = []

    class Keep(Algorithm):
        def match(self, event, state):
            return event is Event.AFTER_TRAIN_BATCH

        def apply(self, event, state, logger):
            found.extend(parameter.grad.clone() for parameter in state.model.parameters())

    with make(
        train_dataloader=spec, algorithms=Keep(), device_train_microbatch_size=1, max_duration="1ba"
    ) as trainer:
        trainer.fit()
    for gradient, expected in zip(found, gradients, strict=True):
        torch.testing.assert_close(gradient, expected, **TOLERANCE)


def test_an_algorithm_may_change_the_number_of_samples():
    class Half(Algorithm):
        def match(self, event, state):
            return event is Event.AFTER_DATALOADER

        def apply(self, event, state, logger):
            state.batch = [part[: part.shape[0] // 2] for part in state.batch]

    def train(**arguments):
        with make(max_duration="3ba", **arguments) as trainer:
            trainer.fit()
            return parameters(trainer)

    halves = [[part[:2] for part in data()[start : start + 4]] for start in (0, 4, 8)]
    expected = train(train_dataloader=halves)
    for size in (None, 1):
        trained = train(algorithms=Half(), device_train_microbatch_size=size)
        for name, value in expected.items():
            torch.testing.assert_close(trained[name], value, **TOLERANCE)


def test_ranks_with_fewer_samples_make_the_same_number_of_microbatches():
    facts = SimpleNamespace(samples=3, counted=3, weights=None, weight=3.0)
    step = GlobalStep(False, False, 8, 0, 8.0, 5, None)
    rows = torch.arange(3)
    parts = list(microbatches(rows, facts, step, size=1, spec=DataSpec(dataloader=[])))
    assert [(part.batch.tolist(), part.weight, part.is_counted, part.is_last) for part in parts] == [
        ([0], 1.0, True, False),
        ([1], 1.0, True, False),
        ([2], 1.0, True, False),
        ([2], 0.0, False, False),
        ([2], 0.0, False, True),
    ]


def test_a_nonfinite_loss_of_weight_0_adds_nothing():
    parameter = torch.zeros(2, requires_grad=True)
    alone = SimpleNamespace(data_parallel=(0, 2))
    mean = LossMean(GlobalStep(False, False, 1, 0, 4.0, 1, None), alone)
    outputs = parameter * 2
    nothing = outputs.sum() / torch.zeros(())
    assert nothing.isnan()
    mean.share_of(nothing, 0.0, {"outputs": [outputs]}).backward()
    assert parameter.grad.tolist() == [0.0, 0.0]
    mean.share_of(parameter.sum(), 2.0).backward()
    assert parameter.grad.tolist() == [1.0, 1.0]  # 2 ranks × 2 of 4


@pytest.mark.parametrize("weight", [0.0, torch.tensor(0.0)])
def test_infinite_outputs_without_weight_add_nothing(weight):
    """A model masks logits, and returns its loss among its outputs, as models of `transformers` do."""
    parameter = torch.ones(3, requires_grad=True)
    logits = (parameter * 2).masked_fill(torch.tensor([False, True, False]), -torch.inf)
    loss = (logits * 0).sum() / torch.zeros(())
    mean = LossMean(GlobalStep(False, False, 1, 0, 4.0, 1, None), SimpleNamespace(data_parallel=(0, 2)))
    mean.share_of(loss, weight, {"loss": loss, "logits": logits}).backward()
    assert parameter.grad.tolist() == [0.0, 0.0, 0.0]
    assert mean.of_this_rank(0.0).tolist() == 0.0


@pytest.mark.parametrize("of_weights", [float, torch.tensor])
def test_parts_are_means_over_the_labels_wherever_their_weights_are_known(of_weights):
    """Two microbatches, one of them without labels; the parts' mean is that of the total."""

    class WithParts(Words):
        def loss(self, outputs, batch):
            loss = nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())
            return {"cross_entropy": loss}

    batch = padded([3, 5, 0, 0])

    def weights(batch):
        counts = (batch["labels"] != -100).sum(dim=1).float()
        return counts if of_weights is torch.tensor else counts.tolist()

    model, logger = WithParts(), InMemoryLogger()
    with make(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=DataSpec(dataloader=[batch], get_loss_weights=weights),
        device_train_microbatch_size=2,
        loggers=logger,
        max_duration="1ba",
    ) as trainer:
        trainer.fit()
        assert all(value.isfinite().all() for value in parameters(trainer).values())
    ((_, total),) = logger.data["loss/train/total"]
    whole = WithParts()
    expected = whole.loss(whole(batch), batch)["cross_entropy"].item()
    assert total == pytest.approx(expected, rel=1e-5)
    assert logger.data["loss/train/cross_entropy"] == [(1, pytest.approx(expected, rel=1e-5))]


def test_batches_of_any_type_are_counted_and_sliced():
    batch = {
        "a": torch.arange(6).view(3, 2),
        "b": ["x", "y", "z"],
        "c": (torch.arange(3), [1, 2, 3]),
        "n": 7,
        "s": "q",
    }
    assert num_samples(batch) == 3
    part = slice_batch(batch, 1, 3)
    assert part["a"].tolist() == [[2, 3], [4, 5]]
    assert part["b"] == ["y", "z"]
    assert part["c"][0].tolist() == [1, 2]
    assert part["c"][1] == [2, 3]
    assert (part["n"], part["s"]) == (7, "q")
    assert num_tokens({"input_ids": torch.zeros(3, 5)}) == 15
    assert num_tokens(batch) == 0
    assert loss_weights({"labels": torch.tensor([[1, -100], [-100, -100]])}) == [1, 0]
    assert loss_weights({"labels": torch.tensor([1, 2])}) is None
    with pytest.raises(DataError, match=r"lengths \[2, 3\].*get_num_samples_in_batch"):
        num_samples([torch.zeros(2), torch.zeros(3)])


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": torch.arange(3), "boxes": [[1, 2], [3, 4], [5, 6]]}, {"x": [1, 2], "boxes": [[3, 4], [5, 6]]}),
        # As many numbers in each list as there are lists.
        ({"ids": [[1, 2, 3], [4, 5, 6], [7, 8, 9]]}, {"ids": [[4, 5, 6], [7, 8, 9]]}),
        (
            {"of": {"ids": [[1], [], [2, 3]], "split": "train"}},
            {"of": {"ids": [[], [2, 3]], "split": "train"}},
        ),
        ((torch.arange(3), [{"id": 5}, {"id": 6}, {"id": 7}]), ([1, 2], [{"id": 6}, {"id": 7}])),
        ([("a", "b", "c"), (4, 5, 6)], [("b", "c"), (5, 6)]),
        (({"text": ["a", "b", "c"]},), ({"text": ["b", "c"]},)),
    ],
)
def test_lists_of_one_item_per_sample_stay_whole_samples(batch, expected):
    assert num_samples(batch) == 3
    with pytest.raises(DataError, match=r"`ids` \(2\), `x` \(3\)"):
        num_samples({"ids": [[1], [2]], "x": torch.arange(3)})
    assert _as_lists(slice_batch(batch, 1, 3)) == expected


def _as_lists(part):
    if isinstance(part, torch.Tensor):
        return part.tolist()
    if isinstance(part, dict):
        return {name: _as_lists(value) for name, value in part.items()}
    return type(part)(map(_as_lists, part)) if isinstance(part, (tuple, list)) else part


def test_weights_of_labels_on_a_device_stay_on_the_device():
    weights = loss_weights({"labels": torch.zeros(2, 3, dtype=torch.long, device="meta")})
    assert (weights.device.type, list(weights.shape), weights.dtype) == ("meta", [2], torch.float32)


@pytest.mark.parametrize("size", [0, -1, True, "auto", 1.5])
def test_an_invalid_microbatch_size_raises(size):
    with pytest.raises(TrainerConfigError, match="device_train_microbatch_size"):
        make(device_train_microbatch_size=size)
