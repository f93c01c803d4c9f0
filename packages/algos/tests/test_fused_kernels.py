"""The kernels that EMA, SWA, clipping and SAM launch do not grow with the number of tensors."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.algos import SAMStep, apply_gradient_clipping, compute_ema
from hocket.algos.weight_average import WeightAverage
from hocket.trainer.ranks.single_process import SingleProcess

WITHOUT_KERNEL = {"aten.detach.default", "aten.empty_like.default"}
NUM_LAYERS = 20


class Kernels(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) not in WITHOUT_KERNEL:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def make(num_layers: int) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_layers)))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def average(num_layers: int) -> list[str]:
    averages = WeightAverage(make(num_layers), has_buffers=True)
    with Kernels() as seen:
        averages.update(0.1)
    return seen.names


def ema_function(num_layers: int) -> list[str]:
    model, averages = make(num_layers), make(num_layers)
    with Kernels() as seen:
        compute_ema(model, averages)
    return seen.names


def clip(kind: Any) -> Callable[[int], list[str]]:
    def clipped(num_layers: int) -> list[str]:
        model = make(num_layers)
        with Kernels() as seen:
            apply_gradient_clipping(model, kind, clipping_threshold=0.1)
        return seen.names

    return clipped


def sam(num_layers: int) -> list[str]:
    model = make(num_layers)
    state: Any = SimpleNamespace(
        device=torch.device("cpu"), model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)],
        outputs=None, parallelism=SingleProcess(torch.device("cpu")),
        timestamp=SimpleNamespace(counts=SimpleNamespace(batch=0)),
    )  # fmt: skip
    # Gradients exist already, so only SAM's ascent and the restoring of weights run.
    inner: Any = SimpleNamespace(compute_gradients=lambda batch: torch.zeros(()))
    step = SAMStep(inner, state, rho=0.1, epsilon=1e-12, interval=1)
    with Kernels() as seen:
        step.compute_gradients(None)
    return seen.names


@pytest.mark.parametrize(
    "run",
    [average, ema_function, clip("norm"), clip("value"), sam],
    ids=["average", "ema function", "clipping by norm", "clipping by value", "SAM"],
)
def test_kernels_do_not_grow_with_the_number_of_tensors(run: Callable[[int], list[str]]) -> None:
    few, many = run(2), run(NUM_LAYERS)
    assert few
    assert many == few


def test_adaptive_clipping_adds_two_norms_a_tensor() -> None:
    few, many = clip("adaptive")(2), clip("adaptive")(NUM_LAYERS)
    more = [name for name in many if name != "aten.linalg_vector_norm.default"]
    assert more == [name for name in few if name != "aten.linalg_vector_norm.default"]
    assert len(many) - len(few) == 2 * 2 * (NUM_LAYERS - 2)
