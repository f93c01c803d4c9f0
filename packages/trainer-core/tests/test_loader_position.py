"""`EpochProgress`: a run that resumes within an epoch with another batch size trains on each sample once."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from hocket.trainer import Algorithm, Callback, Event
from hocket.trainer.data.loader_position import LoaderPosition
from hocket.trainer.errors import ResumeError
from support.ranks import run_ranks
from support.training import FileStore, data, make

NUM = 24


def numbered(num=NUM):
    """Return data whose first feature is the sample's number."""
    x, y = data(num).tensors
    x = x.clone()
    x[:, 0] = torch.arange(num)
    return TensorDataset(x, y)


class Seen(Callback):
    """Records the numbers of each batch's samples, by epoch."""

    def __init__(self):
        self.batches = []

    def batch_start(self, state, logger):
        numbers = state.batch[0][:, 0].int().tolist()
        self.batches.append((state.timestamp.counts.epoch, numbers))

    def of(self, epoch):
        return [number for at, numbers in self.batches if at == epoch for number in numbers]


class Stop(Callback):
    """Raises before the batch that follows a number of batches, which were saved."""

    def __init__(self, after):
        self.after = after

    def batch_start(self, state, logger):
        if state.timestamp.counts.batch == self.after:
            raise KeyboardInterrupt


def train(make_loader, store, *, stop=None, duration="2ep", seen=None, **arguments):
    seen = seen or Seen()
    loader = make_loader()
    callbacks = [*([] if stop is None else [Stop(stop)]), seen, *arguments.pop("callbacks", [])]
    with make(
        train_dataloader=loader,
        callbacks=callbacks,
        checkpointing={"store": store},
        save_interval="1ba",
        autoresume=store is not None,
        max_duration=duration,
        **arguments,
    ) as trainer:
        try:
            trainer.fit()
        except KeyboardInterrupt:
            assert stop is not None
        return seen, trainer.state.timestamp.counts


def shuffled(size, **options):
    return lambda: DataLoader(numbered(), batch_size=size, shuffle=True, **options)


def first_sample(position, size, **options):
    return position.first_sample(shuffled(size)(), **options)


def test_samples_that_do_not_divide_over_the_ranks_raise():
    position = LoaderPosition.of(shuffled(3)(), num_batches=2, since=(0, 0), all_samples=12, num_ranks=2)
    assert first_sample(position, 3, num_batches=2, num_ranks=2) is None
    assert first_sample(position, 4, num_batches=2, num_ranks=2) == 6
    assert first_sample(position, 4, num_batches=2, num_ranks=3) == 4
    assert first_sample(position, 2, num_batches=2, num_ranks=3) is None
    with pytest.raises(ResumeError, match=r"12 samples of the epoch .* do not divide over 5 ranks"):
        first_sample(position, 4, num_batches=2, num_ranks=5)


LOADERS = {
    "in order": lambda size: lambda: DataLoader(numbered(), batch_size=size),
    "shuffled": shuffled,
    "dropping": lambda size: shuffled(size, drop_last=True),
    "own generator": lambda size: shuffled(size, generator=torch.Generator().manual_seed(5)),
    "workers": lambda size: shuffled(size, num_workers=2),
    "persistent": lambda size: shuffled(size, num_workers=1, persistent_workers=True),
    "subset": lambda size: (
        lambda: DataLoader(numbered(), batch_size=size, sampler=SubsetRandomSampler(range(NUM)))
    ),
    "batch sampler": lambda size: (
        lambda: DataLoader(
            numbered(), batch_sampler=BatchSampler(SubsetRandomSampler(range(NUM)), size, drop_last=False)
        )
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(("before", "after", "stop"), [(4, 8, 3), (8, 4, 1), (6, 4, 2), (2, 24, 5)])
def test_another_batch_size_continues_after_the_samples_that_were_trained_on(
    tmp_path, kind, before, after, stop
):
    loader, store = LOADERS[kind], FileStore(tmp_path)
    whole, _ = train(loader(before), None)
    first, _ = train(loader(before), store, stop=stop)
    rest, counts = train(loader(after), store)
    num = NUM if kind != "dropping" else before * stop + (NUM - before * stop) // after * after
    assert first.of(0) + rest.of(0) == whole.of(0)[:num]
    assert [len(numbers) for epoch, numbers in rest.batches if epoch == 0][:-1] == [after] * (
        -(-(num - before * stop) // after) - 1
    )
    # The second epoch is whole, and in the order of the uninterrupted run.
    assert rest.of(1) == whole.of(1)[: NUM // after * after if kind == "dropping" else NUM]
    assert counts.epoch == 2


def test_the_batch_size_may_change_again_within_the_epoch(tmp_path):
    store = FileStore(tmp_path)
    whole, _ = train(shuffled(4), None)
    parts = [
        train(shuffled(size), store, stop=stop, duration="1ep")[0].of(0)
        for size, stop in [(4, 2), (3, 4), (3, 5), (5, 6), (4, None)]
    ]
    assert list(itertools.chain(*parts)) == whole.of(0)
    assert [len(part) for part in parts] == [8, 6, 3, 5, 2]


def test_the_length_of_the_epoch_with_two_batch_sizes_is_known(tmp_path):
    store, lengths = FileStore(tmp_path), []

    class Length(Callback):
        def batch_end(self, state, logger):
            lengths.append(state.dataloader_len)

    train(shuffled(4), store, stop=3)
    _, counts = train(shuffled(5), store, duration="6ba", callbacks=[Length()])
    assert lengths == [6, 6, 6]
    # A run that ends with the last batch of an epoch has ended the epoch.
    assert counts.epoch == 1
    train(shuffled(5), store, duration="8ba", callbacks=[Length()])
    assert lengths[3:] == [5, 5]


@pytest.mark.parametrize(("before", "after", "stop"), [(4, 8, 3), (6, 4, 2), (5, 7, 2)])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_another_global_batch_size_continues_after_the_samples(tmp_path, before, after, stop, num_workers):
    store, loader = FileStore(tmp_path), shuffled(2, num_workers=num_workers)
    whole, _ = train(loader, None, global_train_batch_size=before)
    first, _ = train(loader, store, stop=stop, global_train_batch_size=before)
    rest, counts = train(loader, store, global_train_batch_size=after)
    assert first.of(0) + rest.of(0) == whole.of(0)
    assert rest.of(1) == whole.of(1)
    assert counts.epoch == 2
    assert counts.sample == 2 * NUM


def test_global_batches_replace_those_of_a_loader_in_the_same_order_only(tmp_path):
    in_order = LOADERS["in order"]
    for name, sizes in {"to": (None, 8), "from": (4, None)}.items():
        store = FileStore(tmp_path / name)
        first, _ = train(in_order(4), store, stop=3, global_train_batch_size=sizes[0])
        if name == "to":
            with pytest.raises(ResumeError, match=r"had 12 samples, .* have 24 now"):
                train(in_order(4), store, global_train_batch_size=sizes[1])
        else:
            rest, _ = train(in_order(8), store, global_train_batch_size=sizes[1])
            assert first.of(0) + rest.of(0) == list(range(NUM))
        store = FileStore(tmp_path / f"{name}-shuffled")
        train(shuffled(4), store, stop=3, global_train_batch_size=sizes[0])
        with pytest.raises(ResumeError, match=r"`global_train_batch_size`, .* its order is another"):
            train(shuffled(4), store, global_train_batch_size=sizes[1])


class Buckets:
    """A batch sampler of its own, as those that sort samples by length."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(torch.arange(NUM).flip(0).split(self.size))

    def __len__(self):
        return -(-NUM // self.size)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(numbered())


class Batches:
    """A loader with a state that counts batches."""

    def __init__(self, size):
        self.batch_size, self.batch = size, 0

    def __iter__(self):
        while self.batch * self.batch_size < NUM:
            self.batch += 1
            yield list(numbered()[(self.batch - 1) * self.batch_size : self.batch * self.batch_size])
        self.batch = 0

    def state_dict(self):
        return {"batch": self.batch}

    def load_state_dict(self, state):
        self.batch = state["batch"]


UNCOUNTABLE = {
    "batch sampler": lambda size: DataLoader(numbered(), batch_sampler=Buckets(size)),
    "iterable": lambda size: DataLoader(Stream(), batch_size=size),
    "list": lambda size: list(DataLoader(numbered(), batch_size=size)),
    "items": lambda size: DataLoader(
        numbered(),
        sampler=BatchSampler(SequentialSampler(range(NUM)), size, drop_last=False),
        batch_size=None,
    ),
    "stateful": Batches,
}


@pytest.mark.parametrize("kind", UNCOUNTABLE)
def test_a_loader_that_cannot_begin_at_a_sample_keeps_its_batch_size(tmp_path, kind):
    loader, store = UNCOUNTABLE[kind], FileStore(tmp_path)
    first, _ = train(lambda: loader(4), store, stop=2)
    refusal = "made batches of 4 samples" if kind == "stateful" else "had 8 samples, .* have 6 now"
    with pytest.raises(ResumeError, match=refusal):
        train(lambda: loader(3), store)
    rest, _ = train(lambda: loader(4), store)
    assert Counter(first.of(0) + rest.of(0)) == Counter(range(NUM))
    if kind != "stateful":
        train(lambda: loader(4), FileStore(tmp_path / "again"), stop=2)
        anew, _ = train(lambda: loader(3), FileStore(tmp_path / "again"), spin_dataloaders=False)
        assert Counter(anew.of(0)) == Counter(range(NUM))


class Half(Algorithm):
    def match(self, event, state):
        return event is Event.AFTER_DATALOADER

    def apply(self, event, state, logger):
        state.batch = [part[::2] for part in state.batch]


@pytest.mark.parametrize("kind", ["list", "shuffled"])
def test_an_algorithm_that_drops_samples_does_not_move_the_position(tmp_path, kind):
    make_loader = LOADERS["shuffled"](4) if kind == "shuffled" else lambda: UNCOUNTABLE["list"](4)
    store = FileStore(tmp_path)
    whole, _ = train(make_loader, None, algorithms=Half())
    first, _ = train(make_loader, store, stop=2, algorithms=Half())
    rest, counts = train(make_loader, store, stop=4, algorithms=Half())
    last, counts = train(make_loader, store, algorithms=Half())
    assert first.of(0) + rest.of(0) + last.of(0) == whole.of(0)
    assert counts.sample == NUM


def test_a_checkpoint_without_a_position_loads(tmp_path):
    store = FileStore(tmp_path)
    whole, _ = train(shuffled(4), None)
    first, _ = train(shuffled(4), store, stop=3)
    for path in tmp_path.iterdir():
        saved = torch.load(path, weights_only=False)
        del saved["user"]["loader_position"], saved["per_rank"]["loader_position"]
        torch.save(saved, path)
    rest, _ = train(shuffled(4), store)
    assert first.of(0) + rest.of(0) == whole.of(0)


def train_on_ranks(folder):
    results = {}
    for name, sizes in {"same": (2, 3), "global": (6, 8)}.items():
        argument = {"global_train_batch_size": sizes[0]} if name == "global" else {}
        again = {"global_train_batch_size": sizes[1]} if name == "global" else {}
        first = run_part(f"{folder}/{name}", shuffled(sizes[0]), "2ba", **argument)
        rest = run_part(f"{folder}/{name}", shuffled(sizes[1]), "2ep", **again)
        results[name] = first, rest
    results["fewer"] = run_part(f"{folder}/fewer", LOADERS["in order"](3), "1ba")
    return results


def run_part(folder, make_loader, duration, **arguments):
    seen = Seen()
    with make(
        train_dataloader=make_loader(),
        callbacks=seen,
        save_folder=folder,
        save_interval="1ba",
        autoresume=True,
        max_duration=duration,
        **arguments,
    ) as trainer:
        trainer.fit()
    return seen.batches


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("ranks"))
    return folder, run_ranks(train_on_ranks, 2, folder, init="gloo", timeout_s=200)


def numbers_of(batches, epoch=0):
    return [number for at, numbers in batches if at == epoch for number in numbers]


@pytest.mark.parametrize("kind", ["same", "global"])
def test_ranks_continue_after_the_samples_of_all_ranks(ranks, kind):
    parts = [part for rank in ranks[1] for part in rank[kind]]
    assert Counter(itertools.chain(*map(numbers_of, parts))) == Counter(range(NUM))
    assert Counter(itertools.chain(*(numbers_of(part, 1) for part in parts))) == Counter(range(NUM))


def test_another_number_of_ranks_continues_after_the_samples_of_all(ranks):
    folder, results = ranks
    rest = run_part(f"{folder}/fewer", LOADERS["in order"](4), "1ep")
    first = [number for rank in results for number in numbers_of(rank["fewer"])]
    assert sorted(first) + numbers_of(rest) == list(range(NUM))
