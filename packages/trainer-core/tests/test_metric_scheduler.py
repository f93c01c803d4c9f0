"""`ReduceLROnPlateau` in a training: steps with metrics, beside other schedules, and after a resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torchmetrics.classification import MulticlassAccuracy

from hocket.trainer import Callback
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.optim import LinearWithWarmupScheduler, MetricScheduler
from support.training import Net, loader, make


class Measured(Net):
    """A classifier with a metric of the training and the loss of an evaluation."""

    def get_metrics(self, is_train=False):
        return {"Accuracy": MulticlassAccuracy(3)} if is_train else {}

    def update_metric(self, batch, outputs, metric):
        metric.update(outputs, batch[1])


class Note(Callback):
    """Records each step's rate, and the values that plateaus step with."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.values: dict[int, float] = {}

    def after_train_batch(self, state, logger):
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])

    def epoch_end(self, state, logger):
        if not state.evaluators:
            self.values[state.counts.batch] = float(state.metric_values["metrics/train/Accuracy"])

    def eval_end(self, state, logger):
        self.values[state.counts.batch] = float(state.eval_metric_values["Loss"])


EVALUATED = "metrics/eval/Loss"
OPTIONS: dict[str, Any] = {"mode": "max", "factor": 0.5, "patience": 0}


def run(make_schedulers, *, duration="6ep", **arguments):
    model = Measured()
    optimizer = SGD(model.parameters(), lr=0.4, momentum=0.5)
    note = Note()
    with make(
        model=model,
        optimizers=optimizer,
        schedulers=make_schedulers(optimizer),
        callbacks=note,
        max_duration=duration,
        **arguments,
    ) as trainer:
        trainer.fit()
    return note


def plateau(optimizer, metric=EVALUATED):
    return MetricScheduler(ReduceLROnPlateau(optimizer, **OPTIONS), metric)


def expected(note, *, exponent=1.0):
    """Return the rates of torch's own scheduler with the recorded values, stepped after those batches."""
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    plateau, chained = ReduceLROnPlateau(optimizer, **OPTIONS), ExponentialLR(optimizer, exponent)
    rates = []
    for batch in range(1, len(note.rates) + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if batch in note.values:
            plateau.step(note.values[batch])
        if batch % 5 == 0:
            chained.step()
    return rates


EVALUATION = {"eval_dataloader": loader(8, 4), "eval_interval": "3ba"}


def test_it_steps_after_each_evaluation_as_in_a_plain_loop():
    note = run(lambda optimizer: plateau(optimizer), **EVALUATION)
    assert note.rates == expected(note)
    assert note.rates[-1] < 0.2


def test_it_steps_after_each_epoch_with_a_metric_of_the_training():
    note = run(lambda optimizer: plateau(optimizer, "metrics/train/Accuracy"))
    assert list(note.values) == [5, 10, 15, 20, 25, 30]
    assert note.rates == expected(note)
    assert note.rates[-1] < 0.4


def test_other_schedules_multiply_its_rates():
    schedule = LinearWithWarmupScheduler("4ba", t_max="40ba")

    class At:
        def __init__(self, batch):
            from hocket.trainer.timestamp import Timestamp

            self.timestamp, self.max_duration, self.dataloader_len = Timestamp(batch=batch), None, 5

    note = run(lambda optimizer: [schedule, plateau(optimizer)], **EVALUATION)
    own = expected(note)
    assert note.rates == pytest.approx([rate * schedule(At(batch)) for batch, rate in enumerate(own)])


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_multiplied", [True, False])
def test_it_is_chained_with_schedulers_of_torch(is_first, is_multiplied):
    def schedulers(optimizer):
        both = [plateau(optimizer), ExponentialLR(optimizer, 0.8)]
        return [*(both if is_first else both[::-1]), *([lambda state, ssr=1.0: 1.0] if is_multiplied else [])]

    note = run(schedulers, **EVALUATION)
    assert note.rates == pytest.approx(expected(note, exponent=0.8), rel=1e-12)


@pytest.mark.parametrize("metric", [EVALUATED, "metrics/train/Accuracy"])
def test_a_resumed_run_has_the_rates_of_an_uninterrupted_one(tmp_path, metric):
    def schedulers(optimizer):
        return [plateau(optimizer, metric), lambda state, ssr=1.0: 0.5]

    evaluation = EVALUATION if metric == EVALUATED else {}
    whole = run(schedulers, save_folder=tmp_path, save_interval="9ba", **evaluation)
    resumed = run(schedulers, load_path=f"{tmp_path}/ep1-ba9", **evaluation)
    assert resumed.rates == whole.rates[9:]
    stopped = run(schedulers, duration="14ba", save_folder=tmp_path / "stopped", **evaluation)
    assert stopped.rates == whole.rates[:14]
    resumed = run(schedulers, load_path=f"{tmp_path}/stopped/latest", **evaluation)
    assert resumed.rates == whole.rates[14:]


def test_a_metric_that_the_run_does_not_measure_is_refused_before_the_training():
    with pytest.raises(TrainerConfigError, match=r"steps with `metrics/eval/Lost`.*`metrics/eval/Loss`"):
        run(lambda optimizer: plateau(optimizer, "metrics/eval/Lost"), **EVALUATION)
    with pytest.raises(TrainerConfigError, match="got a `ExponentialLR`; expected torch's"):
        run(lambda optimizer: MetricScheduler(ExponentialLR(optimizer, 0.5), EVALUATED))
    with pytest.raises(TrainerConfigError, match="`ReduceLROnPlateau` cannot be stretched"):
        run(lambda optimizer: plateau(optimizer), scale_schedule_ratio=0.5, **EVALUATION)
