"""Hocket's metrics and losses against torchmetrics and computations by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassROC
from torchmetrics.segmentation import MeanIoU

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.loggers import InMemoryLogger
from hocket.trainer.loss import DiceLoss, binary_cross_entropy_with_logits
from hocket.trainer.metrics import (
    BinaryF1Score,
    CrossEntropy,
    Dice,
    LanguageCrossEntropy,
    LanguagePerplexity,
    LossMetric,
    MaskedAccuracy,
    MIoU,
)
from support.training import Net, Watch, loader, make

CLASSES = 4


def segmentation(seed=0, num=6):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num, CLASSES, 3, 5, generator=generator)
    targets = torch.randint(-1, CLASSES, (num, 3, 5), generator=generator)
    return logits, targets


def text(seed=0, num=6):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num, 5, 7, generator=generator)
    targets = torch.randint(0, 7, (num, 5), generator=generator)
    targets[0, 1:] = -100
    targets[3] = -100
    return logits, targets


ON_TEXT = [LanguageCrossEntropy, LanguagePerplexity, MaskedAccuracy, CrossEntropy]
ON_IMAGES = [lambda: MIoU(CLASSES), lambda: Dice(CLASSES), lambda: CrossEntropy(ignore_index=-1)]


@pytest.mark.parametrize(
    ("make", "data"), [*((kind, text) for kind in ON_TEXT), *((kind, segmentation) for kind in ON_IMAGES)]
)
@given(cuts=st.sets(st.integers(1, 5)))
def test_metrics_do_not_depend_on_the_split_of_the_data(make, data, cuts):
    logits, targets = data()
    whole, split = make(), make()
    whole.update(logits, targets)
    places = sorted({0, 6, *cuts})
    for start, stop in itertools.pairwise(places):
        split.update(logits[start:stop], targets[start:stop])
    torch.testing.assert_close(split.compute(), whole.compute())


def test_language_metrics_skip_ignored_tokens():
    logits, targets = text()
    entropy, perplexity, accuracy = LanguageCrossEntropy(), LanguagePerplexity(), MaskedAccuracy()
    for metric in (entropy, perplexity, accuracy):
        metric.update({"logits": logits}, targets)
    expected = nn.functional.cross_entropy(logits.reshape(-1, 7), targets.reshape(-1))
    torch.testing.assert_close(entropy.compute(), expected)
    assert float(perplexity.compute()) == pytest.approx(math.exp(expected), rel=1e-5)
    counted = targets != -100
    correct = (logits.argmax(-1) == targets)[counted].float().mean()
    torch.testing.assert_close(accuracy.compute(), correct)


def test_cross_entropy_accepts_dense_targets_and_either_class_dim():
    logits, targets = segmentation()
    targets = targets.clamp(min=0)
    dense, by_index, last = CrossEntropy(), CrossEntropy(), CrossEntropy()
    dense.update(logits, nn.functional.one_hot(targets, CLASSES).movedim(-1, 1).double())
    by_index.update(logits, targets)
    last.update(logits.movedim(1, -1), targets)
    expected = nn.functional.cross_entropy(logits, targets)
    for metric in (dense, by_index, last):
        torch.testing.assert_close(metric.compute(), expected)


def test_overlap_metrics_agree_with_torchmetrics_and_with_counting():
    logits, targets = segmentation()
    targets = targets.clamp(min=0)
    ours, dice = MIoU(CLASSES), Dice(CLASSES)
    ours.update(logits, targets)
    dice.update(logits, targets)
    predictions = logits.argmax(1)
    # One sample of all pixels: torchmetrics averages over samples.
    theirs = MeanIoU(CLASSES, input_format="index")
    theirs.update(predictions.reshape(1, -1), targets.reshape(1, -1))
    torch.testing.assert_close(ours.compute().float(), 100 * theirs.compute())
    shares = []
    for index in range(1, CLASSES):
        both = ((predictions == index) & (targets == index)).sum()
        shares.append(2 * both / ((predictions == index).sum() + (targets == index).sum()))
    torch.testing.assert_close(dice.compute().float(), 100 * torch.stack(shares).mean())


def test_ignored_pixels_and_absent_classes_do_not_count():
    logits = nn.functional.one_hot(torch.tensor([[[0, 1, 1, 2]]]), CLASSES).movedim(-1, 1).float()
    targets = torch.tensor([[[0, 1, 2, -1]]])
    miou, dice = MIoU(CLASSES), Dice(CLASSES)
    miou.update(logits, targets)
    dice.update(logits, targets)
    assert float(miou.compute()) == pytest.approx(100 * (1 + 1 / 2 + 0) / 3)
    assert float(dice.compute()) == pytest.approx(100 * (2 / 3 + 0) / 2)


def test_loss_metric_weights_batches_by_their_samples():
    metric = LossMetric(nn.functional.mse_loss)
    outputs, targets = torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3)
    metric.update(outputs[:2], targets[:2])
    metric.update(outputs[2:], targets[2:])
    torch.testing.assert_close(metric.compute(), nn.functional.mse_loss(outputs, targets))


def test_f1_accepts_logits_of_two_classes():
    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [0.0, 3.0], [1.0, 0.0]])
    metric = BinaryF1Score()
    metric.update({"logits": logits}, torch.tensor([0, 1, 0, 1]))
    assert float(metric.compute()) == pytest.approx(0.5)


def test_invalid_inputs_raise_with_the_expected_ones():
    with pytest.raises(TypeError, match=r"the keys \['loss'\]; expected a tensor of logits"):
        CrossEntropy().update({"loss": 1}, torch.zeros(1))
    with pytest.raises(ValueError, match=r"shape \(3,\) for logits of shape \(2, 4\)"):
        MaskedAccuracy().update(torch.zeros(2, 4), torch.zeros(3))
    with pytest.raises(ValueError, match="`num_classes` is 1"):
        MIoU(1)


def test_binary_cross_entropy_sums_over_classes_and_averages_over_samples():
    logits, indices = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
    dense = nn.functional.one_hot(indices, 3).double()
    expected = nn.functional.binary_cross_entropy_with_logits(logits, dense.float(), reduction="sum") / 5
    torch.testing.assert_close(binary_cross_entropy_with_logits(logits, indices), expected)
    torch.testing.assert_close(binary_cross_entropy_with_logits(logits, dense), expected)
    total = binary_cross_entropy_with_logits(logits, dense, scale_by_batch_size=False)
    torch.testing.assert_close(total, expected * 5)


@pytest.mark.parametrize("options", [{}, {"squared_pred": True}, {"batch": True}, {"jaccard": True}])
def test_the_dice_loss_is_0_for_a_perfect_prediction_and_1_for_a_wrong_one(options):
    targets = torch.tensor([[[0, 1], [1, 0]], [[0, 0], [1, 1]]])
    perfect = nn.functional.one_hot(targets, 2).movedim(-1, 1).float()
    loss = DiceLoss(**options)
    assert float(loss(perfect, targets)) == pytest.approx(0, abs=1e-5)
    assert float(loss(1 - perfect, targets)) == pytest.approx(1, abs=1e-4)


def test_the_dice_loss_equals_the_computation_by_hand():
    targets = torch.tensor([[0, 0, 1, 1]])
    outputs = torch.tensor([[[0.8, 0.6, 0.4, 0.2], [0.2, 0.4, 0.6, 0.8]]])
    shares = [2 * 1.4 / (2.0 + 2), 2 * 1.4 / (2.0 + 2)]
    assert float(DiceLoss(smooth=0)(outputs, targets)) == pytest.approx(1 - sum(shares) / 2)
    of_logits = DiceLoss(softmax=True)(outputs.log(), targets)
    assert float(of_logits) == pytest.approx(1 - sum(shares) / 2, abs=1e-4)
    absent = DiceLoss(ignore_absent_classes=True, smooth=0)(outputs, torch.zeros(1, 4, dtype=torch.long))
    assert float(absent) == pytest.approx(1 - 2 * 2.0 / (2.0 + 4))
    with pytest.raises(ValueError, match="both set"):
        DiceLoss(sigmoid=True, softmax=True)


@pytest.mark.parametrize("options", [{}, {"squared_pred": True}, {"batch": True}, {"jaccard": True}])
def test_positions_with_a_negative_class_do_not_count_in_the_dice_loss(options):
    targets = torch.tensor([[0, 1, -1, 1], [-1, 0, 1, 0]])
    is_counted = (targets >= 0).unsqueeze(1)
    outputs = torch.rand(2, 2, 4)
    others = torch.where(is_counted, outputs, torch.rand(2, 2, 4))
    loss = DiceLoss(**options)
    assert float(loss(outputs, targets)) == float(loss(others, targets))
    perfect = nn.functional.one_hot(targets.clamp(min=0), 2).movedim(-1, 1).float()
    assert float(loss(perfect, targets)) == pytest.approx(0, abs=1e-5)
    assert float(loss(1 - perfect, targets)) == pytest.approx(1, abs=1e-4)


def test_perplexity_is_the_exponential_of_the_cross_entropy_to_the_last_bit():
    logits, targets = torch.randn(16, 7, 11), torch.randint(11, (16, 7))
    one, other = LanguageCrossEntropy(), LanguagePerplexity()
    for metric in (one, other):
        metric.update(logits, targets)
    assert torch.equal(other.compute(), one.compute().exp())


def test_overlap_metrics_are_computed_in_double_precision():
    outputs = torch.eye(3)[torch.tensor([[0, 1, 2, 2], [0, 1, 1, 2]])].movedim(-1, 1)[:, :, None]
    targets = torch.tensor([[0, 1, 2, 2], [0, 1, 2, 1]])[:, None]
    metric = MIoU(3)
    metric.update(outputs, targets)
    expected = 100 * (2 / 2 + 2 / 4 + 2 / 4) / 3
    torch.testing.assert_close(metric.compute(), torch.tensor(expected, dtype=torch.float64))


class WithMetric(Net):
    """A classifier with one metric, for training or for evaluation."""

    def __init__(self, metric, *, of_training=False):
        super().__init__()
        self.metric, self.of_training = metric, of_training

    def get_metrics(self, is_train=False):
        return {"Curve": self.metric} if is_train == self.of_training else {}

    def update_metric(self, batch, outputs, metric):
        metric.update(outputs.softmax(1), batch[1])


class Both(MeanIoU):
    """A metric with two values, of which its annotation says nothing."""

    def __init__(self):
        super().__init__(num_classes=3)

    def update(self, preds, target):
        pass

    def compute(self):
        return [torch.zeros(()), torch.ones(())]


@pytest.mark.parametrize("of_training", [False, True])
def test_a_metric_of_several_values_is_refused_before_the_training(of_training):
    steps = []
    for metric in (MulticlassROC(3), MetricCollection([MulticlassAccuracy(3), MulticlassROC(3)])):
        model = WithMetric(metric, of_training=of_training)
        with pytest.raises(TrainerConfigError, match=r"`Curve`.*has several values.*Return a dict"):
            make(model=model, eval_dataloader=loader(8, 4), callbacks=Watch(steps.append), max_duration="1ba")
    with (
        pytest.raises(TrainerConfigError, match="`Curve`, a `Both`, has several values"),
        make(
            model=WithMetric(Both(), of_training=of_training),
            eval_dataloader=loader(8, 4),
            max_duration="1ba",
            loggers=InMemoryLogger(),
        ) as trainer,
    ):
        trainer.fit()
    assert not steps


@pytest.mark.parametrize("of_training", [False, True])
def test_a_collection_of_metrics_and_one_value_for_each_class_are_logged_and_saved(tmp_path, of_training):
    accuracies = MulticlassAccuracy(3, average=None)
    metric = MetricCollection({"mean": MulticlassAccuracy(3), "each": accuracies})
    memory = InMemoryLogger()
    with make(
        model=WithMetric(metric, of_training=of_training),
        eval_dataloader=loader(8, 4),
        loggers=memory,
        max_duration="1ep",
        save_folder=str(tmp_path),
        save_metrics=True,
    ) as trainer:
        trainer.fit()
    label = "train" if of_training else "eval"
    mean, each = (memory.data[f"metrics/{label}/Curve/{name}"][-1][1] for name in ("mean", "each"))
    assert len(each) == 3
    assert mean == pytest.approx(sum(each) / 3)
