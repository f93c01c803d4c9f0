"""Module surgery: replacements, checks, and the update of optimizers."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from hocket.algos import (
    IncompatibleError,
    NoEffectWarning,
    SurgeryError,
    SurgeryWarning,
    WeightStandardization,
)
from hocket.algos.blurpool import BlurPool
from hocket.algos.surgery import (
    count_module_instances,
    drop_frozen,
    replace_module_classes,
    update_params_in_optimizer,
)
from hocket.trainer.callback import Callback
from support.methods import make_model, train


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)
    )


def swap(module: nn.Linear, index: int) -> nn.Module:
    return nn.Linear(module.in_features, module.out_features, bias=False)


def test_the_report_lists_and_counts_the_replacements() -> None:
    model = small()
    report = replace_module_classes(
        model, {nn.Linear: lambda module, index: swap(module, index) if index else None}
    )
    assert [one.names[0] for one in report] == ["2.0", "3"]
    assert list(report.skipped) == ["0"]
    assert report.counts == {"Linear": 2}
    assert "2 modules replaced (2 Linear)" in str(report)
    assert count_module_instances(model, nn.Linear) == 3


def test_a_shared_module_is_replaced_wherever_it_is_used() -> None:
    shared = nn.ReLU()
    model = nn.Sequential(shared, nn.Linear(2, 2), shared)
    report = replace_module_classes(model, {nn.ReLU: lambda module, index: nn.GELU()})
    assert len(report) == 1
    assert report.replacements[0].names == ("0", "2")
    assert model[0] is model[2]
    assert isinstance(model[0], nn.GELU)


def test_zero_replacements_warn_or_raise() -> None:
    with pytest.warns(NoEffectWarning, match="no module of its classes"):
        replace_module_classes(small(), {nn.Conv2d: swap})
    with pytest.raises(SurgeryError, match=r"all 3 modules of the classes that it treats .*`return`\n"):
        replace_module_classes(small(), {nn.Linear: lambda module, index: None}, if_none="error")


class TwoInputs(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda module, index: "linear", "returned a str"),
        (lambda module, index: TwoInputs(), "forward"),
        (lambda module, index: nn.Linear(4, 4, device="meta"), "meta device"),
    ],
)
def test_an_unsuitable_replacement_raises_with_its_name(policy: object, message: str) -> None:
    with pytest.raises(SurgeryError, match=message) as caught:
        replace_module_classes(small(), {nn.Linear: policy})  # type: ignore[dict-item]
    assert "`0`" in str(caught.value)


def test_models_that_surgery_must_not_change_raise() -> None:
    with pytest.raises(SurgeryError, match="meta device"):
        replace_module_classes(small().to("meta"), {nn.Linear: swap})


def test_an_optimizer_gets_new_parameters_by_name_and_keeps_remaining_state() -> None:
    model = small()
    optimizer = torch.optim.AdamW(
        [
            {"params": [model[0].weight, model[3].weight], "weight_decay": 0.1},
            {"params": [model[0].bias, model[3].bias]},
        ]
    )
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    kept = optimizer.state[model[0].weight]["exp_avg"]
    report = replace_module_classes(
        model,
        {nn.Linear: lambda module, index: swap(module, index) if module is model[3] else None},
        optimizers=optimizer,
    )
    assert optimizer.param_groups[0]["params"] == [model[0].weight, model[3].weight]
    assert optimizer.param_groups[1]["params"] == [model[0].bias]
    assert optimizer.state[model[0].weight]["exp_avg"] is kept
    actions = {(change.action, change.name) for change in report.optimizer_changes}
    assert ("removed", "3.bias") in actions
    assert any(name == "3.weight" for _, name in actions)


def test_a_frozen_replacement_is_removed_from_the_optimizer() -> None:
    model = small()
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = replace_module_classes(
        model, {nn.Linear: lambda module, index: swap(module, index).requires_grad_(False)}, optimizer
    )
    # `2.0` was frozen in the optimizer before, and stays in it.
    assert optimizer.param_groups[0]["params"] == [model[2][0].weight]
    removed = {change.name for change in report.optimizer_changes if change.action == "removed"}
    assert removed == {"0.weight", "0.bias", "2.0.bias", "3.weight", "3.bias"}
    assert not any(change.action == "not optimized" for change in report.optimizer_changes)


def test_parameters_are_replaced_in_an_optimizer() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update_params_in_optimizer(model.parameters(), other.parameters(), optimizer)
    assert optimizer.param_groups[0]["params"] == list(other.parameters())


class Swaps(Callback):
    """Swaps a treated module during the run."""

    def batch_end(self, state: object, logger: object) -> None:
        model = state.model  # type: ignore[attr-defined]
        if state.timestamp.counts.batch == 1:  # type: ignore[attr-defined]
            model.body[1] = nn.Conv2d(8, 16, 3, stride=2, padding=1)


def test_a_module_that_is_swapped_after_surgery_is_named() -> None:
    with pytest.warns(SurgeryWarning, match=r"`body\.1` is no longer the BlurConv2d"):
        train(
            [],
            kind="convnet",
            steps=2,
            algorithms=[BlurPool(min_channels=8)],
            max_duration="2ep",
            callbacks_more=[Swaps()],
        )


def test_a_resumed_run_must_treat_the_same_modules(tmp_path) -> None:
    train(["GyroDropout"], steps=2, save_folder=tmp_path, save_interval="1ba")
    model = make_model("convnet")
    model.body[7] = nn.Identity()  # type: ignore[index,operator]
    model.body.append(nn.Dropout(0.1))  # type: ignore[union-attr,operator]
    with pytest.raises(IncompatibleError, match="treated other modules"):
        train(["GyroDropout"], steps=2, model=model, load_path=tmp_path / "ep0-ba1")


def test_weights_are_standardized() -> None:
    from hocket.algos import apply_weight_standardization

    model = make_model("convnet")
    apply_weight_standardization(model, n_last_layers_ignore=1)
    weight = model.stem.weight  # type: ignore[union-attr]
    torch.testing.assert_close(weight.mean((1, 2, 3)), torch.zeros(8), atol=1e-6, rtol=0)  # type: ignore[operator]
    torch.testing.assert_close(weight.var((1, 2, 3), correction=0), torch.ones(8), atol=1e-2, rtol=0)  # type: ignore[operator]
    assert WeightStandardization().n_last_layers_ignore == 0


@pytest.mark.parametrize("prefix", ["", "model.", "own/"])
def test_the_names_in_an_optimizer_follow_the_parameters(prefix: str) -> None:
    model = nn.Sequential(OrderedDict(model=small())) if prefix == "model." else small()
    inner = model.model if prefix == "model." else model
    given = [(name if prefix == "model." else prefix + name, one) for name, one in inner.named_parameters()]
    optimizer = torch.optim.AdamW(given, lr=0.1)

    def wrap(module: nn.Linear, index: int) -> nn.Module:
        return nn.Sequential(module, nn.Linear(2, 2)) if index == 2 else swap(module, index)

    replace_module_classes(model, {nn.Linear: wrap}, optimizer)
    (group,) = optimizer.param_groups
    names = {id(one): name for name, one in inner.named_parameters()}
    kept = dict(zip(group["param_names"], map(id, group["params"]), strict=True))
    assert {name.removeprefix("own/"): names[one] for name, one in kept.items()} == {
        name: name for name in ("0.weight", "2.0.weight", "3.0.weight", "3.0.bias", "3.1.weight", "3.1.bias")
    }
    torch.optim.AdamW(inner.named_parameters()).load_state_dict(optimizer.state_dict())
    drop_frozen(optimizer, {"any": inner[0].weight})
    assert len(group["param_names"]) == len(group["params"]) == 5
    update_params_in_optimizer([inner[2][0].weight], [nn.Parameter(torch.zeros(1))], optimizer)
    assert len(group["param_names"]) == len(group["params"]) == 5
