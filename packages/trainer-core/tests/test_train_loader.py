"""The training loader: prefetch and its depth, stops, ends of epochs, saves, and loaders on several ranks."""

from __future__ import annotations

import itertools
import os
import random

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from hocket.trainer import Algorithm, Callback, DataSpec, Event
from hocket.trainer.data.prefetch import BatchPrefetcher
from hocket.trainer.errors import DataError, RankFailedError, TrainerConfigError
from support.ranks import run_ranks
from support.training import FileStore, Net, Watch, data, loader, make, parameters


class Endless(IterableDataset):
    def __iter__(self):
        for index in itertools.count():
            yield data()[index % 20]


class Short(IterableDataset):
    def __iter__(self):
        return iter([data()[index] for index in range(8)])


def test_a_loader_without_a_length_trains():
    with make(train_dataloader=DataLoader(Short(), batch_size=4), max_duration="2ep") as trainer:
        assert trainer.state.dataloader_len is None
        trainer.fit()
        assert trainer.state.timestamp.batch == "4ba"


class Counted:
    """A loader that counts the fetched batches."""

    def __init__(self, num=20):
        self.fetched, self.num = 0, num

    def __iter__(self):
        for _ in range(self.num):
            self.fetched += 1
            yield list(data()[:4])


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_prefetch_depth_sets_how_many_batches_are_fetched_ahead(depth):
    seen = []
    counted = Counted()
    watch = Watch(lambda state: seen.append(counted.fetched - state.timestamp.counts.batch))
    with make(
        train_dataloader=counted, loop={"prefetch_depth": depth}, callbacks=watch, max_duration="8ba"
    ) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == "8ba"
    assert seen[:7] == [depth] * 7
    with pytest.raises(TrainerConfigError, match="`prefetch_depth` is -1; expected a whole number from 0"):
        make(loop={"prefetch_depth": -1})


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_prefetch_depth_changes_no_result(depth):
    def train(depth):
        with make(
            train_dataloader=loader(shuffle=True), loop={"prefetch_depth": depth}, max_duration="13ba"
        ) as trainer:
            trainer.fit()
            return parameters(trainer), trainer.state.timestamp.counts[:5]

    (values, counts), (expected, expected_counts) = train(depth), train(1)
    assert counts == expected_counts
    assert all(torch.equal(values[name], expected[name]) for name in expected)


def test_a_prefetcher_works_without_a_trainer():
    prefetcher = BatchPrefetcher(DataSpec(loader()), device=torch.device("cpu"), depth=2, max_batches=3)
    prefetcher.start()
    prefetcher.fetch()
    prefetcher.fetch()
    prefetcher.fetch()
    assert prefetcher.num_ahead == 2
    batches = [prefetcher.next() for _ in range(4)]
    assert [batch.samples for batch in batches[:3]] == [4, 4, 4]
    assert batches[3] is None


def test_an_epoch_may_be_cut_short():
    with make(train_subset_num_batches=2, max_duration="3ep") as trainer:
        trainer.fit()
        assert trainer.state.dataloader_len == 2
        assert trainer.state.timestamp.counts[:3] == (0, 3, 6)


class Drawing(torch.utils.data.Dataset):
    """A data set that draws from the process's generators for each sample, as augmentations do."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        x, y = data()[index]
        return x + torch.randn(5) + random.random(), y


def train_drawing(folder, losses, **arguments):
    model = Net(dropout=0.3)

    def note(state):
        losses[state.timestamp.counts.batch] = float(state.loss)

    with make(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=DataLoader(Drawing(), batch_size=4, shuffle=True),
        callbacks=[Watch(note), *arguments.pop("callbacks", [])],
        checkpointing={"store": None if folder is None else FileStore(folder)},
        max_duration="9ba",
        **arguments,
    ) as trainer:
        trainer.fit()


def test_a_run_that_was_stopped_resumes_with_the_same_bits(tmp_path):
    whole, parts = {}, {}
    train_drawing(None, whole)
    stop = Watch(lambda state: state.timestamp.counts.batch == 3 and state.stop_training())
    train_drawing(tmp_path, parts, callbacks=[stop])
    # The prefetched batch is trained on, because its random draws cannot be undone.
    assert max(parts) == 4
    train_drawing(tmp_path, parts, autoresume=True)
    assert parts == whole


def test_a_callable_interval_keeps_the_prefetch_and_resumes_with_the_same_bits(tmp_path):
    whole, parts = {}, {}
    train_drawing(None, whole)

    def is_due(state, event):
        return event is Event.BATCH_CHECKPOINT and state.timestamp.counts.batch in (3, 7)

    counted = Counted()
    ahead = []
    watch = Watch(lambda state: ahead.append(counted.fetched - state.timestamp.counts.batch))
    with make(
        train_dataloader=counted,
        callbacks=watch,
        checkpointing={"store": FileStore(tmp_path / "counted")},
        save_interval=is_due,
        max_duration="5ba",
    ) as trainer:
        trainer.fit()
    assert ahead[:4] == [1, 1, 1, 1]

    def die(state):
        if state.timestamp.counts.batch == 5:
            raise RuntimeError("killed")

    folder = tmp_path / "run"
    with pytest.raises(RuntimeError, match="killed"):
        train_drawing(folder, {}, save_interval=is_due, callbacks=[Watch(die)])
    assert [entry.step for entry in FileStore(folder).list()] == [3]
    train_drawing(folder, parts, autoresume=True)
    assert parts == {batch: loss for batch, loss in whole.items() if batch > 3}


@pytest.mark.parametrize("interval", ["3ba", "1ep"])
def test_a_deep_prefetch_resumes_with_the_same_bits(tmp_path, interval):
    whole, parts = {}, {}
    train_drawing(None, whole)

    def die(state):
        if state.timestamp.counts.batch == 5:
            raise RuntimeError("killed")

    options = {"save_interval": interval, "loop": {"prefetch_depth": 3}}
    with pytest.raises(RuntimeError, match="killed"):
        train_drawing(tmp_path, {}, callbacks=[Watch(die)], **options)
    [saved] = [entry.step for entry in FileStore(tmp_path).list()] or [0]
    train_drawing(tmp_path, parts, autoresume=True, **options)
    assert parts == {batch: loss for batch, loss in whole.items() if batch > saved}


class Stating(Counted):
    """A `Stateful` loader that counts the calls of `state_dict`."""

    asked = 0

    def state_dict(self):
        self.asked += 1
        return {"fetched": self.fetched}

    def load_state_dict(self, state):
        self.fetched = state["fetched"]


@pytest.mark.parametrize(("saves", "asked"), [(False, 0), (True, 2)])
def test_the_loaders_state_is_read_only_when_a_checkpoint_is_saved(tmp_path, saves, asked):
    stating = Stating()
    store = {"checkpointing": {"store": FileStore(tmp_path)}, "save_interval": "5ba"} if saves else {}
    with make(train_dataloader=stating, max_duration="10ba", **store) as trainer:
        trainer.fit()
    assert stating.asked <= asked + saves  # loading reads the state once, for the names of its parts


class Epochs(torch.utils.data.Dataset):
    def __init__(self):
        self.epochs = []

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return data()[index]

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def test_set_epoch_of_the_data_set_is_called():
    samples = Epochs()
    with make(train_dataloader=DataLoader(samples, batch_size=4), max_duration="3ep") as trainer:
        trainer.fit()
    assert samples.epochs == [0, 1, 2]


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = torch.nn.Embedding(11, 6), torch.nn.Linear(6, 11)

    def forward(self, batch):
        return self.head(self.embed(batch["input_ids"]))

    def loss(self, outputs, batch):
        return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def words():
    ids = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 3:], labels[2, 1:] = -100, -100
    return {"input_ids": ids, "labels": labels}


def train_words(spec, **arguments):
    model = Words()
    with make(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=spec,
        max_duration="1ba",
        **arguments,
    ) as trainer:
        trainer.fit()
        return parameters(trainer), trainer.state.timestamp.counts.token


def test_loss_weights_on_a_device_count_as_those_on_the_host():
    on_device = DataSpec([words()], get_loss_weights=lambda batch: (batch["labels"] != -100).sum(1).float())
    (expected, _), (weighted, _) = (
        train_words([words()], device_train_microbatch_size=size)
        if spec is None
        else train_words(spec, device_train_microbatch_size=size)
        for spec, size in ((None, None), (on_device, 1))
    )
    for name, value in expected.items():
        torch.testing.assert_close(weighted[name], value, rtol=1e-5, atol=1e-6)


class Truncate(Algorithm):
    def match(self, event, state):
        return event is Event.AFTER_DATALOADER

    def apply(self, event, state, logger):
        state.batch = {name: value[:, :3] for name, value in state.batch.items()}


class TruncateCallback(Callback):
    def after_dataloader(self, state, logger):
        state.batch = {name: value[:, :3] for name, value in state.batch.items()}


@pytest.mark.parametrize("changes", [{"algorithms": Truncate()}, {"callbacks": TruncateCallback()}])
def test_tokens_and_weights_are_counted_on_the_changed_batch(changes):
    short = {name: value[:, :3] for name, value in words().items()}
    expected, tokens = train_words([short], device_train_microbatch_size=1)
    changed, counted = train_words([words()], device_train_microbatch_size=1, **changes)
    assert counted == tokens == 12
    for name, value in expected.items():
        assert torch.equal(changed[name], value)


class Twice(Callback):
    """A callback that replaces the batch by one with twice the rows."""

    def batch_start(self, state, logger):
        state.batch = [torch.cat([part, part]) for part in state.batch]


def test_a_batch_that_a_callback_replaced_is_split_into_microbatches():
    rows = []

    class Rows(Callback):
        def before_forward(self, state, logger):
            rows.append(state.batch[0].shape[0])

    with make(callbacks=[Twice(), Rows()], device_train_microbatch_size=4, max_duration="1ba") as trainer:
        trainer.fit()
        assert trainer.state.timestamp.sample == "8sp"
    assert rows == [4, 4]


def share(batch, rank):
    return [part[rank::2] for part in batch]


class Fails:
    def __init__(self, rank, at):
        self.rank, self.at = rank, at

    def __iter__(self):
        for index, batch in enumerate(loader(40)):
            if self.rank == 1 and index == self.at:
                raise OSError("shard 3 is gone")
            yield share(batch, self.rank)


class Remembers(Callback):
    def __init__(self, value):
        self.value = value

    def batch_end(self, state, logger):
        self.value += 1

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def train_on_two(folder):
    rank = int(os.environ["RANK"])
    results = {}
    endless = DataLoader(Endless(), batch_size=4) if rank == 0 else list(loader(8))
    with make(train_dataloader=endless, max_duration="3ep") as trainer:
        trainer.fit()
        results["endless"] = trainer.state.timestamp.counts[:3]
    try:
        with make(train_dataloader=Fails(rank, 3), max_duration="9ba") as trainer:
            trainer.fit()
    except (OSError, RankFailedError) as error:
        results["failure"] = (type(error).__name__, str(error), trainer.state.timestamp.counts.batch)
    remembers = Remembers(100 * rank)
    batches = [share(batch, rank) for batch in loader()]
    arguments = {"train_dataloader": batches, "save_folder": f"{folder}/own", "save_interval": "2ba"}
    with make(callbacks=remembers, max_duration="2ba", **arguments) as trainer:
        trainer.fit()
    again = Remembers(0)
    with make(callbacks=again, max_duration="3ba", autoresume=True, **arguments) as trainer:
        results["loaded"] = again.value
        trainer.fit()
    losses = []
    with make(
        algorithms=Half(rank),
        callbacks=Watch(lambda state: losses.append(state.timestamp.counts.sample)),
        train_dataloader=batches,
        max_duration="2ba",
    ) as trainer:
        trainer.fit()
        results["changed"] = (losses, [value.tolist() for value in parameters(trainer).values()])
    return results


class Half(Algorithm):
    """An algorithm that removes one of rank 1's two rows."""

    def __init__(self, rank):
        self.rank = rank

    def match(self, event, state):
        return event is Event.AFTER_DATALOADER and self.rank == 1

    def apply(self, event, state, logger):
        state.batch = [part[:1] for part in state.batch]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_ranks(train_on_two, 2, str(tmp_path_factory.mktemp("two")), init="gloo", timeout_s=180)


def test_an_endless_loader_ends_its_epochs_with_another_ranks_short_one(two):
    assert [rank["endless"] for rank in two] == [(0, 3, 6)] * 2


def test_every_rank_raises_at_the_step_at_which_a_loader_fails(two):
    (kind, message, at), (own, own_message, own_at) = (rank["failure"] for rank in two)
    assert (own, own_message) == ("OSError", "shard 3 is gone")
    assert kind == "RankFailedError"
    assert "rank 1 failed before batch 4" in message
    assert at == own_at == 3


def test_each_rank_loads_its_own_callbacks_state(two):
    assert [rank["loaded"] for rank in two] == [2, 102]


def test_changed_batches_of_ranks_are_weighted_by_their_new_size(two):
    (samples, values), (_, others) = (rank["changed"] for rank in two)
    assert samples == [3, 6]
    assert values == others
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in list(loader())[:2]:
        rows = [0, 2, 1]
        part = [one[rows] for one in batch]
        optimizer.zero_grad()
        model.loss(model(part), part).backward()
        optimizer.step()
    for value, one in zip(model.state_dict().values(), values, strict=True):
        torch.testing.assert_close(torch.tensor(one), value, rtol=1e-5, atol=1e-6)


def test_a_loader_that_yields_nothing_raises_with_its_name():
    with pytest.raises(DataError, match="no batch in a whole epoch"):
        make(train_dataloader=[], max_duration="1ep").fit()
