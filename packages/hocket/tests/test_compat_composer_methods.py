"""`composer.algorithms.<method>`: layers and optimizers that scripts create themselves."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hocket.algos.alibi import AlibiAttention
from hocket.algos.errors import SurgeryError
from hocket.compat.composer import algorithms, functional, methods
from hocket.compat.composer.methods import SAMOptimizer, apply_blurpool, policy_registry
from hocket.compat.composer.models import ComposerClassifier
from hocket.compat.composer.optim import LinearScheduler
from hocket.compat.composer.trainer import Trainer
from hocket.trainer import Callback
from hocket.trainer.errors import TrainerConfigError


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(8, 4, generator=generator), torch.arange(8) % 3


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    inputs, targets = batch()

    def closure() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(optimizer.step(closure).item())
    return losses


def test_sam_optimizer_uses_the_gradient_at_the_ascended_point():
    torch.manual_seed(3)
    model = nn.Linear(4, 3)
    expected, inputs = copy.deepcopy(model), batch()[0]
    loss = nn.functional.cross_entropy(expected(inputs), batch()[1])
    gradients = torch.autograd.grad(loss, list(expected.parameters()))
    norm = torch.cat([one.flatten() for one in gradients]).norm()
    worst = copy.deepcopy(expected)
    with torch.no_grad():
        for parameter, gradient in zip(worst.parameters(), gradients, strict=True):
            parameter += 0.5 * gradient / norm
    there = torch.autograd.grad(
        nn.functional.cross_entropy(worst(inputs), batch()[1]), list(worst.parameters())
    )
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = SAMOptimizer(base, rho=0.5)
    assert optimizer.param_groups is base.param_groups
    assert train(model, optimizer, 1) == [loss.item()]
    for parameter, before, gradient in zip(model.parameters(), expected.parameters(), there, strict=True):
        torch.testing.assert_close(parameter, before - 0.1 * gradient)


def test_sam_optimizer_makes_plain_steps_between_intervals_and_needs_a_closure():
    torch.manual_seed(3)
    model = nn.Linear(4, 3)
    plain = copy.deepcopy(model)
    sam = SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, interval=3)
    assert train(model, sam, 2) == train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 2)
    torch.testing.assert_close(model.weight, plain.weight, rtol=0, atol=0)
    train(model, sam, 1)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 1)
    assert not torch.equal(model.weight, plain.weight)
    with pytest.raises(TrainerConfigError, match="needs a closure"):
        sam.step()
    with pytest.raises(TrainerConfigError, match="`interval` 0"):
        SAMOptimizer(torch.optim.SGD(model.parameters()), interval=0)


def test_blur_layers_are_drop_in_replacements_for_torchs():
    image = torch.randn(2, 16, 7, 8)
    for stride, blur_first in ((1, True), (2, True), (2, False)):
        settings = {"kernel_size": 3, "stride": stride, "padding": 1}
        blurred = methods.BlurConv2d(16, 4, **settings, blur_first=blur_first)
        assert blurred(image).shape == nn.Conv2d(16, 4, **settings)(image).shape
    conv = nn.Conv2d(16, 4, 3, stride=2)
    around = methods.BlurConv2d.from_conv2d(conv)
    assert around.conv is conv
    model = nn.Sequential(conv, nn.MaxPool2d(2))
    apply_blurpool(model)
    assert [type(one) for one in model] == [methods.BlurConv2d, methods.BlurMaxPool2d]
    pooled = methods.blurmax_pool2d(image, kernel_size=2, stride=2)
    torch.testing.assert_close(pooled, methods.BlurMaxPool2d(2, 2)(image))
    assert methods.BlurPool2d(16, 2)(image).shape == (2, 16, 4, 4)
    torch.testing.assert_close(methods.BlurPool2d(stride=1)(image), methods.blur_2d(image))


class Watch(Callback):
    """A callback that records attributes of methods, and the current learning rate, after each batch."""

    def __init__(self, *read):
        self.read, self.seen = read, []

    def batch_end(self, state, logger):
        self.seen.append([one(state) for one in self.read])


def fit(model, method, *read):
    watch = Watch(*read)
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.arange(8) % 3)
    with Trainer(
        model=ComposerClassifier(model, num_classes=3),
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=4),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        schedulers=LinearScheduler(alpha_i=1.0, alpha_f=0.0),
        max_duration="2ep",
        algorithms=[method],
        callbacks=[watch],
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    return watch.seen


def test_methods_have_composers_attributes():
    mixup = algorithms.MixUp(alpha=0.2)
    seen = fit(nn.Linear(4, 3), mixup, lambda _: mixup.mixing, lambda _: mixup.indices.tolist())
    assert all(0 <= mixing <= 0.5 and sorted(indices) == [0, 1, 2, 3] for mixing, indices in seen)
    assert len({mixing for mixing, _ in seen}) == 4

    ema = algorithms.EMA(half_life="2ba", ema_start="2ba")
    assert ema.ema_model is None
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    seen = fit(model, ema, lambda _: ema.ema_started, lambda _: ema.ema_weights_active)
    assert [started for started, _ in seen] == [False, True, True, True]
    assert not any(active for _, active in seen)
    assert "module.0.weight" in ema.ema_model.named_parameters_dict
    assert "module.1.running_mean" in ema.ema_model.named_buffers_dict

    swa = algorithms.SWA(swa_start="1ep", swa_end="2ep")
    seen = fit(nn.Linear(4, 3), swa, lambda _: swa.swa_started)
    assert (seen, swa.swa_started, swa.swa_completed) == ([[False], [False], [True], [True]], True, True)

    depth = algorithms.StochasticDepth("ResNetBasicBlock", drop_rate=1.0)
    with pytest.warns(methods.NoEffectWarning):
        fit(nn.Linear(4, 3), depth)
    assert depth.num_stochastic_layers == 0


def test_schedules_of_the_state_return_the_current_rates():
    # `state.schedulers[0].get_last_lr()` must exist.
    seen = fit(
        nn.Linear(4, 3),
        algorithms.LabelSmoothing(0.1),
        lambda state: state.schedulers[0].get_last_lr(),
        lambda state: state.optimizers[0].param_groups[0]["lr"],
        lambda state: state.schedulers[0].alpha_f,
    )
    assert [rates for rates, _, _ in seen] == [[rate] for _, rate, _ in seen]
    # After batch k, the rates of the next batch are set, by the schedule at batch k.
    assert [rate for _, rate, _ in seen] == pytest.approx([0.1, 0.075, 0.05, 0.025])


def test_emaparameters_keep_averages_apart_from_the_model():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    first = copy.deepcopy(model)
    averages = methods.EMAParameters(model)
    assert "0.bias" not in dict(averages.named_parameters())
    with torch.no_grad():
        model[0].weight += 1
        model[1].running_mean += 1
    methods.compute_ema(model, averages, smoothing=0.75)
    expected = first[0].weight + 0.25
    torch.testing.assert_close(averages.named_parameters_dict["0.weight"], expected)
    torch.testing.assert_close(dict(averages.named_buffers())["1.running_mean"], torch.full((2,), 0.25))
    averages.swap_params(model)
    torch.testing.assert_close(model[0].weight, expected)
    torch.testing.assert_close(averages.named_parameters_dict["0.weight"], first[0].weight + 1)
    averages.transfer_ema_params(model)
    torch.testing.assert_close(model[0].weight, first[0].weight + 1)
    averages.move_params_to_device(model.to("meta"))
    assert averages.named_parameters_dict["0.weight"].is_meta
    assert methods.EMAParameters(None).named_parameters_dict == {}


class OwnPositions(nn.Module):
    """Adds learned positions, under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: nn.Parameter | None = nn.Parameter(torch.ones(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.rows is None else x + self.rows


class OwnAttention(nn.Module):
    """Attends over its input, with biases if it has them."""

    def __init__(self) -> None:
        super().__init__()
        self.alibi: AlibiAttention | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (2, 2)).transpose(1, 2)
        attend = self.alibi or nn.functional.scaled_dot_product_attention
        return attend(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)


def test_alibi_leaves_position_embeddings_to_the_policies_of_a_script():
    model = nn.Sequential(OwnPositions(), OwnAttention())
    x = torch.randn(2, 8, 4)
    with pytest.raises(SurgeryError, match="found no attention that it knows"):
        functional.apply_alibi(model, 8)

    @policy_registry.register(OwnAttention)
    def attention(module, module_index, max_sequence_length):
        module.alibi = AlibiAttention(2, max_sequence_length)
        return module

    @policy_registry.register(OwnPositions)
    def positions(module, module_index, max_sequence_length):
        module.rows = None
        return module

    changed = functional.apply_alibi(copy.deepcopy(model), 8)
    assert len(changed) == 2
    classifier = ComposerClassifier(model, num_classes=4)
    Trainer(
        model=classifier,
        optimizers=torch.optim.SGD(classifier.parameters(), lr=0.1),
        algorithms=[algorithms.Alibi(max_sequence_length=8)],
        device="cpu",
    )
    assert model[0].rows is None
    expected = AlibiAttention(2, 8)(*[x.unflatten(-1, (2, 2)).transpose(1, 2)] * 3, is_causal=True)
    torch.testing.assert_close(model(x), expected.transpose(1, 2).flatten(2))
