"""Optimizers against the papers' formulas, torch's kernels and torch's states."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.optim import (
    CosineAnnealingScheduler,
    DecoupledAdamW,
    DecoupledSGDW,
    Muon,
    embeddings,
    muon_with_adamw,
    norms_and_biases,
    param_groups,
)
from support.ranks import run_ranks
from support.training import FileStore, Net, make, parameters

KERNELS = {
    "default": {},
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
SHAPES = [(3, 4), (5,), (2, 3, 2)]


def draw(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


def run(optimizer, params, rates, *, seed=1):
    """Make steps with the gradients of a seed and the given learning rates."""
    for step, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for param, grad in zip(params, draw(100 * seed + step), strict=True):
            param.grad = grad.to(param.dtype)
        optimizer.step()
    return [param.detach().clone() for param in params]


def adamw_by_formula(weights, rates, *, initial, betas, eps, decay, amsgrad, seed=1):
    m, v, top = ([torch.zeros_like(w) for w in weights] for _ in range(3))
    weights = [w.clone() for w in weights]
    for t, rate in enumerate(rates, 1):
        for i, g in enumerate(draw(100 * seed + t - 1)):
            weights[i] -= rate / initial * decay * weights[i]
            m[i] = betas[0] * m[i] + (1 - betas[0]) * g
            v[i] = betas[1] * v[i] + (1 - betas[1]) * g * g
            top[i] = torch.maximum(top[i], v[i])
            second = (top[i] if amsgrad else v[i]) / (1 - betas[1] ** t)
            weights[i] -= rate * (m[i] / (1 - betas[0] ** t)) / (second.sqrt() + eps)
    return weights


def sgdw_by_formula(weights, rates, *, initial, momentum, dampening, nesterov, decay, seed=1):
    weights, buffers = [w.clone() for w in weights], [None] * len(weights)
    for t, rate in enumerate(rates):
        for i, g in enumerate(draw(100 * seed + t)):
            weights[i] *= 1 - rate / initial * decay
            if momentum:
                buffers[i] = g.clone() if buffers[i] is None else momentum * buffers[i] + (1 - dampening) * g
                g = g + momentum * buffers[i] if nesterov else buffers[i]
            weights[i] -= rate * g
    return weights


rate_lists = st.lists(st.floats(0.0, 0.1), min_size=1, max_size=6)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("amsgrad", [False, True])
@settings(max_examples=8, deadline=None)
@given(rates=rate_lists, decay=st.floats(0.0, 9e-4), beta=st.floats(0.0, 0.99))
def test_adamw_equals_the_papers_formula(kernel, amsgrad, rates, decay, beta):
    options = {"betas": (beta, 0.95), "eps": 1e-8, "amsgrad": amsgrad}
    params = [nn.Parameter(w) for w in draw(0)]
    optimizer = DecoupledAdamW(params, lr=0.1, weight_decay=decay, **options, **KERNELS[kernel])
    expected = adamw_by_formula(draw(0), rates, initial=0.1, decay=decay, **options)
    torch.testing.assert_close(run(optimizer, params, rates), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=8, deadline=None)
@given(
    rates=rate_lists,
    decay=st.floats(0.0, 9e-4),
    momentum=st.tuples(st.sampled_from([0.0, 0.9]), st.sampled_from([0.0, 0.3])),
    nesterov=st.booleans(),
)
def test_sgdw_equals_the_papers_formula(kernel, rates, decay, momentum, nesterov):
    momentum, dampening = momentum
    nesterov = nesterov and momentum > 0 and dampening == 0
    options = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
    params = [nn.Parameter(w) for w in draw(0)]
    optimizer = DecoupledSGDW(params, lr=0.1, weight_decay=decay, **options, **KERNELS[kernel])
    expected = sgdw_by_formula(draw(0), rates, initial=0.1, decay=decay, **options)
    torch.testing.assert_close(run(optimizer, params, rates), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
def test_at_a_constant_rate_both_equal_torchs_optimizers(kernel):
    def parameters():
        return [nn.Parameter(w) for w in draw(0, torch.float32)]

    rates, options = [0.01] * 5, KERNELS[kernel]
    ours, theirs = parameters(), parameters()
    first = run(DecoupledAdamW(ours, 0.01, weight_decay=1e-4, **options), ours, rates)
    second = run(AdamW(theirs, 0.01, (0.9, 0.95), weight_decay=1e-2, **options), theirs, rates)
    torch.testing.assert_close(first, second)
    ours, theirs = parameters(), parameters()
    first = run(DecoupledSGDW(ours, 0.01, 0.9, **options), ours, rates)
    second = run(SGD(theirs, 0.01, 0.9, **options), theirs, rates)
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kernel", ["loop", "foreach", "fused"])
def test_steps_are_counted_in_torchs_dtype_whatever_the_default_dtype(kernel, default):
    kept = torch.get_default_dtype()
    steps = []
    for optimizer in (DecoupledAdamW, AdamW):
        parameters = [nn.Parameter(w) for w in draw(0, torch.float32)]
        torch.set_default_dtype(default)
        try:
            made = optimizer(parameters, 0.01, **KERNELS[kernel])
            run(made, parameters, [0.01])
        finally:
            torch.set_default_dtype(kept)
        steps.append([(state["step"].dtype, int(state["step"])) for state in made.state.values()])
    assert steps[0] == steps[1]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", ["adamw", "sgdw"])
def test_states_are_interchangeable_with_torchs_bit_for_bit(kind, kernel):
    def ours(params):
        if kind == "adamw":
            return DecoupledAdamW(params, lr=0.1, amsgrad=True, **KERNELS[kernel])
        return DecoupledSGDW(params, lr=0.1, momentum=0.9, weight_decay=1e-4, **KERNELS[kernel])

    params = [nn.Parameter(w) for w in draw(0)]
    optimizer = ours(params)
    run(optimizer, params, [0.1, 0.05])
    stored, weights = copy.deepcopy(optimizer.state_dict()), [param.detach().clone() for param in params]
    whole = run(optimizer, params, [0.02, 0.0, 0.1], seed=2)

    torchs = AdamW(weights, amsgrad=True) if kind == "adamw" else SGD(weights, momentum=0.9)
    torchs.load_state_dict(stored)  # torch's optimizer loads the state, and returns it
    params = [nn.Parameter(w.clone()) for w in weights]
    resumed = ours(params)
    resumed.load_state_dict(torchs.state_dict())
    assert [group["initial_lr"] for group in resumed.param_groups] == [0.1]
    assert all(map(torch.equal, run(resumed, params, [0.02, 0.0, 0.1], seed=2), whole))

    copied = pickle.loads(pickle.dumps(resumed))
    assert copied.param_groups[0]["initial_lr"] == 0.1
    assert type(copied) is type(resumed)


def test_hooks_are_called_once_a_step():
    AdamW([torch.zeros(1)])  # torch's optimizer patches the base class's `step`, too
    calls = []
    params = [nn.Parameter(w) for w in draw(0)]
    optimizer = DecoupledAdamW(params)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    run(optimizer, params, [0.1])
    assert calls == ["pre", "post"]


@pytest.mark.parametrize("make_optimizer", [DecoupledAdamW, lambda p: DecoupledSGDW(p, 0.1)])
def test_a_closure_is_called_and_its_loss_returned(make_optimizer):
    param = nn.Parameter(torch.ones(2))
    optimizer = make_optimizer([param])

    def closure():
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 2.0
    assert float(param.detach().sum()) < 2.0


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", [DecoupledAdamW, DecoupledSGDW])
def test_a_step_with_found_inf_changes_nothing(kind, kernel):
    params = [nn.Parameter(w) for w in draw(0, torch.float32)]
    optimizer = kind(params, lr=0.1, weight_decay=9e-4, **KERNELS[kernel])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(value):
        for param in params:
            param.grad = torch.full_like(param, value) * 4.0
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        return [param.detach().clone() for param in params]

    before = [param.detach().clone() for param in params]
    assert all(map(torch.equal, step(float("inf")), before))
    assert scaler.get_scale() == 2.0
    after = step(0.5)
    assert not any(map(torch.equal, after, before))


def test_groups_added_later_and_rates_of_zero():
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = DecoupledAdamW([first], lr=0.1, weight_decay=5e-4)
    optimizer.add_param_group({"params": [second], "lr": 0.0})
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.1, 0.0]
    first.grad = second.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(second.detach(), torch.ones(2))
    assert not torch.equal(first.detach(), torch.ones(2))


def test_invalid_arguments_raise_and_unusual_ones_warn():
    with pytest.warns(UserWarning, match="1.00% of each weight"):
        DecoupledAdamW([torch.zeros(1)], weight_decay=1e-2)
    with pytest.warns(UserWarning, match="`DecoupledSGDW`"):
        DecoupledSGDW([torch.zeros(1)], 0.1, weight_decay=1e-3)
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    for optimizer in (DecoupledAdamW(table.parameters()), DecoupledSGDW(table.parameters(), 0.1)):
        with pytest.raises(TrainerConfigError, match="sparse=False"):
            optimizer.step()


def test_update_norms_are_those_of_the_parameters_change():
    params = [nn.Parameter(w) for w in draw(0)]
    optimizer = DecoupledAdamW(params, lr=0.1, weight_decay=5e-4)
    assert optimizer.report_per_parameter_metrics(params[0], "w", {}) == {}
    run(optimizer, params, [0.1, 0.07])
    for param in params:
        metrics = optimizer.report_per_parameter_metrics(param, "w", {"other": 1})
        assert metrics.pop("other") == 1
        assert set(metrics) == {f"l2_norm/{kind}/w" for kind in ("moment", "param", "update", "grad")}
        assert metrics["l2_norm/param/w"] == pytest.approx(float(param.detach().norm()))
        assert metrics["l2_norm/grad/w"] == pytest.approx(float(param.grad.norm()))
    # With almost no weight decay, the update equals the change of the parameters.
    optimizer = DecoupledAdamW(params, lr=0.1, weight_decay=0.0)
    run(optimizer, params, [0.1])
    before = [param.detach().clone() for param in params]
    run(optimizer, params, [0.05], seed=3)
    for param, old in zip(params, before, strict=True):
        metrics = optimizer.report_per_parameter_metrics(param, "w", {})
        assert metrics["l2_norm/update/w"] == pytest.approx(float((param - old).detach().norm()), rel=1e-6)


class Language(nn.Module):
    """A small language model whose head is separate or tied to the embedding."""

    def __init__(self, *, tied=False):
        super().__init__()
        self.wte = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2))
        self.conv = nn.Conv1d(4, 4, 3)
        self.lm_head = nn.Linear(4, 7, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


def test_parameter_groups_are_chosen_by_pattern():
    model = Language()
    names = {parameter: name for name, parameter in model.named_parameters()}
    rules = {norms_and_biases: {"weight_decay": 0.0}, "blocks.1.*": {"lr": 0.5}, embeddings: {"lr": 0.25}}
    groups = param_groups(model, rules, default={"weight_decay": 0.2})
    listed = [[names[parameter] for parameter in group["params"]] for group in groups]
    assert listed == [
        ["blocks.0.1.weight", "conv.weight", "lm_head.weight"],
        [
            "blocks.0.0.weight",
            "blocks.0.0.bias",
            "blocks.0.1.bias",
            "blocks.1.0.weight",
            "blocks.1.0.bias",
            "blocks.1.1.bias",
            "conv.bias",
        ],
        ["blocks.1.1.weight"],
        ["wte.weight"],
    ]
    optimizer = AdamW(groups, lr=0.1, weight_decay=0.1)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (0.1, 0.2),
        (0.1, 0.0),
        (0.5, 0.1),
        (0.25, 0.1),
    ]
    assert [len(group["params"]) for group in param_groups(model, {"*": {}})] == [len(names)]


@settings(max_examples=30, deadline=None)
@given(
    patterns=st.lists(st.sampled_from(["*", "*bias", "wte*", "blocks.?.0.*", "conv.weight"]), unique=True),
    tied=st.booleans(),
)
def test_every_parameter_is_in_one_group(patterns, tied):
    model = Language(tied=tied)
    groups = param_groups(model, {pattern: {} for pattern in patterns})
    together = list(itertools.chain.from_iterable(group["params"] for group in groups))
    assert len(together) == len(set(together))
    assert set(together) == set(model.parameters())


def test_patterns_that_match_nothing_raise():
    with pytest.raises(TrainerConfigError, match=r"`bloks.0.1.weight` .*such as `blocks.0.1.weight`"):
        param_groups(Language(), {"bloks.0.1.weight": {}})
    with pytest.raises(TrainerConfigError, match="`embeddings` selects no"):
        param_groups(nn.Linear(2, 2), {embeddings: {}})


@pytest.mark.parametrize("tied", [False, True])
def test_muon_gets_the_hidden_matrices_only(tied):
    model = Language(tied=tied)
    muon, adamw = muon_with_adamw(model, lr=0.02, weight_decay=0.05)
    assert muon.param_groups[0]["params"] == [model.blocks[0][1].weight, model.blocks[1][1].weight]
    decayed, others = adamw.param_groups
    assert decayed["params"] == [
        model.wte.weight,
        model.conv.weight,
        *([] if tied else [model.lm_head.weight]),
    ]
    assert (decayed["weight_decay"], others["weight_decay"], others["lr"]) == (0.05, 0.0, 0.02)
    assert all(parameter.dim() == 1 for parameter in others["params"])
    with pytest.raises(TrainerConfigError, match="no matrix for Muon"):
        muon_with_adamw(nn.Embedding(3, 4))
    (alone,) = muon_with_adamw(nn.Linear(3, 4, bias=False))
    assert type(alone) is Muon


def test_muon_and_adamw_train_and_resume(tmp_path):
    def trainer(**arguments):
        model = Net()
        return make(
            model=model,
            optimizers=muon_with_adamw(model, 0.02),
            schedulers=CosineAnnealingScheduler("10ba"),
            **arguments,
        )

    with trainer(max_duration="8ba") as whole:
        whole.fit()
        rates = [group["lr"] for optimizer in whole.state.optimizers for group in optimizer.param_groups]
        assert rates == pytest.approx([0.01 * (1 + math.cos(0.7 * math.pi))] * 2)
    with trainer(max_duration="3ba", checkpointing={"store": FileStore(tmp_path)}) as first:
        first.fit()
    with trainer(max_duration="8ba", checkpointing={"store": FileStore(tmp_path)}, autoresume=True) as second:
        second.fit()
    torch.testing.assert_close(parameters(second), parameters(whole), rtol=0, atol=0)


def sharded_steps(kind):
    """Step a sharded and a whole model, and check that they are equal."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def optimizers(model):
        if kind == "muon":
            return muon_with_adamw(model, 0.02)
        if kind == "adamw":
            return [DecoupledAdamW(model.parameters(), 0.01, weight_decay=5e-4)]
        return [DecoupledSGDW(model.parameters(), 0.01, 0.9, weight_decay=5e-4)]

    whole, sharded = build(), build()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    both = [(whole, optimizers(whole)), (sharded, optimizers(sharded))]
    generator = torch.Generator().manual_seed(1)
    norms = []
    for _ in range(3):
        x = torch.randn(4, 6, generator=generator)
        for model, several in both:
            model(x).square().mean().backward()
            for optimizer in several:
                optimizer.step()
            if kind == "adamw":
                name, param = next(iter(model.named_parameters()))
                metrics = several[0].report_per_parameter_metrics(param, name, {})
                norms.append({key: float(norm) for key, norm in metrics.items()})
            for optimizer in several:
                optimizer.zero_grad()
    for own, part in zip(whole.parameters(), sharded.parameters(), strict=True):
        tolerance = {"rtol": 0.02, "atol": 1e-3} if kind == "muon" else {}
        torch.testing.assert_close(part.full_tensor(), own, **tolerance)
    for mine, of_shards in zip(norms[::2], norms[1::2], strict=True):
        assert of_shards == pytest.approx(mine, rel=1e-4)
    state = next(iter(both[1][1][0].state.values()))
    return type(state["exp_avg" if kind == "adamw" else "momentum_buffer"]).__name__


def every_kind_sharded():
    return [sharded_steps(kind) for kind in ("adamw", "sgdw", "muon")]


def test_every_optimizer_steps_sharded_parameters_as_whole_ones():
    assert run_ranks(every_kind_sharded, 2, init="gloo") == [["DTensor"] * 3] * 2
