"""Several ranks train as one process: the same updates, the same time, the same end."""

from __future__ import annotations

import logging
import os
import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from hocket.trainer import Callback, DataSpec, LossSum
from hocket.trainer.errors import DataError
from hocket.trainer.loggers import InMemoryLogger
from support.ranks import RankError, run_ranks
from support.training import Net, Watch, data, make, parameters

NUM = 22


class SharedLoader:
    """Divides batches of 8 over the ranks as the streaming loader does, including a shorter last one."""

    def __init__(self, rank, size, *, num=NUM, batch_size=8):
        self.data_parallel = (rank, size)
        self.batch_size = batch_size // size
        self.samples = data(num)
        self.starts = range(0, num, batch_size)
        self.stride = batch_size
        self.at = 0
        self.share = (0, 0)

    def __len__(self):
        return len(self.starts)

    def __iter__(self):
        rank, size = self.data_parallel
        if self.at == len(self):
            self.at = 0
            return
        while self.at < len(self):
            start = self.starts[self.at]
            stop = min(start + self.stride, len(self.samples))
            num = stop - start
            mine = range(start + rank * num // size, start + (rank + 1) * num // size)
            self.share = (len(mine), num)
            self.at += 1
            yield list(self.samples[list(mine)] if mine else self.samples[[0]])
        self.at = 0

    def batch_share(self):
        return self.share

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class OwnLoader:
    """Yields this rank's share of each batch of 8, and keeps a position that only this rank can use."""

    def __init__(self, rank, size):
        self.batch_size = 8 // size
        self.mine = range(rank, 24, size)
        self.at = 0

    def __len__(self):
        return 3

    def __iter__(self):
        while self.at < len(self.mine):
            rows = self.mine[self.at : self.at + self.batch_size]
            self.at += self.batch_size
            yield list(data(24)[list(rows)])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def whole(state):
    return [
        value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for value in state.model.state_dict().values()
    ]


# Interpreters take seconds to start, so one group of ranks runs all jobs, and the tests check the results.
UNEVEN = [(config, size, num) for config in (None, {}) for size, num in ((None, 22), (3, 22), (1, 17))]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("ranks"))
    train_on_own((0, 1), f"{folder}/own-1", "2ba")
    return folder, run_ranks(everything_on_a_rank, 2, folder, init="gloo", timeout_s=200)


def everything_on_a_rank(folder):
    place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return {
        "uneven": [train_unevenly(place, *case) for case in UNEVEN],
        "stop": stop_on_one_rank(place),
        "early": end_early_on_one_rank(place),
        "empty": [train_without_data(place, config) for config in (None, {})],
        "sums": train_sums(place),
        "resume": [
            resume(place, f"{folder}/whole", "6ba", autoresume=False),
            resume(place, f"{folder}/cut", "4ba", autoresume=False),
            resume(place, f"{folder}/cut", "6ba", autoresume=True),
        ],
        "own": [
            train_on_own(place, f"{folder}/own-2", "2ba"),
            train_on_own(place, f"{folder}/same", "3ba", load_path=f"{folder}/own-2/ep0-ba2"),
            train_on_own(place, f"{folder}/other", "3ba", load_path=f"{folder}/own-1/ep0-ba2"),
        ],
    }


def with_tokens(loader):
    return DataSpec(loader, get_num_tokens_in_batch=lambda batch: 5 * len(batch[0]))


def train_unevenly(place, config, size, num):
    logger = InMemoryLogger()
    with make(
        train_dataloader=with_tokens(SharedLoader(*place, num=num)),
        device_train_microbatch_size=size,
        loggers=logger,
        max_duration="2ep",
        fsdp_config=config,
    ) as trainer:
        trainer.fit()
        losses = [loss for _, loss in logger.data["loss/train/total"]]
        counts = trainer.state.timestamp.counts
        return whole(trainer.state), losses, counts[:10], counts[10:]


@pytest.mark.parametrize("case", range(len(UNEVEN)), ids=map(str, UNEVEN))
def test_ranks_make_the_update_of_one_process_with_uneven_tails(told, case):
    # Batches of 8, 8 and 6 samples, or of 8, 8 and 1, of which the first rank has no share.
    num = UNEVEN[case][2]
    logger = InMemoryLogger()
    with make(
        train_dataloader=with_tokens(DataLoader(data(num), batch_size=8)),
        loggers=logger,
        max_duration="2ep",
    ) as trainer:
        trainer.fit()
        expected = list(parameters(trainer).values())
        losses = [loss for _, loss in logger.data["loss/train/total"]]
        counts = trainer.state.timestamp.counts[:10]
        assert trainer.state.timestamp.counts.token == 5 * 2 * num
    results = [rank["uneven"][case] for rank in told[1]]
    for values, rank_losses, rank_counts, clocks in results:
        for value, one in zip(values, expected, strict=True):
            torch.testing.assert_close(value, one, rtol=1e-5, atol=1e-6)
        assert rank_losses == pytest.approx(losses, rel=1e-5)
        assert rank_counts == counts
        assert clocks == results[0][3]


def stop_on_one_rank(place):
    def stop(state):
        if place[0] == 1 and state.timestamp.batch == "3ba":
            state.stop_training()

    with make(train_dataloader=SharedLoader(*place), callbacks=Watch(stop), max_duration="9ep") as trainer:
        trainer.fit()
        first = trainer.state.timestamp.counts[:3]
        trainer.fit("2ba")
        return first, trainer.state.timestamp.counts[:3]


def test_stopping_on_one_rank_ends_all_after_the_same_batch(told):
    one, other = (rank["stop"] for rank in told[1])
    assert one == other
    assert one[0][2] in (3, 4)
    assert one[1][2] == one[0][2] + 2


def end_early_on_one_rank(place):
    ends, said = [], []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("hocket.trainer.data.train_loader").addHandler(handler)

    class Ends(Callback):
        def epoch_end(self, state, logger):
            ends.append(state.timestamp.counts.batch)

    mine = Subset(data(), range(20)[-4 * (3 + place[0]) :])
    loader = [list(batch) for batch in DataLoader(mine, batch_size=4)]
    with make(train_dataloader=loader, callbacks=Ends(), max_duration="2ep") as trainer:
        trainer.fit()
        return said, (ends, trainer.state.dataloader_len, trainer.state.timestamp.counts[:5])


def test_an_epoch_ends_on_all_ranks_when_one_runs_out_of_data(told):
    (said, one), (_, other) = (rank["early"] for rank in told[1])
    assert one == other == ([3, 6], 3, (0, 2, 6, 48, 0))
    (warning,) = said
    assert "the epoch ends after 3 batches on every rank, because rank 0 has no more" in warning


def train_without_data(place, config):
    loader = [] if place[0] == 1 else [list(batch) for batch in DataLoader(data(), batch_size=4)]
    with (
        make(train_dataloader=loader, max_duration="2ep", fsdp_config=config) as trainer,
        pytest.raises(DataError) as refused,
    ):
        trainer.fit()
    return str(refused.value), trainer.state.timestamp.counts.batch


def test_a_rank_without_data_is_named_on_all_before_the_first_step(told):
    one, other = (rank["empty"] for rank in told[1])
    assert one == other
    for message, num_steps in one:
        assert "the data loader of rank 1 yielded no batch in a whole epoch" in message
        assert num_steps == 0


class Sums(Net):
    """A model whose loss is a sum and a weight, both tensors on the device."""

    def loss(self, outputs, batch):
        weights = (batch[1] + 1).float()
        losses = nn.functional.cross_entropy(outputs, batch[1], reduction="none")
        return LossSum((losses * weights).sum(), weights.sum())


def train_sums(place):
    logger = InMemoryLogger()
    with make(
        model=Sums(),
        train_dataloader=SharedLoader(*place, num=17),
        device_train_microbatch_size=3,
        fsdp_config={},
        loggers=logger,
        max_duration="3ba",
    ) as trainer:
        trainer.fit()
        return whole(trainer.state), [loss for _, loss in logger.data["loss/train/total"]]


def test_a_loss_sum_is_divided_by_the_weight_of_all_ranks(told):
    model = Sums()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for start in (0, 8, 16):
        batch = data(17)[start : start + 8]
        optimizer.zero_grad()
        loss = model.loss(model(batch), batch)
        (loss.total / loss.weight).backward()
        losses.append(float((loss.total / loss.weight).detach()))
        optimizer.step()
    for values, rank_losses in (rank["sums"] for rank in told[1]):
        for value, one in zip(values, model.state_dict().values(), strict=True):
            torch.testing.assert_close(value, one, rtol=1e-5, atol=1e-6)
        assert rank_losses == pytest.approx(losses, rel=1e-5)


def resume(place, folder, duration, *, autoresume):
    model = Net(dropout=0.2)
    with make(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        train_dataloader=SharedLoader(*place),
        fsdp_config={} if place[1] > 1 else None,
        save_folder=folder,
        save_interval="2ba",
        checkpointing={"asynchronous": True},
        autoresume=autoresume,
        max_duration=duration,
    ) as trainer:
        start = trainer.state.timestamp.counts.batch
        trainer.fit()
        return start, whole(trainer.state), torch.get_rng_state()


def test_sharded_runs_resume_with_the_same_bits_and_on_other_numbers_of_ranks(told, capfd):
    folder, ranks = told
    for rank in ranks:
        (_, values, generator), _, (start, again, generator_again) = rank["resume"]
        assert start == 4
        assert all(torch.equal(one, other) for one, other in zip(values, again, strict=True))
        assert torch.equal(generator, generator_again)
    assert not torch.equal(ranks[0]["resume"][0][2], ranks[1]["resume"][0][2])
    # The finished run of two ranks, opened on one.
    start, values, _ = resume((0, 1), f"{folder}/whole", "6ba", autoresume=True)
    assert start == 6
    assert all(torch.equal(one, other) for one, other in zip(values, ranks[0]["resume"][0][1], strict=True))
    capfd.readouterr()
    start, values, _ = resume((0, 1), f"{folder}/cut", "8ba", autoresume=True)
    assert start == 6
    assert [value.shape for value in values] == [value.shape for value in ranks[0]["resume"][0][1]]
    assert capfd.readouterr().err.count("another number of ranks") == 1


def open_and_go_on(folder):
    place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    opened = resume(place, f"{folder}/whole", "6ba", autoresume=True)
    return opened, resume(place, f"{folder}/whole", "8ba", autoresume=True)


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_resumes_on_four_and_then_on_one(told, tmp_path):
    folder, ranks = told
    shutil.copytree(f"{folder}/whole", tmp_path / "whole")
    for (start, values, _), (start_again, _, _) in (
        on_four := run_ranks(open_and_go_on, 4, str(tmp_path), init="gloo", timeout_s=280)
    ):
        assert (start, start_again) == (6, 6)
        assert all(
            torch.equal(one, other) for one, other in zip(values, ranks[0]["resume"][0][1], strict=True)
        )
    start, values, _ = resume((0, 1), str(tmp_path / "whole"), "8ba", autoresume=True)
    assert start == 8
    assert all(torch.equal(one, other) for one, other in zip(values, on_four[0][1][1], strict=True))


def train_on_own(place, folder, duration, **arguments):
    """Return the samples that this rank trained on, by their first feature, and its warnings."""
    seen = []
    with make(
        train_dataloader=OwnLoader(*place),
        callbacks=Watch(lambda state: seen.extend(state.batch[0][:, 0].tolist())),
        save_folder=folder,
        max_duration=duration,
        **arguments,
    ) as trainer:
        told = list(trainer._run.notices)
        trainer.fit()
    return seen, told


def test_a_loader_unaware_of_ranks_resumes_after_the_batches_of_all_ranks(told):
    folder, ranks = told
    notice = "of another number of ranks: what was trained on in this epoch, 2 batches"
    batches = [data(24)[range(start, start + 8)][0][:, 0].tolist() for start in (0, 8, 16)]
    for rank, (first, same, other) in enumerate(rank["own"] for rank in ranks):
        assert first[0] == batches[0][rank::2] + batches[1][rank::2]
        assert same[0] == batches[2][rank::2]
        assert other[0] == batches[2][rank::2]
        assert not any("discarded" in said for said in same[1])
        assert any(notice in said for said in other[1])
    seen, said = train_on_own((0, 1), f"{folder}/own-2", "3ba", autoresume=True)
    assert seen == batches[2]
    assert sum("random generators start anew" in one for one in said) == 1
    assert sum(notice in one for one in said) == 1


def fail_on_one_rank():
    place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def fail(state):
        if place[0] == 1 and state.timestamp.batch == "2ba":
            raise ValueError("only here")

    with make(
        train_dataloader=SharedLoader(*place), callbacks=Watch(fail), max_duration="9ep", dist_timeout=5
    ) as trainer:
        trainer.fit()


def test_a_failure_of_one_rank_ends_the_job():
    with pytest.raises(RankError, match="only here") as raised:
        run_ranks(fail_on_one_rank, 2, init="gloo")
    assert raised.value.rank == 1


class Branches(Net):
    """A classifier with a layer that only the first rank uses."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(5, 5)

    def forward(self, batch):
        x, uses = batch[0], os.environ.get("RANK", "0") == "0"
        return self.layers(x + self.extra(x) if uses else x)


def train_in_ddp(kind):
    torch.distributed.init_process_group("gloo")
    model = {"module and loss": Net().layers, "model": Net(), "unused parameters": Branches()}[kind]
    options = {} if kind != "module and loss" else {"loss_fn": nn.functional.cross_entropy}
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=kind == "unused parameters")
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    batches = SharedLoader(int(os.environ["RANK"]), 2)
    with make(
        model=wrapped, optimizers=optimizer, train_dataloader=batches, max_duration="3ep", **options
    ) as trainer:
        trainer.fit()
        return list(parameters(trainer).values())


@pytest.mark.parametrize("kind", ["module and loss", "model"])
def test_a_model_that_arrives_in_ddp_trains_as_the_plain_model(kind):
    with make(train_dataloader=SharedLoader(0, 1), max_duration="3ep") as alone:
        alone.fit()
    for values in run_ranks(train_in_ddp, 2, kind):
        torch.testing.assert_close(values, list(parameters(alone).values()))


def test_unused_parameters_are_found_if_the_given_ddp_did_so():
    first, second = run_ranks(train_in_ddp, 2, "unused parameters")
    torch.testing.assert_close(first, second)
