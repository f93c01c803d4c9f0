"""Callbacks that stop a training: early stopping, thresholds and time limits."""

from __future__ import annotations

import time

import pytest
import torch
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from hocket.trainer.callbacks import EarlyStopper, MaxTimeStopper, ThresholdStopper
from hocket.trainer.errors import TimeValueError, TrainerConfigError
from support.training import FileStore, Net, Watch, loader, make


class Scripted(Net):
    """A classifier whose metric `Score` has given values, one for each evaluation."""

    def __init__(self, *scores):
        super().__init__()
        self.scores = list(scores)

    def get_metrics(self, is_train=False):
        return {"Score": MeanMetric(), "Accuracy": MulticlassAccuracy(3)}

    def eval_forward(self, batch, outputs=None):
        return self(batch)

    def update_metric(self, batch, outputs, metric):
        if isinstance(metric, MeanMetric):
            metric.update(self.scores[0])
        else:
            metric.update(outputs, batch[1])


def train(stopper, scores, *, max_duration="6ep", **arguments):
    model = Scripted(*scores)

    def next_score(state):
        if state.timestamp.counts.batch_in_epoch == 1 and state.timestamp.counts.epoch:
            model.scores.pop(0)

    trainer = make(
        model=model,
        eval_dataloader=loader(8),
        eval_interval="1ep",
        max_duration=max_duration,
        callbacks=[stopper, Watch(next_score)],
        **arguments,
    )
    with trainer:
        trainer.fit()
    return trainer.state.timestamp.counts.epoch


@pytest.mark.parametrize(
    ("options", "scores", "epochs"),
    [
        ({"patience": 1}, [1, 3, 2, 2, 2, 2], 4),
        ({"patience": 2}, [1, 3, 2, 2, 2, 2], 5),
        ({"patience": "5ba"}, [1, 3, 2, 2, 2, 2], 4),
        ({"patience": 1, "min_delta": 1.5}, [1, 2, 2, 2, 2, 2], 3),
        ({"patience": 1, "comp": "lt"}, [3, 1, 2, 2, 2, 2], 4),
        ({"patience": 1, "comp": torch.less}, [3, 1, 2, 2, 2, 2], 4),
        ({"patience": 1}, [1, 2, 3, 4, 5, 6], 6),
    ],
)
def test_early_stopping_waits_for_its_patience(options, scores, epochs):
    assert train(EarlyStopper("metrics/eval/Score", **options), scores) == epochs


def test_early_stopper_derives_the_comparison_from_the_metrics_name():
    assert EarlyStopper("ValLoss", "eval")._is_better(1, 2)
    assert EarlyStopper("LanguagePerplexity", "eval")._is_better(1, 2)
    assert EarlyStopper("MulticlassAccuracy", "eval")._is_better(2, 1)
    with pytest.raises(TrainerConfigError, match="expected `lt`, `gt`"):
        EarlyStopper("Score", "eval", comp="best")


def test_early_stopping_resumes_its_count(tmp_path):
    scores = [5, 3, 2, 2, 2, 2]
    store = {"checkpoint_store": FileStore(tmp_path), "save_interval": "1ep"}
    assert train(EarlyStopper("Score", "eval"), scores, max_duration="2ep", **store) == 2
    resumed = EarlyStopper("Score", "eval")
    assert train(resumed, [2, 2, 2, 2], max_duration="6ep", autoresume=True, **store) == 3
    assert (resumed.best, resumed.best_at) == (5, 1)


def test_a_threshold_stops_the_training():
    assert train(ThresholdStopper("metrics/eval/Score", threshold=2.5), [1, 2, 3, 4, 5, 6]) == 3
    assert train(ThresholdStopper("Score", "eval", 2.5, comp="lt"), [4, 3, 2, 1, 1, 1]) == 3
    with pytest.raises(TrainerConfigError, match="`threshold` is missing"):
        ThresholdStopper("Score", "eval")


def test_unknown_metrics_and_labels_raise_with_the_existing_ones():
    with pytest.raises(
        TrainerConfigError, match="no metric `Accuracies` to monitor; there are: `Accuracy`, `Score`"
    ):
        train(EarlyStopper("metrics/eval/Accuracies"), [1] * 6)
    with pytest.raises(TrainerConfigError, match="no evaluator `val` to monitor; there are `train`, `eval`"):
        train(ThresholdStopper("metrics/val/Score", threshold=1), [1] * 6)
    with pytest.raises(TrainerConfigError, match="pass `dataloader_label=`"):
        EarlyStopper("Score")
    with pytest.raises(TrainerConfigError, match="drop one of them"):
        EarlyStopper("metrics/eval/Score", "train")
    with pytest.raises(TrainerConfigError, match="expected epochs or batches"):
        EarlyStopper("Score", "eval", patience="3tok")


def test_the_time_limit_includes_earlier_runs_if_configured(tmp_path):
    def run(limit, **options):
        stopper = MaxTimeStopper(limit, **options)
        slow = Watch(lambda state: time.sleep(0.15))
        arguments = {"checkpoint_store": FileStore(tmp_path), "save_interval": "1ba"}
        with make(callbacks=[slow, stopper], max_duration="100ep", autoresume=True, **arguments) as trainer:
            trainer.fit()
        return trainer.state.timestamp.counts.batch

    first = run("1sec")
    assert 1 <= first <= 8
    assert run("1sec") == first + 1  # the time is over: the run makes one batch and its checkpoint
    assert run("1sec", over_restarts=False) >= first + 2
    with pytest.raises(TimeValueError, match="expected a wall-clock time"):
        MaxTimeStopper("3ep")
