"""Sharding gives optimizers the shards, and frees the whole parameters that they were built with."""

import contextlib
import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from hocket.dist import FSDPParallelism, WrapError, provide
from hocket.trainer import Trainer
from hocket.trainer.optim import DecoupledAdamW
from support.live_bytes import LiveBytes
from support.standing_ranks import StandingRanks

WIDTH, LAYERS = 32, 16
WHOLE = LAYERS * WIDTH * WIDTH * 4


def _model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def _shard_first() -> None:
    """Build the optimizer after sharding, as torch's tutorial does."""
    model = _model()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.optim.AdamW(model.parameters())


def _lay_out() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    with provide({}, device="cpu", timeout_s=30) as parallelism:
        parallelism.lay_out(model, [optimizer])


def _make_trainer() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    Trainer(
        model=model,
        loss_fn=nn.functional.mse_loss,
        optimizers=optimizer,
        fsdp_config={},
        device="cpu",
        progress_bar=False,
        max_duration="1ba",
    ).close()


def _lay_out_with_state() -> None:
    """Shard a trained model, whose parameters and two moments are three whole copies at first."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with provide({}, device="cpu", timeout_s=30) as parallelism, LiveBytes() as meter:
        parallelism.lay_out(model, [optimizer])
    assert meter.peak <= 1.5 * WHOLE + 2 * WHOLE / LAYERS  # only the shards are new memory


def _peaks() -> list[float]:
    """Return the peak bytes of live tensors, in multiples of the whole model."""
    peaks = []
    for start in (_shard_first, _lay_out, _make_trainer):
        with LiveBytes() as meter:
            start()
        peaks.append(meter.peak / WHOLE)
    _lay_out_with_state()
    return peaks


def test_sharding_holds_one_whole_model_at_most(two_ranks: StandingRanks) -> None:
    for shard_first, lay_out, trainer in two_ranks.run(_peaks):
        assert 1.0 < shard_first < 1.1
        assert lay_out == pytest.approx(shard_first, abs=0.05)
        assert trainer == pytest.approx(shard_first, abs=0.05)


@pytest.mark.parametrize(
    ("config", "error"), [({}, WrapError), ({"initial_weights": "absent"}, Exception)], ids=["wrap", "values"]
)
def test_an_optimizer_has_the_models_parameters_after_a_failed_start(
    one_rank: None, config: dict[str, Any], error: type[Exception]
) -> None:
    model = _model()
    if error is WrapError:
        model.fsdp_wrap_fn = lambda module: False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with provide(config, device="cpu", timeout_s=10) as parallelism, pytest.raises(error):
        parallelism.lay_out(model, [optimizer])
    assert [id(one) for one in optimizer.param_groups[0]["params"]] == [id(one) for one in model.parameters()]


def test_lbfgs_which_keeps_its_list_of_parameters_steps_the_shards(one_rank: None) -> None:
    """L-BFGS steps the list of parameters that its first group had when it was made."""
    torch.manual_seed(0)
    model, twin = _model()[:2], _model()[:2]
    twin.load_state_dict(model.state_dict())
    with provide({}, device="cpu", timeout_s=10) as parallelism:
        assert isinstance(parallelism, FSDPParallelism)
        for each in (model, twin):
            optimizer = torch.optim.LBFGS(each.parameters(), lr=0.1, max_iter=2)
            if each is model:
                parallelism.lay_out(model, [optimizer])

            def close(each: nn.Module = each, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = each(torch.ones(2, WIDTH)).square().mean()
                loss.backward()
                return loss

            optimizer.step(close)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other)


@pytest.mark.parametrize("kernels", [{"foreach": True}, {"fused": True}])
def test_a_group_with_shards_and_scalars_steps_with_any_kernels(one_rank: None, kernels: dict) -> None:
    values = []
    for config in ({}, None):
        torch.manual_seed(0)
        model = _model()
        model.scale = nn.Parameter(torch.tensor(2.0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **kernels)
        with provide(config, device="cpu", timeout_s=10) as parallelism:
            parallelism.lay_out(model, [optimizer])
            (model(torch.ones(2, model[0].in_features)).sum() * model.scale).backward()
            optimizer.step()
        values.append([getattr(one, "full_tensor", lambda one=one: one)() for one in model.parameters()])
    torch.testing.assert_close(*values)


OPTIMIZERS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adam": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "Adamax": (torch.optim.Adamax, {}),
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW, foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
}


def _values(one: Any) -> torch.Tensor:
    return (one.full_tensor() if isinstance(one, DTensor) else torch.as_tensor(one)).detach().clone()


def _steps(kind: str, is_laid_out: bool) -> list[torch.Tensor]:
    """Return the parameters and the state after three steps, of which the last one follows a new state."""
    torch.manual_seed(0)
    model, (make, options) = _model()[:2], OPTIMIZERS[kind]
    optimizer = make(model.parameters(), lr=0.1, **options)
    with contextlib.ExitStack() as stack:
        if is_laid_out:
            stack.enter_context(provide({}, device="cpu", timeout_s=30)).lay_out(model, [optimizer])
        for step in range(3):
            model(torch.arange(1.0, 1 + WIDTH).view(1, WIDTH) - 7 * step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        slots = [(one, value) for one in model.parameters() for value in optimizer.state[one].values()]
        for one, value in slots:
            assert isinstance(value, DTensor) == (is_laid_out and value.shape == one.shape), kind
        return [_values(one) for one in (*model.parameters(), *(value for _, value in slots))]


def _all_steps(is_laid_out: bool) -> dict[str, list[torch.Tensor]]:
    return {kind: _steps(kind, is_laid_out) for kind in OPTIMIZERS}


def test_torchs_optimizers_step_shards_as_whole_parameters_in_every_bit(two_ranks: StandingRanks) -> None:
    alone = _all_steps(False)
    for found in two_ranks.run(_all_steps, True):
        for kind, values in found.items():
            for value, other in zip(values, alone[kind], strict=True):
                assert torch.equal(value, other), kind


def test_a_gradient_of_another_layout_is_stepped_by_torch(one_rank: None) -> None:
    torch.manual_seed(0)
    model, twin = _model()[:1], _model()[:1]
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, twin)]
    with provide({}, device="cpu", timeout_s=10) as parallelism:
        parallelism.lay_out(model, optimizers[:1])
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            other.grad = torch.randn_like(other)
            parameter.grad = distribute_tensor(other.grad, parameter.device_mesh, [Replicate()])
        for optimizer in optimizers:
            optimizer.step()
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(parameter.full_tensor(), other)


class OwnAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OwnDecoupledAdamW(DecoupledAdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [OwnAdamW, OwnDecoupledAdamW])
def test_a_step_of_ones_own_gets_whole_dtensors_one_by_one(one_rank: None, kind: type[Any]) -> None:
    """What it computes with shards is not known, and kernels for lists take no shards beside scalars."""
    model = _model()
    model.scale = nn.Parameter(torch.tensor(2.0))
    with provide({}, device="cpu", timeout_s=10) as parallelism:
        optimizers = [one(model.parameters(), lr=0.1) for one in (kind, kind.__base__)]
        parallelism.lay_out(model, optimizers)
        assert "_init_group" not in vars(optimizers[0])
        assert [one.param_groups[0]["foreach"] for one in optimizers] == [False, None]


@pytest.mark.parametrize("kernels", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_a_whole_state_of_a_shard_is_refused_by_torch(one_rank: None, kernels: dict[str, Any]) -> None:
    """A fused kernel would take a part of it without a word."""
    model = _model()[:1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **kernels)
    with provide({}, device="cpu", timeout_s=10) as parallelism:
        parallelism.lay_out(model, [optimizer])
        (parameter,) = model.parameters()
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.state[parameter]["exp_avg"] = optimizer.state[parameter]["exp_avg"].full_tensor()
        with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
            optimizer.step()


def test_an_optimizer_is_freed_at_once(one_rank: None) -> None:
    model = _model()[:1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with provide({}, device="cpu", timeout_s=10) as parallelism:
        parallelism.lay_out(model, [optimizer])
        (parameter,) = model.parameters()
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        moment = weakref.ref(optimizer.state[parameter]["exp_avg"])
        gc.disable()
        try:
            del optimizer
            assert moment() is None
        finally:
            gc.enable()
