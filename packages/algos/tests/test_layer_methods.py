"""The layers that methods put into a model, compared with formulas written by hand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hocket.algos import (
    BlurPool,
    Factorize,
    LowPrecisionGroupNorm,
    LowPrecisionLayerNorm,
    NoEffectWarning,
    NoOpModel,
    SqueezeExcite,
    SurgeryWarning,
    apply_blurpool,
    apply_channels_last,
    apply_factorization,
    apply_fused_layernorm,
    apply_gated_linear_units,
    apply_ghost_batchnorm,
    apply_gyro_dropout,
    apply_low_precision_groupnorm,
    apply_low_precision_layernorm,
    apply_squeeze_excite,
    apply_stochastic_depth,
    freeze_layers,
)
from hocket.algos.errors import AlgorithmConfigError, SurgeryError
from hocket.trainer.callback import Callback
from hocket.trainer.event import Event
from support.methods import BasicBlock, BertIntermediate, RMSNorm, make_model, train
from support.ranks import run_ranks


def _blurred(x: torch.Tensor, stride: int) -> torch.Tensor:
    row = torch.tensor([1.0, 2.0, 1.0]) / 4
    kernel = torch.outer(row, row)[None, None]
    return torch.cat([F.conv2d(channel, kernel, stride=stride, padding=1) for channel in x.split(1, 1)], 1)


@pytest.mark.parametrize("blur_first", [True, False])
def test_blurpool_blurs_before_or_after_strided_layers(blur_first: bool) -> None:
    conv, pool = nn.Conv2d(16, 8, 3, stride=2, padding=1), nn.MaxPool2d(3, 2, 1)
    model = nn.Sequential(conv, pool)
    x = torch.randn(2, 16, 12, 12)
    unstrided = F.conv2d(x, conv.weight, conv.bias, padding=1)
    expected = conv(_blurred(x, 1)) if blur_first else _blurred(unstrided, 2)
    assert len(apply_blurpool(model, blur_first=blur_first)) == 2
    torch.testing.assert_close(model[0](x), expected)
    torch.testing.assert_close(model(x), _blurred(F.max_pool2d(expected, 3, 1, 1), 2))


def test_squeeze_excite_scales_channels_by_their_means() -> None:
    conv = nn.Conv2d(8, 8, 3)
    model: Any = nn.Sequential(conv)
    apply_squeeze_excite(model, latent_channels=0.5, min_channels=8)
    x = torch.randn(2, 8, 6, 6)
    first, second = (layer for layer in model.modules() if isinstance(layer, nn.Linear))
    assert (first.out_features, second.out_features) == (4, 8)
    convolved = conv(x)
    scales = torch.sigmoid(torch.relu(convolved.mean((2, 3)) @ first.weight.T) @ second.weight.T)
    torch.testing.assert_close(model(x), convolved * scales[:, :, None, None])


def test_ghost_batches_have_their_own_statistics() -> None:
    norm = nn.BatchNorm2d(4, momentum=0.5)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    model = nn.Sequential(norm)
    apply_ghost_batchnorm(model, ghost_batch_size=4)
    x = torch.randn(10, 4, 3, 3)
    mean, var = torch.zeros(4), torch.ones(4)
    parts = []
    for part in x.chunk(3):  # ghost batches of 4, 4 and 2 samples
        parts.append(F.batch_norm(part, None, None, norm.weight, norm.bias, True, 0.0, norm.eps))
        mean = mean.lerp(part.mean((0, 2, 3)), 0.5 / 3)
        var = var.lerp(part.var((0, 2, 3)), 0.5 / 3)
    torch.testing.assert_close(model(x), torch.cat(parts))
    torch.testing.assert_close(norm.running_mean, mean)
    torch.testing.assert_close(norm.running_var, var)
    model.eval()
    assert torch.equal(model(x), norm(x))


@pytest.mark.parametrize(("ghost", "size"), [(8, 57), (8, 9), (2, 3), (3, 5), (2, 1001)])
def test_no_ghost_batch_has_a_single_value_in_a_channel(ghost: int, size: int) -> None:
    norm: Any = nn.BatchNorm1d(4, momentum=1.0)
    model = nn.Sequential(norm)
    apply_ghost_batchnorm(model, ghost_batch_size=ghost)
    x = torch.randn(size, 4)
    parts = x.tensor_split(min(-(-size // ghost), size // 2))
    assert all(2 <= len(part) <= max(ghost, 3) for part in parts)
    expected = torch.cat([F.batch_norm(part, None, None, training=True) for part in parts])
    torch.testing.assert_close(model(x), expected)
    assert norm.num_batches_tracked == len(parts)


def test_a_ghost_batch_of_one_image_is_split_as_in_composer() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4))
    apply_ghost_batchnorm(model, ghost_batch_size=2)
    x = torch.randn(3, 4, 5, 5)
    expected = torch.cat([F.batch_norm(part, None, None, training=True) for part in (x[:2], x[2:])])
    torch.testing.assert_close(model(x), expected)


def test_factorized_layers_of_low_rank_give_the_same_outputs() -> None:
    conv, linear = nn.Conv2d(16, 16, 3), nn.Linear(16, 16)
    for layer in (conv, linear):
        thin = torch.randn(16, 3) @ torch.randn(3, layer.weight[0].numel())
        layer.weight.data.copy_(thin.view_as(layer.weight) / 16)
    model = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear)
    x = torch.randn(2, 16, 6, 6)
    expected, size = model(x), sum(one.numel() for one in model.parameters())
    report = apply_factorization(
        model, min_channels=16, min_features=16, latent_channels=3, latent_features=3, initialize="svd"
    )
    assert len(report) == 2
    assert sum(one.numel() for one in model.parameters()) < size / 2
    torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_gated_units_are_products_of_two_projections(bias: bool) -> None:
    model: Any = nn.Sequential(BertIntermediate(8, 16))
    weight, own_bias = model[0].dense.weight, model[0].dense.bias
    apply_gated_linear_units(model, act_fn=torch.relu, gated_layer_bias=bias, non_gated_layer_bias=bias)
    x = torch.randn(2, 5, 8)
    gate = torch.relu(F.linear(x, weight, own_bias if bias else None))
    torch.testing.assert_close(model(x), gate * F.linear(x, model[0].gate.weight, model[0].gate.bias))
    assert (model[0].gate.bias is not None) == bias


def test_branches_are_dropped_per_sample() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(BasicBlock(4), BasicBlock(4)).eval()
    branch = model[0](torch.zeros(64, 4, 3, 3))  # for an input of zeros, the output is the rectified branch
    apply_stochastic_depth(model, "ResNetBasicBlock", "sample", drop_rate=0.5)
    assert [block.drop_rate for block in model] == [0.25, 0.5]
    model[0].train()
    for part in model[0].modules():
        if isinstance(part, nn.BatchNorm2d):
            part.eval()
    out = model[0](torch.zeros(64, 4, 3, 3))
    is_dropped = out.flatten(1).abs().sum(1) == 0
    assert 4 <= int(is_dropped.sum()) <= 30
    torch.testing.assert_close(out[~is_dropped], branch[~is_dropped] / 0.75)
    torch.testing.assert_close(model[0].eval()(torch.zeros(64, 4, 3, 3)), branch)


@pytest.mark.parametrize("method", ["block", "sample"])
def test_a_rate_of_1_always_drops_the_branch(method: str) -> None:
    model: Any = nn.Sequential(BasicBlock(4))
    apply_stochastic_depth(model, "ResNetBasicBlock", method, drop_rate=1.0)
    x = torch.randn(8, 4, 3, 3)
    torch.testing.assert_close(model.train()(x), torch.relu(x))  # no sample is NaN from 0 / 0
    with pytest.raises(AlgorithmConfigError, match=r"`drop_rate` is 1\.1; expected a number from 0 to 1"):
        apply_stochastic_depth(model, "ResNetBasicBlock", method, drop_rate=1.1)


def test_a_dropped_branch_passes_the_previous_layers_outputs_through() -> None:
    resnet = pytest.importorskip("torchvision.models.resnet", reason="needs torchvision")
    down = nn.Sequential(nn.Conv2d(4, 16, 1))
    model: Any = nn.Sequential(resnet.Bottleneck(4, 4, downsample=down), resnet.Bottleneck(16, 4))
    apply_stochastic_depth(model, "ResNetBottleneck", drop_rate=0.5)
    x = torch.randn(2, 4, 5, 5)
    for drops in ((False, True), (True, True), (True, False)):
        for block, drop in zip(model, drops, strict=True):
            block.drop = drop
        model.zero_grad()
        model(x).square().sum().backward()
        first = torch.relu(down(x)) if drops[0] else model[0].block(x)
        second = first if drops[1] else model[1].block(first)  # rectifying twice equals rectifying once
        expected = torch.autograd.grad(second.square().sum(), down[0].weight)[0]
        torch.testing.assert_close(down[0].weight.grad, expected)


def test_channels_last_changes_strides_only() -> None:
    model: Any = make_model("convnet").eval()
    batch = (torch.randn(2, 3, 16, 16), torch.zeros(2, dtype=torch.long))
    expected, weight = model(batch), model.stem.weight
    assert apply_channels_last(model) == 6
    assert model.stem.weight is weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert model.stem(batch[0]).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model(batch), expected)
    with pytest.warns(NoEffectWarning, match="no tensor of four dims"):
        apply_channels_last(nn.Linear(2, 2))


def _train_channels_last() -> list[float]:
    return train(["ChannelsLast"], fsdp_config={})[1]


def test_channels_last_trains_sharded_on_one_rank() -> None:
    assert run_ranks(_train_channels_last, 1) == [pytest.approx(train([], kind="convnet")[1], rel=1e-4)]


@pytest.mark.parametrize("at", ["init", "after_load", Event.AFTER_LOAD])
@pytest.mark.parametrize("method", [LowPrecisionLayerNorm, LowPrecisionGroupNorm])
def test_low_precision_norms_are_put_in_at_either_event(method: Any, at: Any) -> None:
    algorithm = method(apply_at=at)
    kind: Any = "transformer" if method is LowPrecisionLayerNorm else "convnet"
    train([], kind=kind, steps=1, algorithms=[algorithm], precision="amp_bf16")
    assert len(algorithm.report) == 1
    assert repr(algorithm) == f"{method.__name__}(apply_at=Event.{Event(at).name})"
    with pytest.raises(AlgorithmConfigError, match=r"`apply_at` is 'fit_start', expected `Event\.INIT`"):
        method(apply_at="fit_start")


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", ["layer", "group"])
def test_norms_compute_in_autocasts_precision(kind: str, affine: bool) -> None:
    if kind == "layer":
        norm: Any = nn.LayerNorm(8, elementwise_affine=affine)
        apply: Any = apply_low_precision_layernorm
    else:
        norm, apply = nn.GroupNorm(2, 8, affine=affine), apply_low_precision_groupnorm
    model, x = nn.Sequential(norm), torch.randn(4, 8)
    if affine:
        nn.init.normal_(norm.weight)
    expected = norm(x)
    with pytest.warns(NoEffectWarning, match="changes nothing in the precision 'fp32'"):
        apply(model, "fp32")
    assert len(apply(model, "amp_bf16")) == 1
    assert model[0] is not norm
    assert model[0].weight is norm.weight
    torch.testing.assert_close(model(x), expected)  # without autocast
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x).dtype == torch.float32
        lowered = model(x)
    assert lowered.dtype == torch.bfloat16
    torch.testing.assert_close(lowered.float(), expected, atol=0.05, rtol=0.05)


def test_norms_written_in_python_become_torchs() -> None:
    model: Any = nn.Sequential(RMSNorm(8), nn.LayerNorm(8))
    weight = nn.init.normal_(model[0].weight)
    x = torch.randn(4, 8)
    expected = model(x)
    report = apply_fused_layernorm(model)
    assert [one.names for one in report] == [("0",)]
    assert type(model[0]) is nn.RMSNorm
    assert model[0].weight is weight
    torch.testing.assert_close(model(x), expected)


class ShiftedRMSNorm(RMSNorm):
    """A norm that multiplies by `1 + weight`, as Gemma's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.weight) / self.weight


class ConstantRMSNorm(RMSNorm):
    """A norm whose weight is not trained, as one of Falcon Mamba's."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        del self.weight
        self.register_buffer("weight", torch.ones(width))


def test_norms_that_compute_another_function_stay_with_one_warning() -> None:
    model: Any = nn.Sequential(ShiftedRMSNorm(8), RMSNorm(8), ShiftedRMSNorm(8), ConstantRMSNorm(8))
    x, before = torch.randn(4, 8), [parameter.clone() for parameter in model.parameters()]
    expected, random_state = model(x), torch.get_rng_state()
    with pytest.warns(SurgeryWarning, match="left 2 norms of class `ShiftedRMSNorm`") as caught:
        report = apply_fused_layernorm(model)
    assert len(caught) == 1
    assert [one.names for one in report] == [("1",)]
    assert {name for name, why in report.skipped.items() if why} == {"0", "2"}
    torch.testing.assert_close(model(x), expected)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(map(torch.equal, model.parameters(), before))
    with pytest.warns(SurgeryWarning, match="ShiftedRMSNorm") as caught:
        assert not apply_fused_layernorm(model[:1])
    assert len(caught) == 1


def test_layers_freeze_starting_with_the_first() -> None:
    shares = {0.4: 0, 0.5: 0, 0.75: 1, 1.0: 3}
    for duration, num_frozen in shares.items():
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
        depth, share = freeze_layers(model, None, duration, freeze_start=0.5, freeze_level=1.0)
        assert depth == num_frozen
        assert share == pytest.approx(max(0.0, 2 * duration - 1))
        trains = [layer.weight.requires_grad for layer in model]  # type: ignore[union-attr]
        assert trains == [False] * num_frozen + [True] * (4 - num_frozen)


class Weights(Callback):
    """A callback that keeps the parameters after each batch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def batch_end(self, state: Any, logger: Any) -> None:
        self.seen.append({name: one.detach().clone() for name, one in state.model.named_parameters()})


def test_frozen_layers_do_not_change_while_the_others_train() -> None:
    weights = Weights()
    train(["LayerFreezing"], callbacks_more=[weights])  # two epochs of two batches; 0.9 of the half is frozen
    first, _, second, last = weights.seen
    still = {name for name in first if torch.equal(second[name], last[name])}
    assert {"stem.weight", "norm.weight"} <= still
    assert not any(name.startswith("head") for name in still)
    assert not any(torch.equal(first[name], second[name]) for name in ("stem.weight", "head.weight"))


def test_gyro_dropout_uses_a_mask_for_a_period() -> None:
    model: Any = nn.Sequential(nn.Dropout(0.25))
    apply_gyro_dropout(model, iters_per_epoch=8, max_epoch=1, p=0.25, sigma=8, tau=4)
    layer = model[0]
    x = torch.ones(12, 1000)
    masks = [model(x) for _ in range(8)]
    assert torch.equal(model.eval()(x), x)
    for mask in masks:
        assert sorted(mask.unique().tolist()) == pytest.approx([0.0, 1 / 0.75])
        groups = mask.view(4, 3, 1000)  # each of the 4 masks is used for 3 samples
        assert torch.equal(groups, groups[:, :1].expand(-1, 3, -1))
        assert not torch.equal(groups[0], groups[1])
        assert float((mask == 0).float().mean()) == pytest.approx(0.25, abs=0.03)
    period = layer.period
    assert period == 4
    assert all(torch.equal(mask, masks[number // period * period]) for number, mask in enumerate(masks))
    assert not torch.equal(masks[0], masks[period])


def test_noopmodel_replaces_the_model() -> None:
    seen: list[Any] = []

    def look(trainer: Any) -> None:
        seen.append((trainer.state.model, trainer.state.optimizers[0].param_groups[0]["params"]))

    _, losses = train(["NoOpModel"], look=look)
    model, parameters = seen[0]
    assert losses == [0.0] * 4
    assert [one.numel() for one in model.parameters()] == [1]
    assert parameters[0] is next(iter(model.parameters()))
    assert len(parameters) == 1


def test_noopmodel_takes_any_number_of_parameter_groups() -> None:
    model: Any = make_model("convnet")
    groups = [{"params": [("stem.weight", model.stem.weight)]}, {"params": [("stem.bias", model.stem.bias)]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)  # type: ignore[arg-type]
    state: Any = SimpleNamespace(
        model=model, optimizers=[optimizer, torch.optim.SGD(model.head.parameters())]
    )
    NoOpModel().apply(Event.INIT, state, None)  # type: ignore[arg-type]
    state.model(None).backward()
    for one in state.optimizers:
        one.step()
    first, second = optimizer.param_groups
    assert first["param_names"] == ["weight"]
    assert [one.numel() for one in first["params"]] == [1]
    assert second["params"] == second["param_names"] == []
    assert state.optimizers[1].param_groups[0]["params"] == []


@pytest.mark.parametrize(
    ("norms", "reason"),
    [
        ([nn.LayerNorm(4), nn.LayerNorm(4)], r"its norms \(2\) are torch's own, which are fused already"),
        ([nn.RMSNorm(4)], r"its norms \(1\) are torch's own"),
        ([nn.Linear(4, 4)], "the model has no hand-written norm"),
        ([nn.BatchNorm1d(4)], "the model has no hand-written norm"),
    ],
)
def test_a_model_without_norms_to_fuse_is_told_so_in_its_own_words(
    norms: list[nn.Module], reason: str
) -> None:
    model = nn.Sequential(*norms)
    with pytest.warns(NoEffectWarning, match=reason) as told:
        assert not apply_fused_layernorm(model)
    assert "_NoNorm" not in str(told[0].message)
    with pytest.raises(SurgeryError, match=reason):
        apply_fused_layernorm(model, if_none="error")
    apply_fused_layernorm(model, if_none="ignore")


@pytest.mark.parametrize("size", [math.nan, -1, True])
@pytest.mark.parametrize(
    ("method", "name"),
    [
        (BlurPool, "min_channels"),
        (apply_blurpool, "min_channels"),
        (SqueezeExcite, "min_channels"),
        (apply_squeeze_excite, "min_channels"),
        (Factorize, "min_channels"),
        (Factorize, "min_features"),
        (apply_factorization, "min_channels"),
        (apply_factorization, "min_features"),
    ],
)
def test_a_least_size_that_is_no_number_from_zero_on_is_refused(method: Any, name: str, size: float) -> None:
    given = [] if isinstance(method, type) else [nn.Linear(2, 2)]
    with pytest.raises(AlgorithmConfigError, match=f"`{name}` is {size}; expected a number from 0 on"):
        method(*given, **{name: size})
