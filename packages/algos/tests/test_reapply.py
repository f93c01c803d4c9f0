"""With `reapply=True`, methods that replace modules treat modules that are swapped in later, too."""

import contextlib
import inspect
from typing import Any

import pytest
from torch import nn

from hocket.algos import (
    NoEffectWarning,
    SurgeryWarning,
    apply_blurpool,
    apply_factorization,
    apply_ghost_batchnorm,
    apply_squeeze_excite,
)
from hocket.algos.surgery import SurgeryAlgorithm
from hocket.trainer.callback import Callback
from support.methods import CASES, common_kind, make_model, train

for library in ("torchvision", "peft", "torchao", "bitsandbytes"):
    pytest.importorskip(library, reason=f"needs {library}")


SURGERY = [name for name, case in sorted(CASES.items()) if isinstance(case.make(), SurgeryAlgorithm)]
ONCE = {"LoRA", "QLoRA"}  # peft accepts only a model without adapters


class SwapsAll(Callback):
    """Replaces all children of the model by untreated copies at the end of the first batch."""

    def __init__(self, name: str) -> None:
        self.name = name

    def batch_end(self, state: Any, logger: Any) -> None:
        if state.timestamp.counts.batch == 1:
            fresh = make_model(common_kind([self.name]), seed=2)  # type: ignore[arg-type]
            for child, module in fresh.named_children():
                setattr(state.model, child, module)


class AddsAll(Callback):
    """Adds untreated copies of all children of the model at the end of the first batch."""

    def __init__(self, name: str) -> None:
        self.name = name

    def batch_end(self, state: Any, logger: Any) -> None:
        if state.timestamp.counts.batch == 1:
            fresh = make_model(common_kind([self.name]), seed=2)  # type: ignore[arg-type]
            state.model.more = nn.ModuleDict(dict(fresh.named_children()))


def _run(name: str, *callbacks: Callback) -> tuple[dict[str, str], Any, Any]:
    """Train for two epochs of a batch; return the class of each module, the model and its optimizer."""
    algorithm = CASES[name].make()
    algorithm.reapply = True
    model: Any = make_model(common_kind([name]))  # type: ignore[arg-type]
    seen: list[Any] = []
    train(
        [name], algorithms=[algorithm], model=model, steps=1, max_duration="2ep", callbacks_more=callbacks,
        look=lambda trainer: seen.append(trainer.state.optimizers[0]),
    )  # fmt: skip
    return {place: type(module).__name__ for place, module in model.named_modules()}, model, seen[0]


def test_all_methods_that_can_reapply_have_the_argument() -> None:
    offering = {
        name for name in SURGERY if "reapply" in inspect.signature(type(CASES[name].make())).parameters
    }
    assert offering == set(SURGERY) - ONCE


@pytest.mark.parametrize("name", [name for name in SURGERY if name not in ONCE])
def test_swapped_in_modules_are_treated_with_reapply(name: str) -> None:
    expected, _, _ = _run(name)
    found, model, optimizer = _run(name, SwapsAll(name))
    assert found == expected
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    # Modules that have been treated are not treated again.
    found, _, _ = _run(name, AddsAll(name))
    assert {place: kind for place, kind in found.items() if place.split(".")[0] != "more"} == expected


def test_functions_treat_no_module_twice() -> None:
    model: Any = make_model("convnet")
    functions = [
        lambda: apply_squeeze_excite(model, 4, 8),
        lambda: apply_blurpool(model, min_channels=8),
        lambda: apply_factorization(model, min_channels=8, min_features=16, latent_channels=4),
        lambda: apply_ghost_batchnorm(model, 4),
    ]
    for function in functions:
        assert function()
    kinds = [type(module) for module in model.modules()]
    for function in functions:
        with pytest.warns(NoEffectWarning, match="already treated"):
            function()
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("name", sorted(ONCE))
def test_methods_without_reapply_warn_with_the_modules_only(name: str) -> None:
    with pytest.warns(SurgeryWarning, match=r"is new and was not treated.* Swap modules before") as seen:
        train([name], steps=1, max_duration="2ep", callbacks_more=[SwapsAll(name)])
    assert not any("reapply" in str(one.message) for one in seen)


class AddsBlock(Callback):
    """Adds a residual block of the model's class at the end of the first batch."""

    def batch_end(self, state: Any, logger: Any) -> None:
        if state.timestamp.counts.batch == 1:
            fresh = make_model(common_kind(["StochasticDepth"]), seed=2)  # type: ignore[arg-type]
            state.model.more = next(one for one in fresh.modules() if type(one).__name__ == "BasicBlock")


@pytest.mark.parametrize("reapply", [False, True])
def test_an_added_residual_block_is_named_or_wrapped(reapply: bool) -> None:
    algorithm = CASES["StochasticDepth"].make()
    algorithm.reapply = reapply
    model: Any = make_model(common_kind(["StochasticDepth"]))  # type: ignore[arg-type]
    expected = (
        contextlib.nullcontext() if reapply else pytest.warns(SurgeryWarning, match="`more`, a BasicBlock")
    )
    with expected:
        train(
            ["StochasticDepth"], algorithms=[algorithm], model=model, steps=1, max_duration="2ep",
            callbacks_more=[AddsBlock()],
        )  # fmt: skip
    assert type(model.more).__name__ == ("StochasticResidual" if reapply else "BasicBlock")
