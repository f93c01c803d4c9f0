"""The same algorithm object in several trainers, one after the other: each trainer starts it anew."""

import copy
import pickle
from typing import Any

import pytest
import torch

from hocket.algos import EMA, SWA, BlurPool, IncompatibleError, LowPrecisionGroupNorm
from hocket.algos.blurpool import BlurConv2d
from hocket.trainer import Trainer
from hocket.trainer.event import Event
from support.methods import CASES, make_loader, make_model, train

for library in ("torchvision", "schedulefree", "peft", "torchao", "bitsandbytes"):
    pytest.importorskip(library, reason=f"needs {library}")


def test_a_method_that_has_not_run_can_be_copied_and_pickled() -> None:
    for name in sorted(CASES):
        algorithm = CASES[name].make()
        for other in (pickle.loads(pickle.dumps(algorithm)), copy.deepcopy(algorithm)):
            assert {*vars(other)} == {*vars(algorithm)}, name
    blurpool = pickle.loads(pickle.dumps(BlurPool(min_channels=8)))
    expected, _ = train(["BlurPool"], algorithms=[BlurPool(min_channels=8)])
    actual, _ = train(["BlurPool"], algorithms=[blurpool])
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    with pytest.raises(TypeError, match="`BlurPool` has changed a model"):
        pickle.dumps(blurpool)


STATEFUL = {"BlurPool", "EMA", "LayerFreezing", "SWA"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in STATEFUL else pytest.mark.slow) for name in sorted(CASES)],
)
def test_a_method_has_the_same_effect_in_a_second_trainer(name: str) -> None:
    algorithm = CASES[name].make()
    first, losses = train([name], algorithms=[algorithm])
    first |= {f"average/{key}": value.clone() for key, value in algorithm.averaged_weights().items()}
    second, other_losses = train([name], algorithms=[algorithm])
    second |= {f"average/{key}": value for key, value in algorithm.averaged_weights().items()}
    assert losses == other_losses
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert torch.equal(second[key], value), key


def _trainer(model: Any, *algorithms: Any, **options: Any) -> Trainer:
    return Trainer(
        model=model,
        train_dataloader=make_loader("convnet", 4),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=algorithms,
        max_duration="4ba",
        device="cpu",
        progress_bar=False,
        **options,
    )


@pytest.mark.parametrize("event", [Event.INIT, Event.AFTER_LOAD])
def test_surgery_that_is_done_in_a_model_is_not_done_again(event: Event) -> None:
    model, algorithms = make_model("convnet"), [BlurPool(min_channels=8), LowPrecisionGroupNorm(event)]
    modules = []
    for _ in range(2):  # a warning of a surgery without effect would be an error
        with _trainer(model, *algorithms, precision="amp_bf16") as trainer:
            trainer.fit()
        modules.append(list(model.modules()))
        assert all(algorithm.report for algorithm in algorithms)
    assert modules[0] == modules[1]
    assert sum(isinstance(module, BlurConv2d) for module in modules[1]) == 1


@pytest.mark.parametrize("method", [lambda: EMA("2ba"), lambda: SWA("0.2dur", "0.7dur", "1ba")])
def test_an_average_is_not_shared_by_trainers_that_are_used_in_turn(method: Any) -> None:
    algorithm = method()
    with (
        _trainer(make_model("convnet"), algorithm) as first,
        _trainer(make_model("convnet"), algorithm) as second,
    ):
        with pytest.raises(
            IncompatibleError, match=r"`(EMA|SWA)` has the averages of another trainer's model"
        ):
            first.fit()
        second.fit()
