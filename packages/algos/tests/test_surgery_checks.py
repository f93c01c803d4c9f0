"""Checks of surgery: wrapped models, devices, later swaps, and optimizers with state."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hocket.algos import (
    BlurPool,
    IncompatibleError,
    SurgeryError,
    SurgeryWarning,
    apply_factorization,
    apply_stochastic_depth,
)
from hocket.algos.blurpool import BlurConv2d
from hocket.algos.surgery import check_memory, count_module_instances, replace_module_classes
from hocket.trainer.callback import Callback
from hocket.trainer.errors import TrainerConfigError
from support.methods import make_loader, make_model, train
from support.ranks import run_ranks

needs_fake_devices = pytest.mark.skipif(
    torch.__version__ < "2.10" and not torch.cuda.is_available(),
    reason="torch 2.9 asks the driver for a tensor that is faked on a GPU",
)


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def swap(module: nn.Linear, index: int) -> nn.Module:
    return nn.Linear(module.in_features, module.out_features)


def _refusals() -> list[str]:
    messages = []
    for wrap in (DistributedDataParallel, fully_shard):
        model = wrap(small())
        for whole in (model, nn.ModuleDict({"inner": model})):
            with pytest.raises(SurgeryError) as caught:
                replace_module_classes(whole, {nn.Linear: swap})
            messages.append(str(caught.value))
    return messages


def test_wrapped_models_raise() -> None:
    messages = run_ranks(_refusals, 1, init="gloo", timeout_s=120)[0]
    words = ["DistributedDataParallel", "fully_shard"]
    for position, message in enumerate(messages):
        assert words[position // 2] in message
        assert ("the model" if position % 2 == 0 else "`inner`") in message


def test_a_compiled_model_runs_the_replacements() -> None:
    model = small()
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(3, 4)
    before = compiled(x)
    report = replace_module_classes(compiled, {nn.Linear: swap})
    assert [one.names[0].removeprefix("_orig_mod.") for one in report] == ["0", "2"]
    assert torch.equal(compiled(x), model(x))
    assert not torch.equal(compiled(x), before)


def test_meta_tensors_in_a_model_with_values_raise_with_their_names() -> None:
    model = small()
    model.add_module("late", nn.Linear(2, 2, device="meta"))
    with pytest.raises(SurgeryError, match=r"`late\.weight` has no values"):
        replace_module_classes(model, {nn.ReLU: lambda module, index: nn.GELU()})
    model = small()
    model.register_buffer("scale", torch.ones(1, device="meta"))
    with pytest.raises(SurgeryError, match="`scale` has no values"):
        replace_module_classes(model, {nn.ReLU: lambda module, index: nn.GELU()})
    half = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(SurgeryError, match="returned a Sequential on the meta device"):
        replace_module_classes(small(), {nn.ReLU: lambda module, index: half})


def spread() -> nn.Sequential:
    """Return a model on two accelerators and the CPU; `FakeTensorMode` has devices without values."""
    inner = nn.Sequential(nn.Linear(4, 4, device="cuda:1"), nn.ReLU())
    return nn.Sequential(nn.Linear(4, 4, device="cuda:0"), inner, nn.Linear(4, 4), nn.ReLU())


@needs_fake_devices
def test_replacements_go_to_the_devices_of_the_replaced_modules() -> None:
    linear = iter([swap(nn.Linear(4, 4), 0) for _ in range(3)])
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = spread()
        replace_module_classes(model, {nn.Linear: lambda module, index: next(linear)})
        devices = {name: str(value.device) for name, value in model.named_parameters()}
    assert devices == {
        "0.weight": "cuda:0", "0.bias": "cuda:0", "1.0.weight": "cuda:1", "1.0.bias": "cuda:1",
        "2.weight": "cpu", "2.bias": "cpu",
    }  # fmt: skip


@needs_fake_devices
def test_a_replacement_of_a_module_without_tensors_gets_the_surrounding_device() -> None:
    rectifiers = [nn.PReLU(), nn.PReLU()]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = spread()
        replace_module_classes(model, {nn.ReLU: lambda module, index: rectifiers[index]})
        # Around the outer module there are three devices, one of them the CPU, on which its policy made it.
        assert [str(one.weight.device) for one in rectifiers] == ["cuda:1", "cpu"]


@needs_fake_devices
def test_a_replacement_with_an_ambiguous_device_raises_with_its_name() -> None:
    made = nn.PReLU()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = spread()
        model[2].to_empty(device="cuda:0")
        with pytest.raises(
            SurgeryError, match=r"`3` .* on cpu, where nothing .* on cuda:0, cuda:1, and the old"
        ):
            replace_module_classes(
                model, {nn.ReLU: lambda module, index: made if module is model[3] else None}
            )
        both = nn.Sequential(nn.Linear(4, 4, device="cuda:0"), nn.Linear(4, 4, device="cuda:1"))
        with pytest.raises(SurgeryError, match=r"`3` .* whose parameters are on several devices"):
            replace_module_classes(spread(), {nn.ReLU: lambda module, index: both if index else None})


def test_replacements_too_large_for_memory_raise() -> None:
    check_memory(1, torch.device("cpu"), "a byte")
    with pytest.raises(IncompatibleError, match=r"all of it takes \d+\.0 GiB, and cpu has"):
        check_memory(1 << 60, torch.device("cpu"), "all of it")


class Swaps(Callback):
    """Puts an untreated convolution back at the end of the first batch."""

    def batch_end(self, state: Any, logger: Any) -> None:
        if state.timestamp.counts.batch == 1:
            state.model.body[1] = nn.Conv2d(8, 16, 3, stride=2, padding=1)


def _train(reapply: bool, **options: Any) -> Any:
    seen: list[Any] = []
    model = make_model("convnet")
    train(
        [],
        model=model,
        kind="convnet",
        algorithms=[BlurPool(min_channels=8, reapply=reapply)],
        callbacks_more=[Swaps()],
        look=lambda trainer: seen.append(trainer.state.optimizers[0]),
        **options,
    )
    return model, seen[0]


@pytest.mark.parametrize("where", ["epoch start", "evaluation", "save"])
def test_a_swapped_module_is_reported_or_treated(where: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "epoch start": {"steps": 2, "max_duration": "2ep"},
        "evaluation": {"steps": 2, "eval_dataloader": make_loader("convnet", 1), "eval_interval": "2ba"},
        "save": {"steps": 2, "save_folder": tmp_path / "a", "save_interval": "2ba"},
    }[where]
    if where == "save":  # the save has no parameters of the removed module
        with pytest.raises(TrainerConfigError, match="holds a parameter of shape"):
            _train(False, **options)
        options["save_folder"] = tmp_path / "b"
    else:
        with pytest.warns(SurgeryWarning, match=r"`body\.1` is no longer the BlurConv2d"):
            _train(False, **options)
    model, optimizer = _train(True, **options)
    assert isinstance(model.body[1], BlurConv2d)
    assert count_module_instances(model, BlurConv2d) >= 1
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())


def test_a_swapped_module_is_reported_when_the_run_is_saved(tmp_path: Path) -> None:
    class SwapsDropout(Callback):  # dropout has no parameters, so the save succeeds
        def batch_end(self, state: Any, logger: Any) -> None:
            if state.timestamp.counts.batch == 1:
                state.model.body[7] = nn.Dropout(0.1)

    with pytest.warns(SurgeryWarning, match=r"`body\.7` is no longer the GyroDropoutLayer"):
        train(["GyroDropout"], steps=2, save_folder=tmp_path, callbacks_more=[SwapsDropout()])
    assert list(tmp_path.iterdir())


def test_a_method_added_after_init_raises() -> None:
    class Late(Callback):
        def fit_start(self, state: Any, logger: Any) -> None:
            state.algorithms.append(BlurPool(min_channels=8))

    with pytest.raises(SurgeryError, match="`BlurPool` was added after the trainer was built"):
        train([], kind="convnet", steps=1, callbacks_more=[Late()])


def test_an_optimizer_keeps_its_state_after_surgery() -> None:
    torch.manual_seed(0)
    model: Any = make_model("convnet")
    optimizer = torch.optim.AdamW(model.parameters())
    batch = (torch.randn(4, 3, 16, 16), torch.zeros(4, dtype=torch.long))
    model.loss(model(batch), batch).backward()
    optimizer.step()
    states = {name: optimizer.state[value] for name, value in model.named_parameters()}
    report = apply_factorization(
        model, min_channels=8, min_features=16, latent_features=4, optimizers=optimizer
    )
    assert len(report) > 0
    now = dict(model.named_parameters())
    assert set(states) - set(now), "a factorized weight is gone"
    for name, value in now.items():
        if name in states and value.shape == states[name]["exp_avg"].shape:
            assert optimizer.state[value] is states[name], name
        else:
            assert value not in optimizer.state
    dropped = {change.name for change in report.optimizer_changes if change.action == "removed"}
    assert dropped == set(states) - set(now)
    assert "its state dropped" in str(report)
    optimizer.zero_grad()
    model.loss(model(batch), batch).backward()
    optimizer.step()
    assert all(value in optimizer.state for value in now.values())


def test_a_dropped_branch_is_not_computed() -> None:
    model: Any = make_model("convnet")
    apply_stochastic_depth(model, "ResNetBasicBlock", drop_rate=0.5, drop_distribution="uniform")
    first = model.body[0]
    runs: list[int] = []
    first.block.conv1.register_forward_hook(lambda *_: runs.append(1))
    x = torch.randn(2, 8, 4, 4)
    first.drop = True
    assert torch.equal(first(x), torch.relu(x))
    assert runs == []
    first.drop = False
    assert torch.equal(first(x), first.block(x))
    assert len(runs) == 2
    first.eval()
    first(x)
    assert len(runs) == 3


def _computed() -> int:
    model: Any = make_model("convnet")
    apply_stochastic_depth(model, "ResNetBasicBlock", drop_rate=0.5)
    runs: list[int] = []
    model.body[0].block.conv1.register_forward_hook(lambda *_: runs.append(1))
    model.body[0].drop = True
    x = torch.randn(2, 8, 4, 4)
    assert torch.equal(model.body[0](x), torch.relu(x))
    return len(runs)


def test_ranks_compute_a_dropped_branch_so_that_collectives_agree() -> None:
    assert run_ranks(_computed, 2, init="gloo", timeout_s=120) == [1, 1]
