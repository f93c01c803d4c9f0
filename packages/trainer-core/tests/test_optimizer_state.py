"""Optimizers with a state beyond one tensor for each parameter resume with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hocket.trainer import Callback
from hocket.trainer.checkpoint.model_state import model_state
from hocket.trainer.checkpoint.optimizer_state import optimizer_state
from hocket.trainer.errors import ResumeError, TrainerConfigError
from support.training import Net, loader, make


class SharedCount(torch.optim.Optimizer):
    """Keeps entries that belong to no parameter, as MADGRAD does: a count, a number and a tensor."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        shared = self.state
        if "k" not in shared:
            shared["k"], shared["power"], shared["last"] = torch.tensor([0]), 1.0, torch.zeros(4)
        shared["k"] += 1
        shared["power"] *= 0.9
        shared["last"] = shared["last"].roll(1) + shared["k"]
        for parameter in self.param_groups[0]["params"]:
            scale = shared["power"] / (1 + shared["k"].item() + float(shared["last"].sum()) / 50)
            parameter.add_(parameter.grad, alpha=-self.param_groups[0]["lr"] * scale)


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, keeps slow weights, and puts both states into a dict of its own."""

    def __init__(self, base, k=3):
        self.base, self.k, self.count = base, k, 0
        super().__init__(base.param_groups, {})
        self.base.param_groups = self.param_groups
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.count += 1
        if self.count % self.k == 0:
            for group, slow_group in zip(self.param_groups, self.slow, strict=True):
                for parameter, slow in zip(group["params"], slow_group, strict=True):
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)

    def state_dict(self):
        return {"fast": self.base.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state_dict):
        self.base.load_state_dict(state_dict["fast"])
        self.param_groups, self.slow = self.base.param_groups, state_dict["slow"]
        self.count = state_dict["count"]


class CountingAdam(torch.optim.Adam):
    """Adds an attribute to torch's state."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.01 / self.count
        super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.count = state_dict["count"]


class NestedSlots(torch.optim.Optimizer):
    """Keeps a list and a dict of tensors for each parameter, with integer keys and an empty list."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            slots = self.state[parameter]
            if not slots:
                slots |= {"past": [], "blocks": {0: parameter.clone(), 2: {"mean": parameter.mean()}}}
                slots |= {"none": [None, parameter.clone()], "empty": []}
            slots["past"] = [*slots["past"], parameter.grad.clone()][-3:]
            slots["blocks"][0].mul_(0.9)
            slots["blocks"][2]["mean"] += 1
            step = sum(slots["past"]) + 0.01 * slots["blocks"][0] + 0.001 * slots["none"][1]
            parameter.add_(step / slots["blocks"][2]["mean"], alpha=-self.param_groups[0]["lr"])


class CountingGroups(torch.optim.SGD):
    """Keeps a tensor in each group from the first step on, and settings that a checkpoint does not store."""

    def __init__(self, params):
        super().__init__(params, lr=0.05)
        for group in self.param_groups:
            group |= {"dtype": torch.float64, "function": abs}

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", torch.zeros((), dtype=group["dtype"])) + 1
            group["lr"] = group["function"](float(0.1 / group["count"]))
        super().step(closure)


def hooked(model):
    """Return an optimizer whose averages are saved in float64, through hooks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def save(optimizer, state):
        slots = {
            index: {"momentum": one["momentum_buffer"].double()} for index, one in state["state"].items()
        }
        return {**state, "state": slots}

    def load(optimizer, state):
        slots = {index: {"momentum_buffer": one["momentum"]} for index, one in state["state"].items()}
        return {**state, "state": slots}

    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(load)
    return optimizer


KINDS = {
    "entries of no parameter": lambda model: SharedCount(model.parameters()),
    "wrapper": lambda model: Lookahead(torch.optim.Adam(model.parameters(), lr=0.01)),
    "attribute": lambda model: CountingAdam(model.parameters()),
    "lists and dicts": lambda model: NestedSlots(model.parameters()),
    "tensors in groups": lambda model: CountingGroups(model.parameters()),
    "hooks": hooked,
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, history_size=3),
}


def start(kind, folder=None, **arguments):
    model = Net()
    return make(
        model=model,
        optimizers=KINDS[kind](model),
        train_dataloader=loader(shuffle=True),
        save_folder=folder,
        **arguments,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_with_a_state_of_its_own_resumes(tmp_path, kind):
    assert differing_after_resumption(tmp_path, kind) == []


def differing_after_resumption(tmp_path: Path, kind: str) -> list[str]:
    """Return the tensors of a resumed run that differ from those of the run that went through."""
    arguments = {"max_duration": "11ba", "save_interval": "7ba"}
    with start(kind, str(tmp_path / "a"), **arguments) as trainer:
        trainer.fit()
        whole = trainer.state.model.state_dict()
    with start(kind, load_path=str(tmp_path / "a" / "ep1-ba7"), **arguments) as trainer:
        assert trainer.state.timestamp.batch == "7ba"
        trainer.fit()
        found = trainer.state.model.state_dict()
    return [name for name in whole if not torch.equal(found[name], whole[name])]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:It is highly recommended to have 'opt_einsum'")
@pytest.mark.parametrize("letter", "abcdefghijklmnopqrstuvwxyz")
def test_timms_optimizers_resume(tmp_path, letter, monkeypatch):
    optim = pytest.importorskip("timm.optim", reason="needs `uv sync --group models`")
    names = [name for name in optim.list_optimizers() if name[0] == letter]
    # These need a GPU or Apex, or a graph of second order; kron compiles, and the compiler's workers stay.
    for name in [name for name in names if not name.startswith(("bnb", "fused", "adahessian", "kron"))]:
        monkeypatch.setitem(
            KINDS, name, lambda model, name=name: optim.create_optimizer_v2(model, name, lr=0.01)
        )
        (tmp_path / name).mkdir()
        assert differing_after_resumption(tmp_path / name, name) == [], name


def test_the_tree_of_an_ordinary_optimizer_has_torchs_slots_alone():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with make(model=model, optimizers=optimizer, max_duration="2ba") as trainer:
        trainer.fit()
    tree = optimizer_state(optimizer, model)
    packed = optimizer.state_dict()
    names = list(model_state(model))
    assert list(tree) == ["kind", "state", "param_groups"]
    assert tree["param_groups"] == [{**packed["param_groups"][0], "params": names}]
    for index, name in enumerate(names):
        assert tree["state"][name].keys() == packed["state"][index].keys()
        assert all(tree["state"][name][slot] is value for slot, value in packed["state"][index].items())


@pytest.mark.parametrize("kind", ["wrapper", "attribute", "entries of no parameter"])
def test_a_checkpoint_without_the_state_of_its_own_still_loads(tmp_path, kind, capfd):
    """Checkpoints had no entry `own` before; what it would hold starts anew, and the user is told so."""

    def as_before(tree):
        tree["optimizers"][0].pop("own")

    with start(kind, str(tmp_path / "a"), max_duration="7ba", save_ignore_keys=as_before) as trainer:
        trainer.fit()
        saved = trainer.state.model.state_dict()
    with start(kind, load_path=str(tmp_path / "a" / "latest"), max_duration="8ba") as trainer:
        assert all(torch.equal(saved[name], one) for name, one in trainer.state.model.state_dict().items())
        trainer.fit()
    if kind != "entries of no parameter":
        name = type(trainer.state.optimizers[0]).__name__
        notice = f"the checkpoint lacks what the `state_dict` of `{name}` returns"
        assert notice in " ".join(capfd.readouterr().err.split())


class Unfreeze(Callback):
    """Unfreezes the first layer at a batch and gives it a parameter group."""

    def batch_start(self, state, logger):
        if state.timestamp.batch == "3ba":
            optimizer, layer = state.optimizers[0], state.model.layers[0]
            optimizer.add_param_group({"params": list(layer.requires_grad_().parameters()), "lr": 0.02})


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, CountingAdam])
def test_a_group_that_a_callback_added_resumes(tmp_path, kind, capfd):
    def start(folder=None, **arguments):
        model = Net()
        model.layers[0].requires_grad_(False)
        momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(model.layers[3].parameters(), lr=0.1, **momentum)
        return make(
            model=model,
            optimizers=optimizer,
            callbacks=Unfreeze(),
            save_folder=folder,
            max_duration="9ba",
            save_interval="4ba",
            **arguments,
        )

    if kind is torch.optim.Adagrad and torch.__version__ < "2.10":
        with start() as trainer, pytest.raises(TrainerConfigError, match="`Adagrad` cannot step parameters"):
            trainer.fit()
        return
    with start(str(tmp_path / "a")) as trainer:
        trainer.fit()
        whole = trainer.state.model.state_dict()
    with start(load_path=str(tmp_path / "a" / "ep0-ba4")) as trainer:
        trainer.fit()
        found = trainer.state.model.state_dict()
    assert [name for name in whole if not torch.equal(found[name], whole[name])] == []
    notice = f"`{kind.__name__}` gets 1 further parameter group of the checkpoint, with `layers.0.weight`"
    assert notice in " ".join(capfd.readouterr().err.split())


def test_groups_that_differ_are_named(tmp_path):
    def start(parts, **arguments):
        model = Net()
        groups = [
            {"params": [parameter for index in part for parameter in model.layers[index].parameters()]}
            for part in parts
        ]
        return make(model=model, optimizers=torch.optim.Adam(groups), max_duration="2ba", **arguments)

    with start([[0], [3]], save_folder=str(tmp_path / "a")) as trainer:
        trainer.fit()
    for parts, difference in (
        ([[3], [0]], "group 0 lacks"),
        ([[0, 3]], "2 groups in the checkpoint, 1 here"),
        ([[3]], "2 groups in the checkpoint, 1 here"),
    ):
        with pytest.raises(ResumeError, match=f"parameter groups of `Adam` differ.*{difference}"):
            start(parts, load_path=str(tmp_path / "a" / "latest"))


def test_an_optimizer_that_does_not_take_its_state_is_named(tmp_path):
    with start("attribute", str(tmp_path / "a"), max_duration="2ba") as trainer:
        trainer.fit()

    def broken(self, state_dict):
        raise KeyError("counts")

    model = Net()
    optimizer = CountingAdam(model.parameters())
    optimizer.load_state_dict = broken.__get__(optimizer)
    with pytest.raises(ResumeError, match=r"`load_state_dict` of `CountingAdam` failed.*KeyError: 'counts'"):
        make(model=model, optimizers=optimizer, load_path=str(tmp_path / "a" / "latest"))
