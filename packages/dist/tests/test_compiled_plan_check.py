"""Plans that run and do not fit a compiled model are refused before it trains, and others train as before."""

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hocket.dist import ModelError
from hocket.recipes.gpt import GPT, GPTConfig
from hocket.trainer import Trainer
from hocket.trainer.compiled_step import CompiledStep
from hocket.trainer.step.microbatch_search import MicrobatchSearch
from support.feature_rows import LiveMeter
from support.standing_ranks import StandingRanks

RIGHT = {"degree": 2}
WRONG = {"degree": 2, "plan": {"blocks.*.qkv": "colwise", "blocks.*.attention_out": "rowwise"}}
PARTS = {"sequence_parallel": True}


Prepare = Callable[[nn.Module], dict[str, Any]]


class Case(NamedTuple):
    """A model, its layout, and when it is refused."""

    kind: str
    config: dict[str, Any]
    refused_at: int | None = None
    size: int | None = None
    """Samples in a microbatch."""


CASES = {
    "fits": Case("plain", {"tp": RIGHT}),
    "fits, sequences": Case("plain", {"tp": {**RIGHT, **PARTS}}),
    "fits, positions": Case("plain", {"dp_shard": 1, "cp": 2}, size=2),
    "dropout": Case("dropout", {"tp": RIGHT}, size=2),
    "counts": Case("counts", {"dp_shard": 1, "cp": 2}, size=2),
    "takes": Case("takes", {"tp": RIGHT}),
    "wrong": Case("plain", {"tp": WRONG}, 0),
    "wrong, microbatches": Case("plain", {"tp": WRONG}, 0, size=2),
    "wrong, sequences": Case("plain", {"tp": {**WRONG, **PARTS}}, 0),
    "wrong, zeros": Case("zeros", {"tp": WRONG}, 1),
    "positions that mix": Case("mixing", {"dp_shard": 1, "cp": 2}, 0),
}


class Given(GPT):
    """A model of two blocks that differs by kind."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        super().__init__(GPTConfig(context=8, width=16, num_layers=2, num_heads=2))
        self.kind = kind
        self.passes: Tensor
        self.register_buffer("passes", torch.zeros(()))
        for block in self.blocks:
            if kind == "zeros":
                nn.init.zeros_(block.attention_out.weight)  # type: ignore[union-attr, arg-type]
                nn.init.zeros_(block.mlp_out.weight)  # type: ignore[union-attr, arg-type]
            if kind == "mixing":
                block.mlp_norm = Mixing()

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits."""
        logits = super().forward(batch)
        if self.kind == "takes":  # what the loss needs, so that a second pass on this batch would fail
            assert isinstance(batch, dict)
            self.taken = batch.pop("taken")
        if self.kind == "counts":
            self.passes += 1
            logits = logits * (1 + self.passes)
        return F.dropout(logits, 0.5, self.training) if self.kind == "dropout" else logits


class Mixing(nn.Module):
    """A norm over positions."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        return x / x.norm(dim=1, keepdim=True)


def _train(case: Case, prepare: Prepare) -> tuple[list[float], str, list[str]]:
    """Return the losses of three steps, the refusal, and the warnings of what is not compared.

    Args:
        case: The model and its layout.
        prepare: Called with the model; returns further options of the trainer.
    """
    tokens = torch.randint(256, (12, 9), generator=torch.Generator().manual_seed(1))
    losses, told = list[float](), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hocket.dist").addHandler(handler)
    model = Given(case.kind)
    try:
        trainer = Trainer(
            model=model,
            train_dataloader=DataLoader([{"tokens": row, "taken": 1} for row in tokens], batch_size=4),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            max_duration="3ba",
            parallelism_config=case.config,
            callbacks=[Losses(losses)],
            progress_bar=False,
            device="cpu",
            seed=3,
            **{"device_train_microbatch_size": case.size} | prepare(model),
        )
        with contextlib.closing(trainer):
            try:
                trainer.fit()
            except ModelError as error:
                return losses, str(error), []
    finally:
        logging.getLogger("hocket.dist").removeHandler(handler)
        torch._dynamo.reset()
    return losses, "", [text for text in told if "not compared" in text]


class Losses:
    """A callback that keeps the losses."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def batch_end(self, state: Any, _logger: Any) -> None:
        """Keep the loss of a batch."""
        self.losses.append(float(state.loss))


def _compile(_model: nn.Module) -> dict[str, Any]:
    return {"compile_config": {"backend": "eager"}}


def _skip_first(_model: nn.Module) -> dict[str, Any]:
    return {"compile_config": {"backend": "eager"}, "loop": {"steps_to_skip": 1}}


def _search(_model: nn.Module) -> dict[str, Any]:
    search = MicrobatchSearch(meter=LiveMeter(limit=2**30), headroom=0.0)
    return {"compile_config": {"backend": "eager"}, "device_train_microbatch_size": search}


def _leave(_model: nn.Module) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("name", list(CASES))
def test_a_compiled_model_is_compared_before_it_trains(two_ranks: StandingRanks, name: str) -> None:
    case = CASES[name]
    found = two_ranks.run(_train, case, _compile)
    for losses, refusal, told in found:
        if case.refused_at is not None:
            assert "does not compute with" in refusal
            assert len(losses) == case.refused_at
            continue
        assert not refusal
        assert len(losses) == 3
        assert not told
    if case.refused_at is None:
        # The comparison leaves generators, buffers and batches as they were.
        for (losses, *_), (expected, *_) in zip(found, two_ranks.run(_train, case, _leave), strict=True):
            assert losses == pytest.approx(expected, rel=1e-6)


def test_a_batch_that_is_skipped_is_not_compared_and_the_next_one_is(two_ranks: StandingRanks) -> None:
    for losses, refusal, _ in two_ranks.run(_train, CASES["wrong"], _skip_first):
        assert "does not compute with" in refusal
        assert len(losses) == 1


def _compile_step(_model: nn.Module) -> dict[str, Any]:
    return {"train_step": functools.partial(CompiledStep, backend="eager")}


def _compile_blocks(model: Any) -> dict[str, Any]:
    for block in model.blocks:
        block.compile(backend="eager")
    return {}


def _compile_forward(model: nn.Module) -> dict[str, Any]:
    model.forward = torch.compile(model.forward, backend="eager")
    return {}


@pytest.mark.parametrize("prepare", [_compile_step, _compile_blocks, _compile_forward, _search])
def test_a_model_compiled_otherwise_is_compared_too(two_ranks: StandingRanks, prepare: Prepare) -> None:
    for losses, refusal, _ in two_ranks.run(_train, CASES["wrong"], prepare):
        assert "does not compute with the matrices" in refusal
        assert not losses
