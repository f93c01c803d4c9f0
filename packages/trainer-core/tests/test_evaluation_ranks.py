"""Evaluation on several ranks has the results of one process, however the samples are divided."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.utilities import dim_zero_cat

from hocket.trainer import Callback, Evaluator
from hocket.trainer.loggers import InMemoryLogger
from support.ranks import run_ranks
from support.training import Net, data, make

CONFIGS = (None, {})
# Samples, batch size, microbatch size. On 2 ranks the sampler repeats 1 sample of 7 and of 1.
SAMPLED = [(7, 2, None), (7, 2, 1), (1, 2, None), (8, 3, 2)]
# The samples of each rank, in batches of 2.
DIVIDED = [((0, 9), (9, 12)), ((0, 5), (5, 5)), ((0, 0), (0, 3))]


class Kept(Metric):
    """Keeps predictions and targets, in dtypes and shapes other than those of torchmetrics' padding."""

    def __init__(self):
        super().__init__()
        self.add_state("outputs", default=[], dist_reduce_fx="cat")
        self.add_state("targets", default=[], dist_reduce_fx="cat")

    def update(self, outputs, targets):
        self.outputs.append(outputs.double())
        self.targets.append(targets)

    def compute(self):
        outputs, targets = dim_zero_cat(self.outputs), dim_zero_cat(self.targets)
        return (outputs * targets[:, None]).sum() / len(targets)


class Measured(Net):
    def get_metrics(self, is_train=False):
        return {"Accuracy": MulticlassAccuracy(3, average="micro"), "Kept": Kept()}

    def update_metric(self, batch, outputs, metric):
        metric.update(outputs, batch[1])


class Seen(Callback):
    def __init__(self):
        self.samples = []

    def eval_end(self, state, logger):
        self.samples.append(state.eval_timestamp.counts.sample)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(everything_on_a_rank, 2, init="gloo", timeout_s=200)


def everything_on_a_rank():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return {
        "sampled": [
            measure(config, sampled(*case[:2], rank, size), case[2]) for case in SAMPLED for config in CONFIGS
        ],
        "divided": [measure(config, divided(case[rank]), None) for case in DIVIDED for config in CONFIGS],
        "fit": fit(rank, size),
        "predict": predict(rank, size),
    }


def sampled(num, batch_size, rank, size):
    dataset = data(num)
    return DataLoader(
        dataset, batch_size=batch_size, sampler=DistributedSampler(dataset, size, rank, shuffle=False)
    )


def divided(bounds):
    inputs, targets = data(20)[slice(*bounds)]
    return list(zip(inputs.split(2), targets.split(2), strict=True)) if len(inputs) else []


def measure(config, loader, microbatch_size):
    seen = Seen()
    evaluator = Evaluator(label="eval", dataloader=loader, device_eval_microbatch_size=microbatch_size)
    with make(
        model=Measured(), train_dataloader=None, fsdp_config=config, callbacks=seen, eval_dataloader=evaluator
    ) as trainer:
        trainer.eval()
        trainer.eval()
        metrics = {
            name: float(metric.compute()) for name, metric in trainer.state.eval_metrics["eval"].items()
        }
    return metrics, seen.samples


def by_hand(inputs, targets):
    model = Measured().eval()
    metrics = model.get_metrics()
    with torch.no_grad():
        for metric in metrics.values():
            metric.update(model.layers(inputs), targets)
    return pytest.approx({name: float(metric.compute()) for name, metric in metrics.items()}, rel=1e-5)


@pytest.mark.parametrize("case", range(len(SAMPLED)), ids=map(str, SAMPLED))
def test_samples_repeated_by_a_sampler_count_once(ranks, case):
    num = SAMPLED[case][0]
    wanted = by_hand(*data(num)[:])
    for rank in ranks:
        for at in range(len(CONFIGS)):
            found, samples = rank["sampled"][case * len(CONFIGS) + at]
            assert found == wanted
            assert samples == [num, num]


@pytest.mark.parametrize("case", range(len(DIVIDED)), ids=map(str, DIVIDED))
def test_ranks_with_fewer_batches_or_none_measure_the_same(ranks, case):
    num = max(stop for _, stop in DIVIDED[case])
    wanted = by_hand(*data(20)[:num])
    for rank in ranks:
        for at in range(len(CONFIGS)):
            found, samples = rank["divided"][case * len(CONFIGS) + at]
            assert found == wanted
            assert samples == [num, num]


def fit(rank, size):
    """Train with and without evaluations between the batches; return the results and the clocks."""
    told = []
    for interval in (0, "1ba"):
        logger = InMemoryLogger()
        with make(
            model=Measured(dropout=0.2),
            train_dataloader=sampled(16, 2, rank, size),
            eval_dataloader=sampled(7, 2, rank, size),
            eval_interval=interval,
            fsdp_config={},
            loggers=logger,
            max_duration="1ep",
        ) as trainer:
            trainer.fit()
            counts = trainer.state.timestamp.counts
            weights = [value.full_tensor() for value in trainer.state.model.state_dict().values()]
        told.append((weights, counts[:10], counts[10:], logger.data.get("metrics/eval/Accuracy")))
    return told


def test_evaluations_do_not_change_the_training_on_ranks(ranks):
    for plain, evaluated in (rank["fit"] for rank in ranks):
        assert all(torch.equal(one, other) for one, other in zip(plain[0], evaluated[0], strict=True))
        assert plain[1] == evaluated[1]
        assert [step for step, _ in evaluated[3] or [(1, 0), (2, 0), (3, 0), (4, 0)]] == [1, 2, 3, 4]
    assert ranks[0]["fit"][1][3] is not None
    assert ranks[0]["fit"][1][2] == ranks[1]["fit"][1][2]


def predict(rank, size):
    with make(model=Measured(), train_dataloader=None, fsdp_config={}) as trainer:
        return trainer.predict(sampled(7, 2, rank, size)), trainer.predict(divided(DIVIDED[1][rank]))


def test_each_rank_predicts_its_own_samples(ranks):
    model = Measured().eval()
    with torch.no_grad():
        outputs = model.layers(data(7)[:][0])
        others = model.layers(data(20)[:5][0])
    for rank in (0, 1):
        sampled_outputs, divided_outputs = ranks[rank]["predict"]
        torch.testing.assert_close(torch.cat(sampled_outputs), outputs[rank::2])
        if rank:
            assert divided_outputs == []
        else:
            torch.testing.assert_close(torch.cat(divided_outputs), others)
