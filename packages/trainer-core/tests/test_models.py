"""The model interface, `ComposerClassifier`, and models by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from hocket.trainer.errors import DataError, TrainerConfigError
from hocket.trainer.models import ComposerClassifier, ComposerModel, soft_cross_entropy
from hocket.trainer.models.named_metrics import named_metrics


@given(st.integers(1, 6), st.integers(2, 5), st.lists(st.integers(1, 3), max_size=2), st.floats(0, 0.5))
def test_one_hot_targets_equal_index_targets(samples, classes, places, smoothing):
    generator = torch.Generator().manual_seed(samples)
    logits = torch.randn(samples, classes, *places, generator=generator)
    indices = torch.randint(classes, (samples, *places), generator=generator)
    dense = nn.functional.one_hot(indices, classes).movedim(-1, 1).double()
    by_index = soft_cross_entropy(logits, indices, label_smoothing=smoothing)
    by_share = soft_cross_entropy(logits, dense, label_smoothing=smoothing)
    torch.testing.assert_close(by_index, by_share)
    torch.testing.assert_close(
        soft_cross_entropy(logits, indices), -logits.log_softmax(1).gather(1, indices.unsqueeze(1)).mean()
    )


def test_positions_without_probability_do_not_count_as_ignored_indices_do_not():
    logits = torch.randn(8, 3, 5)
    indices = torch.randint(-1, 3, (8, 5))
    dense = nn.functional.one_hot(indices + 1, 4).movedim(-1, 1)[:, 1:].float()
    for reduction in ("mean", "sum"):
        by_index = soft_cross_entropy(logits, indices, ignore_index=-1, reduction=reduction)
        torch.testing.assert_close(soft_cross_entropy(logits, dense, reduction=reduction), by_index)
    halves = soft_cross_entropy(logits.half(), dense.half())
    torch.testing.assert_close(halves, soft_cross_entropy(logits, dense).half(), rtol=1e-2, atol=1e-2)
    narrow, shares = torch.tensor([[0.0, -200.0]]).bfloat16(), torch.tensor([[0.9874, 0.0126]])
    torch.testing.assert_close(soft_cross_entropy(narrow, shares), torch.tensor(2.52))  # shares not rounded


@pytest.mark.parametrize(
    "targets", [torch.zeros(4), torch.zeros(4, 3, dtype=torch.long), torch.zeros(3).long()]
)
def test_targets_of_another_shape_raise(targets):
    with pytest.raises(ValueError, match="`targets` are"):
        soft_cross_entropy(torch.zeros(4, 3), targets)


def test_the_classifier_learns_and_measures():
    torch.manual_seed(0)
    inputs = torch.randn(64, 2)
    batch = (inputs, (inputs[:, 0] > 0).long())
    model = ComposerClassifier(nn.Linear(2, 2), num_classes=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    first = model.loss(model(batch), batch).item()
    for _ in range(30):
        optimizer.zero_grad()
        model.loss(model(batch), batch).backward()
        optimizer.step()
    assert model.loss(model(batch), batch).item() < first / 2
    assert model.get_metrics(is_train=True) == {}
    metrics = model.get_metrics()
    outputs = model.eval_forward(batch)
    for metric in metrics.values():
        model.update_metric(batch, outputs, metric)
    accuracy = (outputs.argmax(1) == batch[1]).float().mean()
    assert metrics["MulticlassAccuracy"].compute() == accuracy > 0.9
    torch.testing.assert_close(metrics["CrossEntropy"].compute(), model.loss(outputs, batch))


def test_a_classifier_refuses_a_mapping():
    with pytest.raises(DataError, match=r"keys \['image', 'label'\].*a pair \(inputs, targets"):
        ComposerClassifier(nn.Linear(2, 2))({"image": torch.ones(1, 2), "label": torch.ones(1)})


def test_a_model_must_define_forward_and_loss():
    class Half(ComposerModel):
        def forward(self, batch):
            return batch

    with pytest.raises(TypeError, match="loss"):
        Half()


def digits(num=40):
    data = pytest.importorskip("sklearn.datasets").load_digits()
    return torch.tensor(data.images[:num], dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(
        data.target[:num]
    )


@pytest.mark.parametrize("name", ["timm/resnet10t", "torchvision/shufflenet_v2_x0_5"])
def test_models_of_timm_and_torchvision_are_created_by_name(name):
    pytest.importorskip(name.partition("/")[0])
    torch.manual_seed(0)
    model = ComposerClassifier(name, num_classes=10)
    inputs, targets = digits(8)
    batch = (nn.functional.interpolate(inputs, size=32).expand(-1, 3, -1, -1), targets)
    outputs = model(batch)
    assert outputs.shape == (8, 10)
    model.loss(outputs, batch).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_number_of_classes_is_read_from_a_model_instance():
    timm = pytest.importorskip("timm")
    model = ComposerClassifier(timm.create_model("resnet10t", num_classes=7))
    assert model.num_classes == 7
    assert set(model.get_metrics()) == {"CrossEntropy", "MulticlassAccuracy"}
    assert set(ComposerClassifier(nn.Linear(1, 1)).get_metrics()) == {"CrossEntropy"}


def test_unknown_model_names_raise_with_similar_ones():
    pytest.importorskip("torchvision")
    with pytest.raises(
        TrainerConfigError, match=r"no model `resnet19`; close to it: `torchvision/resnet18`|34"
    ):
        ComposerClassifier("torchvision/resnet19", num_classes=10)
    with pytest.raises(TrainerConfigError, match="text `resnet18`; expected a module, or a name such as"):
        ComposerClassifier("resnet18", num_classes=10)


def test_metrics_are_named_by_their_class_or_by_the_given_keys():
    accuracy = MulticlassAccuracy(3)
    model = ComposerClassifier(
        nn.Linear(2, 3),
        train_metrics=accuracy,
        val_metrics={"first": accuracy, "second": MulticlassAccuracy(3)},
    )
    assert model.get_metrics(is_train=True) == {"MulticlassAccuracy": accuracy}
    assert list(model.get_metrics()) == ["first", "second"]
    collection = MetricCollection([MulticlassAccuracy(3), MeanMetric()])
    assert set(named_metrics(collection)) == {"MulticlassAccuracy", "MeanMetric"}
    with pytest.raises(TrainerConfigError, match="several metrics are a `MulticlassAccuracy`; name them"):
        named_metrics([accuracy, MulticlassAccuracy(3)])
    with pytest.raises(TrainerConfigError, match="the metrics have a `str`"):
        named_metrics(["MulticlassAccuracy"])


def test_accuracy_uses_the_largest_class_of_dense_targets():
    model = ComposerClassifier(nn.Identity(), num_classes=3)
    logits = torch.eye(3)
    targets = torch.tensor([[0.7, 0.3, 0.0], [0.4, 0.6, 0.0], [0.9, 0.0, 0.1]])
    metrics = model.get_metrics()
    for metric in metrics.values():
        model.update_metric((logits, targets), logits, metric)
    assert float(metrics["MulticlassAccuracy"].compute()) == pytest.approx(2 / 3)
    torch.testing.assert_close(
        metrics["CrossEntropy"].compute(), nn.functional.cross_entropy(logits, targets)
    )
