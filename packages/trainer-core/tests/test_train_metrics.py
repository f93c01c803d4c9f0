"""Metrics of training: updated with each microbatch, logged, and exact over ranks at the end of an epoch."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from hocket.trainer import Callback, DataSpec
from hocket.trainer.loggers import InMemoryLogger
from hocket.trainer.metrics import CrossEntropy
from support.ranks import run_ranks
from support.training import FileStore, Net, data, make


class Measured(Net):
    def get_metrics(self, is_train=False):
        return {"Accuracy": MulticlassAccuracy(3, average="micro"), "CE": CrossEntropy()} if is_train else {}

    def update_metric(self, batch, outputs, metric):
        metric.update(outputs, batch[1])


class Outputs(Callback):
    """A callback that keeps the outputs of each forward pass of training."""

    def __init__(self):
        self.kept = []

    def after_loss(self, state, logger):
        self.kept.append((state.outputs.detach().clone(), state.batch[1].clone()))


def by_hand(kept):
    metrics = Measured().get_metrics(is_train=True)
    for outputs, targets in kept:
        for metric in metrics.values():
            metric.update(outputs, targets)
    return {name: float(metric.compute()) for name, metric in metrics.items()}


def train(loader, duration, **arguments):
    logger, outputs = InMemoryLogger(), Outputs()
    with make(
        model=Measured(),
        train_dataloader=loader,
        loggers=logger,
        callbacks=outputs,
        max_duration=duration,
        **arguments,
    ) as trainer:
        trainer.fit()
        values = {name: float(value) for name, value in trainer.state.train_metric_values.items()}
        weights = [value.clone() for value in trainer.state.model.state_dict().values()]
    return logger.data, outputs.kept, values, weights


def test_logged_values_are_over_the_epoch_so_far():
    logged, kept, values, _ = train(DataLoader(data(20), batch_size=4), "7ba", device_train_microbatch_size=3)
    for name in ("Accuracy", "CE"):
        points = logged[f"metrics/train/{name}"]
        for batch in range(1, 8):
            start = 0 if batch <= 5 else 5
            expected = by_hand(kept[2 * start : 2 * batch])[name]
            (of_batch, *of_epoch) = [value for step, value in points if step == batch]
            assert of_batch == pytest.approx(expected, rel=1e-5)
            assert len(of_epoch) == (batch in (5, 7))
            assert of_epoch == [of_batch] * len(of_epoch)
        assert values[name] == pytest.approx(expected, rel=1e-5)


def test_train_metrics_change_no_bit_of_the_training():
    *_, measured = train(DataLoader(data(20), batch_size=4), "2ep")
    plain = make(train_dataloader=DataLoader(data(20), batch_size=4), max_duration="2ep")
    with plain as trainer:
        trainer.fit()
        assert trainer.state.train_metrics == {}
        assert all(map(torch.equal, measured, trainer.state.model.state_dict().values()))


def test_a_step_that_computes_gradients_twice_is_measured_once():
    class Twice:
        def __init__(self, inner):
            self.inner = inner

        def compute_gradients(self, batch):
            self.inner.compute_gradients(batch)
            return self.inner.compute_gradients(batch)

        def update(self):
            self.inner.update()

    _, kept, values, _ = train(DataLoader(data(8), batch_size=4), "2ba", train_step=Twice)
    assert values == pytest.approx(by_hand(kept[::2]), rel=1e-5)


@pytest.mark.parametrize("size", [None, 2, 1])
def test_a_sample_without_labels_is_in_the_metrics_at_any_microbatch_size(size):
    class Unlabelled(Measured):
        def get_metrics(self, is_train=False):
            return {"samples": SumMetric()} if is_train else {}

        def update_metric(self, batch, outputs, metric):
            metric.update(len(outputs))

    inputs, targets = data(4)[:]
    targets = torch.where(torch.arange(4) == 1, -100, targets)
    with make(
        model=Unlabelled(),
        train_dataloader=DataSpec(
            dataloader=[(inputs, targets)], get_loss_weights=lambda batch: (batch[1] >= 0).float().tolist()
        ),
        device_train_microbatch_size=size,
        max_duration="1ba",
    ) as trainer:
        trainer.fit()
        assert trainer.state.train_metric_values["samples"] == 4


@pytest.mark.parametrize("kind", [CrossEntropy, CatMetric])
def test_a_run_resumed_within_an_epoch_continues_its_metrics(tmp_path, kind):
    class Kept(Net):
        def get_metrics(self, is_train=False):
            return {"kept": kind()} if is_train else {}

        def update_metric(self, batch, outputs, metric):
            metric.update(*(outputs, batch[1]) if kind is CrossEntropy else (outputs.amax(1),))

    def run(folder, duration):
        with make(
            model=Kept(),
            train_dataloader=DataLoader(data(20), batch_size=4),
            checkpointing={"store": FileStore(folder)},
            autoresume=True,
            max_duration=duration,
        ) as trainer:
            start = trainer.state.timestamp.counts.batch
            trainer.fit()
            return start, trainer.state.train_metrics["kept"].compute()

    _, whole = run(tmp_path / "whole", "1ep")
    run(tmp_path / "cut", "3ba")
    start, resumed = run(tmp_path / "cut", "1ep")
    assert start == 3
    assert torch.equal(whole, resumed)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(everything_on_a_rank, 2, init="gloo", timeout_s=200)


def everything_on_a_rank():
    _, kept, values, _ = train(DataLoader(data(22), batch_size=4), "1ep")
    return kept, values, evaluate_with_batch_norm()


def test_values_at_the_end_of_an_epoch_are_exact_over_ranks(ranks):
    everything = [one for rank in ranks for one in rank[0]]
    for _, values, _ in ranks:
        assert values == pytest.approx(by_hand(everything), rel=1e-5)


class Normed(Measured):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def get_metrics(self, is_train=False):
        return {} if is_train else {"CE": CrossEntropy()}


def evaluate_with_batch_norm():
    rank = int(os.environ["RANK"])
    with make(
        model=Normed(), train_dataloader=DataLoader(data(24), batch_size=4), max_duration="1ep"
    ) as trainer:
        trainer.fit()
        before = {name: value.clone() for name, value in trainer.state.model.state_dict().items()}
        trainer.eval(DataLoader(data(7), batch_size=2))
        after = trainer.state.model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        return rank, before, float(trainer.state.eval_metrics["eval"]["CE"].compute())


def test_ranks_evaluate_with_the_buffers_of_rank_0(ranks):
    states = [rank[2][1] for rank in ranks]
    assert not torch.equal(states[0]["layers.1.running_mean"], states[1]["layers.1.running_mean"])
    model = Normed()
    model.load_state_dict(states[0])
    model.eval()
    inputs, targets = data(7)[:]
    with torch.no_grad():
        expected = float(nn.functional.cross_entropy(model.layers(inputs), targets))
    for rank in ranks:
        assert rank[2][2] == pytest.approx(expected, rel=1e-5)
