"""Callbacks that stop a training: early stopping, thresholds and time limits."""

from __future__ import annotations

import time

import pytest
import torch
import torchmetrics.classification
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from hocket.trainer.callbacks import EarlyStopper, MaxTimeStopper, ThresholdStopper
from hocket.trainer.errors import TimeValueError, TrainerConfigError
from hocket.trainer.metrics.metric_direction import is_higher_better
from support.training import FileStore, Net, Watch, loader, make


class Scripted(Net):
    """A classifier whose metric `Score` has given values, one for each evaluation."""

    def __init__(self, *scores, metrics=None):
        super().__init__()
        self.scores = list(scores)
        self.metrics = metrics or {"Score": MeanMetric(), "Accuracy": MulticlassAccuracy(3)}

    def get_metrics(self, is_train=False):
        return self.metrics

    def eval_forward(self, batch, outputs=None):
        return self(batch)

    def update_metric(self, batch, outputs, metric):
        if isinstance(metric, MeanMetric):
            metric.update(self.scores[0])
        else:
            metric.update(outputs, batch[1])


def train(stopper, scores, *, max_duration="6ep", metrics=None, **arguments):
    model = Scripted(*scores, metrics=metrics)

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
        ({"patience": 1, "comp": "gt"}, [1, 3, 2, 2, 2, 2], 4),
        ({"patience": 2, "comp": "gt"}, [1, 3, 2, 2, 2, 2], 5),
        ({"patience": "5ba", "comp": "gt"}, [1, 3, 2, 2, 2, 2], 4),
        ({"patience": 1, "min_delta": 1.5, "comp": "gt"}, [1, 2, 2, 2, 2, 2], 3),
        ({"patience": 1, "comp": "lt"}, [3, 1, 2, 2, 2, 2], 4),
        ({"patience": 1, "comp": torch.less}, [3, 1, 2, 2, 2, 2], 4),
        ({"patience": 1, "comp": "gt"}, [1, 2, 3, 4, 5, 6], 6),
    ],
)
def test_early_stopping_waits_for_its_patience(options, scores, epochs):
    assert train(EarlyStopper("metrics/eval/Score", **options), scores) == epochs


def test_scores_are_compared_in_float64_whatever_the_default_dtype():
    compared = set()

    def is_less(one, other):
        compared.update((one.dtype, other.dtype))
        return one < other

    assert train(EarlyStopper("Score", "eval", is_less, patience=1), [3, 1, 2, 2, 2, 2]) == 4
    assert compared == {torch.float64}


class Less(MeanMetric):
    higher_is_better = False


class More(MeanMetric):
    higher_is_better = True


@pytest.mark.parametrize(
    ("name", "stated", "scores", "epochs"),
    [
        ("CrossEntropy", False, [4, 3, 2, 1, 1, 0.5], 6),
        ("CrossEntropy", None, [1, 2, 2, 2, 2, 2], 3),
        ("Similarity", True, [1, 2, 3, 2, 2, 2], 5),
        ("Similarity", False, [1, 2, 3, 2, 2, 2], 3),
        ("PixelError", True, [1, 2, 3, 3, 4, 5], 6),
        ("binary_f1", None, [1, 2, 3, 3, 3, 3], 5),
    ],
)
def test_the_metric_or_its_name_says_which_value_is_better(capsys, name, stated, scores, epochs):
    metric = {None: MeanMetric, True: More, False: Less}[stated]()
    assert train(EarlyStopper(name, "eval"), scores, metrics={name: metric}) == epochs
    said = [line for line in capsys.readouterr().err.splitlines() if "stopping after" in line]
    assert len(said) == (epochs < 6)
    assert all(
        f"`metrics/eval/{name}` is" in line and line.endswith("for longer than 1 epoch") for line in said
    )


def test_all_metrics_of_torchmetrics_that_a_name_decides_state_the_same():
    stated = {
        name: metric.higher_is_better
        for name, metric in vars(torchmetrics.classification).items()
        if isinstance(metric, type) and isinstance(getattr(metric, "higher_is_better", None), bool)
    }
    decided = {name: is_higher_better(name) for name in stated}
    assert sum(one is not None for one in decided.values()) > 25
    assert {name: one for name, one in decided.items() if one is not None} == {
        name: stated[name] for name, one in decided.items() if one is not None
    }


def test_a_metric_without_a_direction_needs_a_comparison():
    with pytest.raises(TrainerConfigError, match="expected `lt`, `gt`"):
        EarlyStopper("Score", "eval", comp="best")
    for stopper in (EarlyStopper("Score", "eval"), ThresholdStopper("Score", "eval", 0.5)):
        with pytest.raises(TrainerConfigError, match=r"neither the metric `Score` .* pass `comp='gt'`"):
            train(stopper, [])


def test_early_stopping_resumes_its_count(tmp_path):
    scores = [5, 3, 2, 2, 2, 2]
    store = {"checkpointing": {"store": FileStore(tmp_path)}, "save_interval": "1ep"}
    assert train(EarlyStopper("Score", "eval", "gt"), scores, max_duration="2ep", **store) == 2
    resumed = EarlyStopper("Score", "eval", "gt")
    assert train(resumed, [2, 2, 2, 2], max_duration="6ep", autoresume=True, **store) == 3
    assert (resumed.best, resumed.best_at) == (5, 1)


def test_a_threshold_stops_the_training(capsys):
    assert train(ThresholdStopper("metrics/eval/Score", threshold=2.5, comp="gt"), [1, 2, 3, 4, 5, 6]) == 3
    assert "`metrics/eval/Score` is 3, which is better than the threshold 2.5" in capsys.readouterr().err
    metrics = {"CrossEntropy": Less()}
    stopper = ThresholdStopper("CrossEntropy", "eval", 0.5)
    assert train(stopper, [2.2, 1, 0.6, 0.4, 0.3, 0.2], metrics=metrics) == 4
    assert train(ThresholdStopper("Score", "eval", 2.5, comp="lt"), [4, 3, 2, 1, 1, 1]) == 3
    with pytest.raises(TrainerConfigError, match="`threshold` is missing"):
        ThresholdStopper("Score", "eval")


def test_unknown_metrics_and_labels_raise_with_the_existing_ones():
    with pytest.raises(
        TrainerConfigError, match="no metric `Accuracies` to monitor; there are: `Accuracy`, `Score`"
    ):
        train(EarlyStopper("metrics/eval/Accuracies"), [])
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
        arguments = {"checkpointing": {"store": FileStore(tmp_path)}, "save_interval": "1ba"}
        with make(callbacks=[slow, stopper], max_duration="100ep", autoresume=True, **arguments) as trainer:
            trainer.fit()
        return trainer.state.timestamp.counts.batch

    first = run("1sec")
    assert 1 <= first <= 8
    assert run("1sec") == first + 1  # the time is over: the run makes one batch and its checkpoint
    assert run("1sec", over_restarts=False) >= first + 2
    with pytest.raises(TimeValueError, match="expected a wall-clock time"):
        MaxTimeStopper("3ep")
