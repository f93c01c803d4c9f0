"""Plans of tensor parallelism: what they cut, and what is refused before training, alike on every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from hocket.dist import ConfigError, ModelError, provide
from hocket.recipes.gpt import GPT, GPTConfig
from support.standing_ranks import StandingRanks

MLP = {"up": "colwise", "down": "rowwise"}


class Mlp(nn.Module):
    """Two layers and a scale of the features between them, which each rank has a share of."""

    def __init__(self, *, has_scale: bool = False, is_tied: bool = False, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(width, width)
        self.scale = nn.LayerNorm(width // 2 if has_scale else width) if has_scale else nn.Identity()
        self.down = nn.Linear(width, width)
        if is_tied:
            self.down.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.scale(self.up(x).relu()))


def _gpt(heads: int) -> GPT:
    return GPT(GPTConfig(context=4, width=6 * heads, num_layers=1, num_heads=heads))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, list[str]]] = {
    "heads": (lambda: _gpt(3), None, ["GPT has `num_heads` 3, which 2 ranks of `tp` cannot share evenly"]),
    "vocabulary": (
        lambda: nn.Sequential(nn.Embedding(33, 4), nn.Linear(4, 4)),
        {"0": "embedding_rowwise"},
        ["`0` has 33 rows of the vocabulary, which 2 ranks", "pad to a multiple of 2"],
    ),
    "features": (lambda: Mlp(width=7), MLP, ["`up` has 7 rows, which 2 ranks of `tp` cannot share evenly"]),
    "packed": (lambda: Mlp(width=8), {"up": "packed_colwise:3"}, ["in each of 3 parts", "a multiple of 6"]),
    "style": (
        lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)),
        {"0": "colwise"},
        ["'colwise' for `0`, a LayerNorm, expected an `nn.Linear` or a `Conv1D`"],
    ),
    "ties": (lambda: Mlp(is_tied=True), MLP, ["`up.weight` and `down.weight` are one tied parameter"]),
    "no module": (Mlp, {"upp": "colwise"}, ["names `upp`, which is no module of Mlp", "Did you mean `up`?"]),
    "no plan": (Mlp, None, ["Mlp has no tensor-parallel plan"]),
    "empty function": (Mlp, lambda name, module: None, ["returns no style for any module of Mlp"]),
}


def _refuse() -> dict[str, str]:
    messages = {}
    with pytest.raises(ConfigError, match="`tp` is 2 and `precision` is 'amp_fp16'"):
        provide({"tp": 2}, device="cpu", precision="amp_fp16")
    for name, (build, plan, _) in REFUSED.items():
        config = {"tp": {"degree": 2, "plan": plan}}
        with provide(config, device="cpu", timeout_s=30) as parallelism:
            with pytest.raises((ConfigError, ModelError)) as caught:
                parallelism.lay_out(build())
            messages[name] = str(caught.value)
    return messages


def test_a_plan_that_does_not_fit_is_refused(two_ranks: StandingRanks) -> None:
    for messages in two_ranks.run(_refuse):
        for name, (_, _, words) in REFUSED.items():
            for word in words:
                assert word in messages[name], name


PLANS: dict[str, Any] = {
    "names": MLP,
    "torch's styles": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "function": lambda name, module: MLP.get(name) if isinstance(module, nn.Linear) else None,
    "whole inputs and outputs": {"up": "colwise_gather_output", "down": "rowwise_split_input"},
    "one layer": {"down": "rowwise_split_input"},
    "the last pattern wins": {"*": "colwise_gather_output", "up": "replicate", "scale": "replicate"},
}


def _train(plan: str | None) -> dict[str, torch.Tensor]:
    config = None if plan is None else {"tp": {"degree": 2, "plan": PLANS[plan]}}
    with provide(config, device="cpu", timeout_s=30) as parallelism:
        model = Mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        parallelism.lay_out(model, [optimizer])
        for _ in range(2):
            model(torch.arange(16.0).view(2, 8)).square().mean().backward()
            parallelism.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return {
            name: (one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone()
            for name, one in model.named_parameters()
        }


def _train_all() -> dict[str, dict[str, torch.Tensor]]:
    return {plan: _train(plan) for plan in PLANS}


def _forget() -> str:
    """Train with a norm of cut features that the plan does not name."""
    with provide({"tp": {"degree": 2, "plan": MLP}}, device="cpu", timeout_s=30) as parallelism:
        model = Mlp(has_scale=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallelism.lay_out(model, [optimizer])
        model(torch.arange(16.0).view(2, 8)).square().mean().backward()
        with pytest.raises(ModelError) as caught:
            optimizer.step()
        return str(caught.value)


def test_plans_train_as_one_process(two_ranks: StandingRanks) -> None:
    alone = _train(None)
    for trained in two_ranks.run(_train_all):
        for plan, parameters in trained.items():
            for name, value in parameters.items():
                torch.testing.assert_close(value, alone[name], atol=1e-6, rtol=1e-5, msg=f"{plan}: {name}")


def test_a_forgotten_parameter_between_cut_layers_is_refused(two_ranks: StandingRanks) -> None:
    for message in two_ranks.run(_forget):
        assert "different gradients of parameters that the tensor-parallel plan does not cut" in message
        assert "the first `scale.weight`" in message
