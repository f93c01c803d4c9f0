"""Plans that run and do not fit the model are refused in the first forward pass, and others train."""

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.dist import ModelError, provide
from hocket.recipes.gpt import GPT
from support import layouts
from support.standing_ranks import StandingRanks

ATTENTION = {"*.q": "colwise", "*.k": "colwise", "*.v": "colwise", "*.out": "rowwise"}
PACKED = {"*.qkv": "packed_colwise:3", "*.out": "rowwise"}


class Attention(nn.Module):
    """Attention of two heads of 4 features that cuts what it has in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind in ("heads", "random"):
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        else:
            self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        if kind == "zeros":
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "trains" and not self.training:
            raise NotImplementedError("there is no evaluation")
        if self.kind in ("heads", "random"):
            parts = [layer(x) for layer in (self.q, self.k, self.v)]
        else:
            parts = list(self.qkv(x).chunk(3, dim=-1))
        shape = (2, -1) if self.kind == "heads" else (-1, 4)
        q, k, v = (part.unflatten(-1, shape).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if self.kind == "norm":
            mixed = F.normalize(mixed, dim=-1)
        if self.kind == "random":
            mixed = F.dropout(mixed, 0.5)
        return self.out(mixed)


class Model(nn.Module):
    """Two blocks with attention beside the input, which is large."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    """One block of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention, self.scale = Attention(kind), 1e-6 if kind == "small" else 0.1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.attention(x)


class Parts(nn.Module):
    """A block whose output is cut, and one that takes it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.ModuleDict({"layer": nn.Linear(8, 8)}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block["layer"](x)
        return x


class Head(nn.Module):
    """An output layer after the blocks, whose plan is the user's business."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = Model("fits"), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


CASES: dict[str, tuple[Any, dict[str, str], str]] = {
    "fits": (lambda: Model("fits"), PACKED, ""),
    "small": (lambda: Model("small"), PACKED, ""),
    "chunk": (lambda: Model("chunk"), {**PACKED, "*.qkv": "colwise"}, "at step 0"),
    "heads": (lambda: Model("heads"), ATTENTION, "at step 0"),
    "norm": (lambda: Model("norm"), PACKED, "at step 0"),
    "zeros": (lambda: Model("zeros"), {**PACKED, "*.qkv": "colwise"}, "at step 1"),
    "random": (lambda: Model("random"), ATTENTION, "`blocks.0` is not compared"),
    "trains": (lambda: Model("trains"), PACKED, "`blocks.0` is not compared"),
    "head": (Head, {**PACKED, "head": "colwise"}, "`head` is not compared"),
    "parts": (Parts, {"blocks.0.layer": "colwise", "blocks.1.layer": "rowwise"}, ""),
}
SHARED = {"plain": {}, "sequences": {"sequence_parallel": True}}


def _train(case: str, options: dict[str, Any]) -> tuple[list[float], str, list[str]]:
    """Return the losses of two steps, the refusal with its step, and what was logged."""
    build, plan, _ = CASES[case]
    model, losses, told = build(), list[float](), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hocket.dist").addHandler(handler)
    config = None if options is None else {"tp": {"degree": 2, "plan": plan, **options}}
    try:
        with provide(config, device="cpu", timeout_s=30) as parallelism:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            parallelism.lay_out(model, [optimizer])
            for step in range(2):
                x = torch.arange(64.0).view(2, 4, 8).sin()
                try:
                    loss = (model(x) - x.cos()).square().mean()
                except ModelError as error:
                    return losses, f"at step {step}: {error}", told
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    finally:
        logging.getLogger("hocket.dist").removeHandler(handler)
    return losses, "", told


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("shared", list(SHARED))
def test_a_plan_that_runs_and_does_not_fit_is_refused(
    two_ranks: StandingRanks, case: str, shared: str
) -> None:
    if shared == "sequences" and case in ("head", "parts", "random", "trains"):
        pytest.skip("refused beside `sequence_parallel` for other reasons")
    expected = CASES[case][2]
    for rank, (losses, refusal, told) in enumerate(two_ranks.run(_train, case, SHARED[shared])):
        if expected.startswith("at step"):
            assert refusal.startswith((f"{expected}: `blocks.0`, a Block,", f"{expected}: `blocks.0.atten"))
            assert "does not compute with the matrices that the tensor-parallel plan cuts" in refusal
            continue
        assert not refusal
        compared = [text for text in told if "is not compared" in text]
        assert len(compared) == (bool(expected) and not rank)
        assert all(text.startswith(expected) for text in compared)
        if case == "fits":
            alone = _alone(case)
            assert losses == pytest.approx(alone, rel=1e-6)


def _copy() -> tuple[Tensor, Tensor, Tensor, list[str]]:
    """Copy a model before its first pass, as averaged weights do, and set the copy's values to 0.

    Returns:
        The input, the outputs of copy and model, and the modules that keep a forward method of the check.
    """
    with provide({"tp": {"degree": 2, "plan": PACKED}}, device="cpu", timeout_s=30) as parallelism:
        model = parallelism.lay_out(Model("fits"))
        copied = copy.deepcopy(model)
        x = torch.arange(64.0).view(2, 4, 8).sin()
        with torch.no_grad():
            for one in copied.parameters():
                one.zero_()
            outputs = copied(x), model(x)
        kept = [name for name, one in model.named_modules() if "forward" in vars(one)]
    return x, *outputs, kept


def test_a_copy_of_the_model_has_its_own_values(two_ranks: StandingRanks) -> None:
    for x, of_copy, of_model, kept in two_ranks.run(_copy):
        torch.testing.assert_close(of_copy, x)
        assert not torch.equal(of_model, x)
        assert not kept


def _alone(case: str) -> list[float]:
    model, losses = CASES[case][0](), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.arange(64.0).view(2, 4, 8).sin()
        loss = (model(x) - x.cos()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


WRONG = {"degree": 2, "plan": {**GPT.tp_plan, "blocks.*.qkv": "colwise"}}
PRODUCTS: dict[str, dict[str, Any]] = {
    "dp_shard 2 × tp 2": {"dp_shard": 2, "tp": WRONG},
    "cp 2 × tp 2": {"dp_shard": 1, "cp": 2, "tp": WRONG},
    "cp 2 × tp 2, sequences": {"dp_shard": 1, "cp": 2, "tp": {**WRONG, "sequence_parallel": True}},
    "pp 2 × tp 2": {"pp": 2, "dp_shard": 1, "tp": WRONG},
    "pp 2 × tp 2, sequences": {"pp": 2, "dp_shard": 1, "tp": {**WRONG, "sequence_parallel": True}},
}


def _refuse(config: dict[str, Any]) -> str:
    with pytest.raises(ModelError) as caught:
        layouts.train("gpt", config, config.get("dp_shard", 1), callbacks=[])
    return str(caught.value)


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_a_plan_that_does_not_fit_is_refused_beside_other_axes(four_ranks: StandingRanks, name: str) -> None:
    for message in four_ranks.run(_refuse, PRODUCTS[name]):
        assert "does not compute with the matrices that the tensor-parallel plan cuts what it" in message
