"""`linear_cross_entropy`, which computes in chunks, against the loss of stored logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.loss import linear_cross_entropy


def inputs(rows=7, width=5, classes=11, dtype=torch.float32, seed=0, bias=True):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    target = torch.randint(0, classes, (rows,), generator=generator)
    return [draw(rows, width), draw(classes, width), draw(classes) if bias else None], target


def reference(leaves, target, dtype=None, **options):
    x, weight, bias = (None if leaf is None else leaf.to(dtype or leaf.dtype) for leaf in leaves)
    return F.cross_entropy(F.linear(x, weight, bias), target, **options)


def with_gradients(function, leaves, factor=1.0):
    used = [leaf.detach().clone().requires_grad_() for leaf in leaves if leaf is not None]
    loss = function([*used, *[None] * (3 - len(used))])
    (loss * factor).backward()
    return [loss.detach(), *(leaf.grad for leaf in used)]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 12),
    chunk=st.integers(1, 14),
    ignored=st.integers(0, 11),
    bias=st.booleans(),
    reduction=st.sampled_from(["mean", "sum"]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    factor=st.sampled_from([1.0, 0.25, -3.0]),
)
def test_loss_and_gradients_are_exact(rows, chunk, ignored, bias, reduction, smoothing, factor):
    leaves, target = inputs(rows, dtype=torch.float64, bias=bias)
    target[: min(ignored, rows - 1)] = -100
    options = {"reduction": reduction, "label_smoothing": smoothing}

    def ours(leaves):
        x, weight, bias = leaves
        return linear_cross_entropy(x, weight, target, linear_bias=bias, chunk_size=chunk, **options)

    expected = with_gradients(lambda leaves: reference(leaves, target, **options), leaves, factor)
    torch.testing.assert_close(with_gradients(ours, leaves, factor), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_as_exact_as_stored_logits(dtype):
    """Compare with float64: the error is no larger than that of torch's loss of logits in that dtype."""
    leaves, target = inputs(300, 32, 500, dtype)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = with_gradients(lambda leaves: reference(leaves, target), wide)

    def ours(leaves):
        return linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2], chunk_size=17)

    chunked = with_gradients(ours, leaves)
    stored = with_gradients(lambda leaves: reference(leaves, target), leaves)
    for mine, theirs, truth in zip(chunked, stored, exact, strict=True):
        error, other = ((one.double() - truth).norm() / truth.norm() for one in (mine, theirs))
        assert error <= other * 1.1 + (1e-6 if dtype == torch.float32 else 1e-4)
    assert chunked[0].dtype == torch.float32
    assert [gradient.dtype for gradient in chunked[1:]] == [dtype] * 3


def test_autocast_multiplies_in_bf16_and_keeps_gradients_in_fp32():
    leaves, target = inputs(64, 32, 100)

    def ours(leaves):
        with torch.autocast("cpu", torch.bfloat16):
            return linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2], chunk_size=9)

    def stored(leaves):
        with torch.autocast("cpu", torch.bfloat16):
            return reference(leaves, target)

    mine = with_gradients(ours, leaves)
    assert all(part.dtype == torch.float32 for part in mine)
    torch.testing.assert_close(mine, with_gradients(stored, leaves), rtol=0.02, atol=2e-3)
    exact = with_gradients(lambda leaves: reference(leaves, target), leaves)
    assert not torch.equal(mine[1], exact[1])


def test_any_leading_shape_and_frozen_inputs_are_accepted():
    (x, weight, _), target = inputs(12)
    loss = linear_cross_entropy(x.view(3, 4, 5), weight.detach(), target.view(3, 4))
    loss.backward()
    assert weight.grad is None
    assert x.grad.shape == (12, 5)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(x, weight, target), loss)
    again = linear_cross_entropy(x, weight, target)
    again.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        again.backward()


def test_the_whole_logits_are_never_stored():
    """The largest intermediate tensor has the size of one chunk, or of a gradient."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, torch.Tensor):
                    self.size = max(self.size, tensor.numel())
            return result

    (x, weight, _), target = inputs(200, 4, 1000)
    with Largest() as seen:
        linear_cross_entropy(x, weight, target, chunk_size=4).backward()
    assert seen.size == 4 * 1000
    with Largest() as seen:
        reference([x, weight, None], target).backward()
    assert seen.size == 200 * 1000


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"input": torch.zeros(2, 3)}, r"`\(\.\.\., D\)`"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, "`target` has the shape"),
        ({"target": torch.zeros(2)}, "class indices"),
        ({"linear_bias": torch.zeros(3)}, "`linear_bias`"),
        ({"reduction": "none"}, "`reduction` is `none`"),
        ({"chunk_size": 0}, "`chunk_size` 0"),
        ({"label_smoothing": 2.0}, "`label_smoothing` is 2"),
    ],
)
def test_invalid_arguments_raise(change, text):
    given_ = {"input": torch.zeros(2, 4), "linear_weight": torch.zeros(5, 4), "target": torch.tensor([0, 1])}
    with pytest.raises(TrainerConfigError, match=text):
        linear_cross_entropy(**{**given_, **change})
