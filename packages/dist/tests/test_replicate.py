"""Replicated models: a forward set on the object, and parameters that are unfrozen while training."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hocket.dist import provide
from support.standing_ranks import StandingRanks

Values = dict[str, torch.Tensor]


class Net(nn.Module):
    """A network with a buffer that each training step changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def _set_before(model: Net, step: int) -> None:
    if step == -1:
        model.forward = lambda x: 3.0 * Net.forward(model, x)


def _set_after(model: Net, step: int) -> None:
    if step == 0:
        model.forward = lambda x: 3.0 * Net.forward(model, x)


def _set_around_the_old_one(model: Net, step: int) -> None:
    if step in (-1, 1, 2):
        old = model.forward
        model.forward = lambda x: old(x) * 2.0


def _reset(model: Net, step: int) -> None:
    _set_before(model, step)
    if step == 2:
        del model.forward


def _unfreeze(model: Net, step: int) -> None:
    model.first.requires_grad_(step >= 2)


def _unfreeze_all(model: Net, step: int) -> None:
    model.requires_grad_(step >= 2)


def _unfreeze_within_a_batch(model: Net, step: int) -> None:
    model.first.requires_grad_(step >= 1.5)


CHANGES = {
    "forward set before": _set_before,
    "forward set after": _set_after,
    "forward set around the old one": _set_around_the_old_one,
    "forward set and deleted": _reset,
    "a layer unfrozen": _unfreeze,
    "everything unfrozen": _unfreeze_all,
    "a layer unfrozen between microbatches": _unfreeze_within_a_batch,
}


def _train(parallelism: Any, change: Callable[[Any, float], None]) -> tuple[Values, torch.Tensor, bool]:
    """Train on this rank's rows; return the parameters, and outputs after the end."""
    rank, size = (0, 1) if parallelism is None else parallelism.data_parallel
    model: Any = Net()
    change(model, -1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if parallelism is not None:
        parallelism.lay_out(model, [optimizer])
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        rows = torch.randn(2, 4, 4, generator=generator).chunk(size, 1)[rank]
        for index, part in enumerate(rows):
            change(model, step + index / 2)
            if parallelism is not None:
                parallelism.sync_gradients(model, index == 1)
            if (outputs := model(part)).requires_grad:
                (outputs.square().mean() / 2).backward()
        optimizer.step()
        model.zero_grad()
    if parallelism is not None:
        parallelism.close()
    whole = torch.linspace(-1, 1, 8).reshape(2, 4)
    is_own = type(model.__dict__.get("forward")).__name__ in ("function", "NoneType")
    return {name: one.detach().clone() for name, one in model.named_parameters()}, model(whole), is_own


def _train_on_a_rank(name: str) -> tuple[Values, torch.Tensor, bool]:
    return _train(provide(None, device="cpu", timeout_s=30), CHANGES[name])


@pytest.mark.parametrize("name", CHANGES)
def test_changes_while_training_have_the_effect_that_they_have_on_one_process(
    two_ranks: StandingRanks, name: str
) -> None:
    parameters, outputs, _ = _train(None, CHANGES[name])
    for values, found, is_own in two_ranks.run(_train_on_a_rank, name):
        assert is_own
        torch.testing.assert_close(values, parameters)
        torch.testing.assert_close(found, outputs)


def _copy() -> bool:
    with provide(None, device="cpu", timeout_s=30) as parallelism:
        model: Any = Net()
        model.forward = lambda x: 3.0 * Net.forward(model, x)
        parallelism.lay_out(model)
        x = torch.ones(2, 4)
        twin = copy.deepcopy(model)
        return bool(parallelism.global_rank) or torch.equal(twin(x), 3.0 * Net.forward(twin, x))


def test_a_copy_calls_the_forward_that_was_set(two_ranks: StandingRanks) -> None:
    assert two_ranks.run(_copy) == [True, True]
