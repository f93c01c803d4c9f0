"""Gradient clipping by its definitions, on plain parameters and on shards."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from hocket.algos import AlgorithmConfigError, GradientClipping, IncompatibleError, apply_gradient_clipping
from hocket.trainer.callbacks import GradNormMonitor
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.event import Event
from hocket.trainer.loggers import InMemoryLogger
from support.methods import train
from support.ranks import run_ranks

SETTINGS = [("norm", 0.5), ("value", 0.05), ("adaptive", 0.02), ("adaptive", 1e6)]


def _model() -> nn.Module:
    torch.manual_seed(5)
    # Rows that no number of ranks divides, a convolution, and a vector longer than 1.
    return nn.Sequential(nn.Conv1d(3, 5, 2), nn.Flatten(), nn.Linear(15, 7), nn.GELU(), nn.Linear(7, 2))


def _backward(model: nn.Module) -> None:
    torch.manual_seed(6)
    model(torch.randn(8, 3, 4)).square().sum().backward()


def _clipped(settings: tuple[str, float]) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    model = _model()
    _backward(model)
    kind, threshold = settings
    norm = apply_gradient_clipping(model, kind, clipping_threshold=threshold)
    return [parameter.grad for parameter in model.parameters()], norm


def test_clipping_by_norm_bounds_the_joint_norm() -> None:
    gradients, norm = _clipped(("norm", 0.5))
    assert norm > 0.5
    total = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    torch.testing.assert_close(total, torch.tensor(0.5), rtol=1e-5, atol=0)


def test_clipping_by_value_bounds_each_number() -> None:
    before = _clipped(("value", 1e9))[0]
    after, norm = _clipped(("value", 0.05))
    assert norm is None
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old.clamp(-0.05, 0.05))
    assert any((old != new).any() for old, new in zip(before, after, strict=True))


def test_adaptive_clipping_bounds_each_unit_by_its_weights() -> None:
    # One row at a time, by the definition.
    before, after = _clipped(("adaptive", 1e6))[0], _clipped(("adaptive", 0.02))[0]
    clipped = 0
    for parameter, old, new in zip(_model().parameters(), before, after, strict=True):
        units = zip(parameter, old, new, strict=True) if parameter.ndim > 1 else [(parameter, old, new)]
        for weight, gradient, result in units:
            most = 0.02 * max(weight.norm().item(), 1e-3)
            scale = min(1.0, most / gradient.norm().item())
            clipped += scale < 1
            torch.testing.assert_close(result, gradient * scale)
    assert clipped > 0


def test_parameters_without_gradients_are_skipped() -> None:
    for kind, threshold in SETTINGS:
        frozen, free = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        free.grad = torch.full((3,), 100.0)
        apply_gradient_clipping([frozen, free], kind, clipping_threshold=threshold)
        assert frozen.grad is None


def _clip_shards() -> list[tuple[list[torch.Tensor], Any]]:
    results = []
    for kind, threshold in SETTINGS:
        model = _model()
        fully_shard(model[2])
        fully_shard(model, ignored_params={model[4].bias})  # one parameter stays whole
        _backward(model)  # the batch is the same on every rank, so the average is the plain gradient
        norm = apply_gradient_clipping(model, kind, clipping_threshold=threshold)
        gradients = [
            getattr(one.grad, "full_tensor", lambda one=one: one.grad)() for one in model.parameters()
        ]
        results.append((gradients, None if norm is None else (type(norm).__name__, norm.item())))
    return results


def test_shards_are_clipped_as_whole_parameters() -> None:
    expected = [_clipped(settings) for settings in SETTINGS]
    for results in run_ranks(_clip_shards, 3, init="gloo", timeout_s=90):
        for (gradients, norm), (whole, whole_norm) in zip(results, expected, strict=True):
            for gradient, reference in zip(gradients, whole, strict=True):
                torch.testing.assert_close(gradient, reference)
            if norm is not None:
                assert norm == ("Tensor", pytest.approx(whole_norm.item(), rel=1e-6))


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Make one group for the module, because torch's caches keep the first mesh and its sockets."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_units_split_over_ranks_raise(one_rank: None) -> None:
    weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (1,)), [Shard(1)]))
    weight.grad = weight.detach() * 100
    with pytest.raises(IncompatibleError, match=r"laid out as .*1.* Clip by 'norm' instead"):
        apply_gradient_clipping([weight], "adaptive", clipping_threshold=0.01)
    assert weight.grad.to_local().max() == 100


def test_gradients_that_a_kind_cannot_clip_raise() -> None:
    embed = nn.Embedding(4, 2, sparse=True)
    embed(torch.tensor([1])).sum().backward()
    with pytest.raises(IncompatibleError, match=r"shape \(4, 2\) has a sparse one"):
        apply_gradient_clipping(embed, "adaptive", clipping_threshold=0.01)
    model = nn.Linear(2, 2, dtype=torch.complex64)
    model(torch.ones(1, 2, dtype=torch.complex64)).abs().sum().backward()
    with pytest.raises(TrainerConfigError, match="the gradient of `weight` is complex"):
        apply_gradient_clipping(model, "value", clipping_threshold=0.01)


@pytest.mark.parametrize(
    ("kind", "threshold", "message"),
    [
        ("nrom", 1.0, "`clipping_type` is 'nrom'; expected one of `norm`, `value`, `adaptive`"),
        ("norm", 0.0, "`clipping_threshold` is 0.0"),
        ("norm", float("nan"), "`clipping_threshold` is nan"),
        ("value", "1", "`clipping_threshold` is '1'"),
    ],
)
def test_wrong_arguments_are_named(kind: Any, threshold: Any, message: str) -> None:
    with pytest.raises(AlgorithmConfigError, match=message):
        GradientClipping(kind, threshold)
    with pytest.raises(AlgorithmConfigError, match=message):
        apply_gradient_clipping([], kind, clipping_threshold=threshold)


def test_norm_is_the_default_and_the_threshold_is_required() -> None:
    assert repr(GradientClipping(clipping_threshold=1.0)) == (
        "GradientClipping(clipping_type='norm', clipping_threshold=1.0)"
    )
    with pytest.raises(AlgorithmConfigError, match="`clipping_threshold` is None"):
        GradientClipping("norm")


def test_clipping_runs_at_an_event_at_which_gradients_are_summed() -> None:
    algorithm = GradientClipping("norm", 1.0)
    assert GradientClipping.events == {Event.AFTER_TRAIN_BATCH}
    assert [event for event in Event if algorithm.match(event, None)] == [Event.AFTER_TRAIN_BATCH]


def test_the_norm_before_clipping_is_logged_beside_that_of_the_update() -> None:
    memory = InMemoryLogger()
    train(["GradientClipping"], kind="text", loggers=memory, callbacks_more=[GradNormMonitor()])
    before, after = (
        [norm for _, norm in memory.data[f"l2_norm/grad/{name}"]] for name in ("before_clipping", "global")
    )
    assert min(before) > 0.05
    assert after == pytest.approx([0.05] * len(before), rel=1e-3)
