"""Plain loaders are divided over the ranks; loaders that divide their data themselves are not."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    default_collate,
)

from hocket.trainer.data.data_spec import DataSpec
from hocket.trainer.data.loader_checks import describe_order, known_batch_size
from hocket.trainer.data.sampling import AutoSampler, follow_seed, joined_loader, shard
from hocket.trainer.errors import DataError, ReplayError, TrainerConfigError
from hocket.trainer.replay import Replay
from hocket.trainer.setup.replay_setup import join_ranks
from support.ranks import run_ranks
from support.training import Net, Watch, data, make

PLACE = (1, 2)


def sharded(loader, *, place=PLACE, auto_shard=True, seed=5):
    spec = loader if isinstance(loader, DataSpec) else DataSpec(loader)
    ranks = SimpleNamespace(data_parallel=place, global_rank=place[0], world_size=place[1])
    return shard(spec, ranks, seed=seed, auto_shard=auto_shard, argument="train_dataloader")


def collate(samples):
    return torch.stack([sample[0] for sample in samples])


class Odd(DataLoader):
    """A subclass of `DataLoader` with an additional argument."""

    def __init__(self, dataset, name, **options):
        super().__init__(dataset, **options)
        self.name = name


def test_a_plain_loader_is_copied_with_a_distributed_sampler():
    loader = Odd(data(10), "odd", batch_size=3, shuffle=True, collate_fn=collate, drop_last=True)
    result = sharded(loader)
    copied = result.spec.dataloader
    assert type(copied) is Odd
    assert (copied.name, copied.batch_size, copied.collate_fn) == ("odd", 3, collate)
    assert isinstance(copied.sampler, DistributedSampler)
    sampler = copied.sampler
    assert (sampler.rank, sampler.num_replicas, sampler.seed, sampler.shuffle) == (1, 2, 5, True)
    assert sampler.drop_last
    assert [len(batch) for batch in copied] == [3]
    assert type(loader.sampler) is RandomSampler
    assert [len(batch) for batch in loader] == [3, 3, 3]
    assert "`train_dataloader` got a `DistributedSampler` (shuffled, seed 5)" in result.notice
    assert "by a `DistributedSampler` of the trainer" in result.source


def test_an_unshuffled_loader_stays_in_order():
    copied = sharded(DataLoader(list(range(8)), batch_size=2)).spec.dataloader
    assert [batch.tolist() for batch in copied] == [[1, 3], [5, 7]]


def test_loaders_with_torchs_batch_sampler_or_without_batches_are_divided():
    dataset = list(range(8))
    batches = DataLoader(dataset, batch_sampler=BatchSampler(SequentialSampler(dataset), 3, drop_last=False))
    assert [batch.tolist() for batch in sharded(batches).spec.dataloader] == [[1, 3, 5], [7]]
    single = DataLoader(dataset, batch_size=None)
    assert list(sharded(single).spec.dataloader) == [1, 3, 5, 7]


def test_workers_of_the_copied_loader_read_its_samples():
    loader = DataLoader(list(range(8)), batch_size=2, num_workers=1, persistent_workers=True)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    copied = sharded(loader).spec.dataloader
    assert [batch.tolist() for batch in copied] == [[1, 3], [5, 7]]
    for one in (loader, copied):
        one._iterator._shutdown_workers()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class EverySecond(Sampler):
    """A user's sampler, which divides the data itself."""

    def __iter__(self):
        return iter(range(1, 8, 2))

    def __len__(self):
        return 4


def test_loaders_that_need_no_division_are_not_changed():
    loader = DataLoader(list(range(8)), batch_size=2)
    assert sharded(loader, place=(0, 1)).spec.dataloader is loader
    kept = sharded(loader, auto_shard=False)
    assert kept.spec.dataloader is loader
    assert "keeps its `SequentialSampler` on all 2 ranks" in kept.notice
    own = DataLoader(list(range(8)), sampler=EverySecond())
    assert sharded(DataSpec(own, is_sharded=True)).spec.dataloader is own
    assert sharded(own, auto_shard=False).spec.dataloader is own
    for other in (
        DataLoader(Stream(), batch_size=2),
        DataLoader(list(range(8)), sampler=DistributedSampler(list(range(8)), 2, 1)),
        [torch.zeros(2)],
    ):
        result = sharded(other)
        assert result.spec.dataloader is other
        assert result.notice is None


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"sampler": EverySecond()}, "EverySecond"),
        ({"sampler": WeightedRandomSampler([1.0] * 8, 8)}, "WeightedRandomSampler"),
        ({"sampler": RandomSampler(list(range(8)), replacement=True)}, "RandomSampler"),
        ({"batch_sampler": [[0, 1], [2, 3]]}, "list"),
    ],
)
def test_a_sampler_that_cannot_be_divided_raises_with_the_code_to_write(options, name):
    with pytest.raises(DataError, match=rf"`{name}`.*all 2 ranks.*sampler=torch.utils.data.DistributedS"):
        sharded(DataLoader(list(range(8)), **options))


def test_the_order_follows_the_seed_of_the_checkpoint():
    one, other = (sharded(DataLoader(list(range(8)), shuffle=True), seed=seed) for seed in (1, 2))
    assert list(one.spec.dataloader.sampler) != list(other.spec.dataloader.sampler)
    follow_seed(other.spec.dataloader, 1)
    assert list(one.spec.dataloader.sampler) == list(other.spec.dataloader.sampler)
    assert type(other.spec.dataloader.sampler) is AutoSampler


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_of_a_divided_loader_is_described_and_not_its_class(shuffle):
    told = describe_order(sharded(DataLoader(list(range(8)), shuffle=shuffle)).spec.dataloader)
    assert told == ("shuffled anew each epoch by the sampler's seed" if shuffle else "as stored")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("sampling"))
    return run_ranks(everything_on_a_rank, 2, folder, init="gloo", timeout_s=200)


def everything_on_a_rank(folder):
    whole = train(f"{folder}/whole", "8ba")
    cut = train(f"{folder}/cut", "5ba")
    rest = train(f"{folder}/cut", "8ba", seed=99)
    rank = int(os.environ["RANK"])
    return {
        "whole": whole,
        "cut": cut,
        "rest": rest,
        "evaluated": evaluated(),
        "undivided": {name: first_batches(make_spec(rank)) for name, make_spec in UNDIVIDED.items()},
        "rank": rank,
    }


class Words(IterableDataset):
    """Tokens in dicts, as a stream of Hugging Face's `datasets` yields them, from one index on."""

    def __init__(self, start, step):
        self.start, self.step = start, step

    def __iter__(self):
        for number in range(self.start, 16, self.step):
            yield {"x": data(16)[number][0], "label": data(16)[number][1], "text": f"sample {number}"}


class Rows:
    """A loader that is no `DataLoader`, with objects that only pickle."""

    def __init__(self, start, step):
        self.start, self.step = start, step

    def __iter__(self):
        for start in range(self.start * 2, 16, self.step * 2):
            x, y = data(16)[start : start + 2]
            yield [x, y, Tag(start)]


class Tag:
    def __init__(self, number):
        self.number = number


def words(start, step, **options):
    spec = DataSpec(DataLoader(Words(start, step), batch_size=2), **options)
    return replace(spec, batch_transforms=lambda batch: [batch["x"], batch["label"], batch["text"]])


UNDIVIDED = {
    "stream": lambda rank: words(0, 1),
    "workers": lambda rank: DataLoader(Stream(), batch_size=2, num_workers=1),
    "loader": lambda rank: Rows(0, 1),
    "list": lambda rank: list(DataLoader(data(16), batch_size=2)),
    "divided stream": lambda rank: words(rank, 2),
    "divided loader": lambda rank: Rows(rank, 2),
    "replicated": lambda rank: words(0, 1, is_replicated=True),
    "replicated in order": lambda rank: DataSpec(DataLoader(data(16), batch_size=2), is_replicated=True),
    "replicated otherwise": lambda rank: words(rank, 2, is_replicated=True),
    "stated": lambda rank: words(0, 1, is_sharded=True),
    "uneven": lambda rank: [] if rank else words(0, 1).dataloader,
}


def first_batches(given):
    with make(model=Net(), train_dataloader=given, max_duration="3ba") as trainer:
        try:
            trainer.fit()
        except DataError as error:
            assert trainer.state.timestamp.counts.batch == 0
            return str(error)
        assert trainer.state.timestamp.counts.sample == 12
        return trainer._run.data_source


def train(folder, duration, seed=3):
    seen = []
    with make(
        model=Net(),
        train_dataloader=DataLoader(data(16), batch_size=2, shuffle=True),
        callbacks=Watch(lambda state: seen.append(state.batch[0][:, 0].tolist())),
        save_folder=folder,
        save_interval="5ba",
        autoresume=True,
        seed=seed,
        max_duration=duration,
    ) as trainer:
        notices = list(trainer._run.notices)
        trainer.fit()
        weights = [value.clone() for value in trainer.state.model.state_dict().values()]
    return seen, weights, notices


def evaluated():
    seen = []

    def see(state):
        seen.extend(state.batch[0][:, 0].tolist())

    watch = Watch(see)
    watch.eval_batch_end = lambda state, logger: see(state)
    with make(train_dataloader=None, model=Net(), callbacks=watch) as trainer:
        trainer.eval(DataLoader(data(6), batch_size=2))
        predicted = trainer.predict(DataLoader(data(6), batch_size=2))
    return seen, sum(len(outputs) for outputs in predicted)


def test_ranks_train_on_all_samples_once_an_epoch_in_a_new_order_each_epoch(ranks):
    everything = sorted(data(16)[:][0][:, 0].tolist())
    epochs = []
    for start in (0, 4):
        mine = [list(itertools.chain(*rank["whole"][0][start : start + 4])) for rank in ranks]
        assert sorted(mine[0] + mine[1]) == everything
        epochs.append(mine[0])
    assert epochs[0] != epochs[1]
    for rank in ranks:
        assert sum("got a `DistributedSampler`" in notice for notice in rank["whole"][2]) == 1


def test_a_resumed_run_continues_in_its_checkpoints_order(ranks):
    for rank in ranks:
        assert rank["cut"][0] + rank["rest"][0] == rank["whole"][0]
        assert all(map(torch.equal, rank["whole"][1], rank["rest"][1]))


def test_loaders_of_evaluation_and_prediction_are_divided(ranks):
    column = data(6)[:][0][:, 0].tolist()
    for rank in ranks:
        seen, num_predicted = rank["evaluated"]
        assert seen == column[rank["rank"] :: 2]
        assert num_predicted == 3


@pytest.mark.parametrize("kind", UNDIVIDED)
def test_ranks_that_have_the_same_first_batch_raise_unless_it_is_stated(ranks, kind):
    said, other = (rank["undivided"][kind] for rank in ranks)
    expected = {
        "divided stream": "the loader's own division",
        "divided loader": "the loader's own division",
        "replicated": "the same batches on every rank, as the `DataSpec` states",
        "replicated in order": "the same batches on every rank, as the `DataSpec` states",
        "replicated otherwise": "the first batches of the ranks differ",
        "stated": "the loader's own division, as the `DataSpec` states",
        "uneven": "the data loader of rank 1 yielded no batch",
    }.get(kind, "ranks 0 and 1 have the same first batch of `train_dataloader`")
    assert expected in said
    assert expected in other


def test_a_loader_is_either_divided_or_replicated():
    with pytest.raises(
        TrainerConfigError, match="`is_sharded` and `is_replicated` of the `DataSpec` are both"
    ):
        DataSpec([], is_sharded=True, is_replicated=True)


@pytest.mark.parametrize("drop_last", [False, True])
def test_joined_batches_are_those_of_all_ranks_whoever_made_the_sampler(drop_last):
    def rows(loader):
        loader.sampler.set_epoch(2)
        return [sorted(batch.tolist()) for batch in loader]

    def together(loaders):
        return [sorted(itertools.chain(*parts)) for parts in zip(*map(rows, loaders), strict=True)]

    def own(rank, size):
        sampler = DistributedSampler(range(29), num_replicas=size, rank=rank, seed=7, drop_last=drop_last)
        return DataLoader(range(29), batch_size=4, sampler=sampler)

    plain = DataLoader(range(29), batch_size=4, shuffle=True, drop_last=drop_last)
    divided = [sharded(plain, place=(rank, 3), seed=5).spec.dataloader for rank in range(3)]
    for loader, of_ranks in ((own(0, 1), [own(rank, 3) for rank in range(3)]), (plain, divided)):
        joined = joined_loader(loader, 3, seed=5)
        follow_seed(joined, 5)  # as a resumption does; a sampler of the script keeps its own seed
        assert rows(joined) == together(of_ranks)


def test_samples_that_the_trainer_did_not_divide_are_not_joined():
    plain = DataLoader(range(12), batch_size=2)
    asked = Replay(step=4, is_other_ranks=True, saved_ranks=3)
    state = SimpleNamespace(parallelism=SimpleNamespace(data_parallel=(0, 1)), seed=5)
    joined = join_ranks(DataSpec(plain), asked, state, auto_shard=True)
    assert [len(batch) for batch in joined.dataloader] == [6, 6]
    for spec, auto_shard in ((DataSpec(plain), False), (DataSpec(plain, is_replicated=True), True)):
        with pytest.raises(ReplayError, match="which cannot join the samples"):
            join_ranks(spec, asked, state, auto_shard=auto_shard)


class Halved(DataLoader):
    """A loader that yields each batch in two."""

    def __iter__(self):
        for batch in super().__iter__():
            yield from zip(*(one.chunk(2) for one in batch), strict=True)


def test_a_batch_size_is_known_only_where_no_code_of_the_user_makes_batches():
    assert known_batch_size(DataLoader(data(10), batch_size=4)) == 4
    assert known_batch_size(Odd(data(10), "odd", batch_size=4)) == 4
    assert known_batch_size(DataLoader(data(3), batch_size=4)) is None, "the only batch is short"
    assert known_batch_size(DataLoader(data(10), batch_size=4, collate_fn=collate)) is None
    assert known_batch_size(DataLoader(data(10), batch_size=4), (None, collate)) is None
    assert known_batch_size(Halved(data(10), batch_size=4)) is None
    own = SimpleNamespace(batch_size=4, collate_fn=default_collate)
    assert known_batch_size(own) is None, "neither of torch nor with a sampler"
