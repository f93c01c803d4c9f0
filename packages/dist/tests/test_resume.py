"""Sharded and replicated runs resume models and optimizers that keep a state of their own."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchmetrics.classification import MulticlassConfusionMatrix

from hocket.trainer import Callback
from hocket.trainer.checkpoint.model_state import loads_itself, model_state
from support.standing_ranks import StandingRanks
from support.training import Net, loader, make

LAYOUTS: dict[str, dict[str, Any] | None] = {
    "fsdp": {},
    "replicated": None,
}


class Hooked(Net):
    """Saves a weight in float64 under another name, by hooks, and has a tensor as its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.layers[0].register_state_dict_post_hook(self._rename)
        self.layers[0].register_load_state_dict_pre_hook(self._name_back)

    def forward(self, batch: Any) -> Any:
        self.count += self.training
        return super().forward(batch) * (1 + 0.1 * self.count)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.count)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.count = int(state)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        state[f"{prefix}wide"] = state.pop(f"{prefix}weight").double()

    @staticmethod
    def _name_back(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}wide")


class Averaging(torch.optim.SGD):
    """Keeps a list of past gradients in each slot, a shared count, and averages as an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.averages: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        self.averages = self.averages or [torch.zeros_like(parameter) for parameter in parameters]
        self.state["count"] = self.state.get("count", torch.tensor([0])) + 1
        for parameter, average in zip(parameters, self.averages, strict=True):
            past = self.state[parameter].setdefault("past", [])
            self.state[parameter]["past"] = [*past, parameter.grad.clone()][-2:]
            average.lerp_(sum(self.state[parameter]["past"]) / self.state["count"].item(), 0.5)
            parameter.sub_(average, alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "averages": self.averages}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.averages = state_dict["averages"]


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for name, one in model.named_parameters()
    }


def _resume(folder: str, layout: str) -> list[str]:
    """Return the names of parameters that differ between a run and the same run with a resume."""

    def start(**arguments: Any) -> Any:
        model = Hooked()
        return make(
            model=model,
            optimizers=Averaging(model.parameters()),
            train_dataloader=loader(batch_size=2),
            fsdp_config=LAYOUTS[layout],
            max_duration="8ba",
            save_interval="3ba",
            **arguments,
        )

    with start(save_folder=folder) as trainer:
        trainer.fit()
        whole = _whole(trainer.state.model)
    with start(load_path=f"{folder}/ep0-ba3") as trainer:
        assert trainer.state.timestamp.batch == "3ba"
        if layout != "replicated":
            kinds = {type(one) for one in trainer.state.optimizers[0].averages}
            assert kinds == {DTensor}, kinds
        trainer.fit()
        found = _whole(trainer.state.model)
    return [name for name in whole if not torch.equal(found[name], whole[name])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_of_their_own_resume_on_two_ranks(
    tmp_path: Any, two_ranks: StandingRanks, layout: str
) -> None:
    assert two_ranks.run(_resume, str(tmp_path / "a"), layout) == [[], []]


def _is_ordinary(layout: str) -> bool:
    with make(model=Net(), fsdp_config=LAYOUTS[layout], max_duration="1ba") as trainer:
        return not loads_itself(trainer.state.model, model_state(trainer.state.model))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_leave_an_ordinary_model_ordinary(two_ranks: StandingRanks, layout: str) -> None:
    assert two_ranks.run(_is_ordinary, layout) == [True, True]


class Measured(Net):
    """Has a metric of training whose state is larger than 64 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MulticlassConfusionMatrix(num_classes=100)

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {"Confusion": self.metric}

    def eval_forward(self, batch: Any, outputs: Any) -> Any:
        return outputs.argmax(1)

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(outputs, batch[1])


class Recorder(Callback):
    """Keeps 10,000 numbers that differ between the ranks."""

    def __init__(self) -> None:
        self.numbers = [0.0] * 10_000

    def batch_end(self, state: Any, logger: Any) -> None:
        rank = state.parallelism.data_parallel[0]
        self.numbers = [number + index * (rank + 1) for index, number in enumerate(self.numbers)]

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state: Any) -> None:
        self.numbers = list(state["numbers"])


def _resume_large(folder: str) -> bool:
    """Return whether a run with large states of metrics and callbacks resumes in mid-epoch as it was."""

    def start(**arguments: Any) -> Any:
        return make(
            model=Measured(),
            callbacks=Recorder(),
            train_dataloader=loader(batch_size=2),
            max_duration="4ba",
            save_interval="3ba",
            **arguments,
        )

    def found(trainer: Any) -> list[Any]:
        [metric] = trainer.state.train_metrics.values()
        [callback] = [one for one in trainer.state.callbacks if isinstance(one, Recorder)]
        return [metric.confmat.tolist(), callback.numbers]

    with start(save_folder=folder) as trainer:
        trainer.fit()
        whole = found(trainer)
    with start(load_path=f"{folder}/ep0-ba3") as trainer:
        trainer.fit()
        return found(trainer) == whole and sum(map(sum, whole[0])) > 0


def test_large_states_of_metrics_and_callbacks_resume_in_mid_epoch(
    tmp_path: Any, two_ranks: StandingRanks
) -> None:
    assert two_ranks.run(_resume_large, str(tmp_path / "a")) == [True, True]
