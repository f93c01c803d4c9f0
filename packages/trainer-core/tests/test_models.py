"""The model interface and the classifier."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hocket.trainer.models import ComposerClassifier, ComposerModel, soft_cross_entropy


@given(st.integers(1, 6), st.integers(2, 5), st.lists(st.integers(1, 3), max_size=2), st.floats(0, 0.5))
def test_dense_targets_of_one_class_are_index_targets(samples, classes, places, smoothing):
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


@pytest.mark.parametrize(
    "targets", [torch.zeros(4), torch.zeros(4, 3, dtype=torch.long), torch.zeros(3).long()]
)
def test_targets_of_another_shape_are_refused(targets):
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
    (accuracy,) = model.get_metrics().values()
    outputs = model.eval_forward(batch)
    model.update_metric(batch, outputs, accuracy)
    assert accuracy.compute().item() == (outputs.argmax(1) == batch[1]).float().mean().item() > 0.9


def test_a_model_must_say_its_forward_and_loss():
    class Half(ComposerModel):
        def forward(self, batch):
            return batch

    with pytest.raises(TypeError, match="loss"):
        Half()
