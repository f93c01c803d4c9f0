"""The bytes that a layout is said to send are those that its ranks send."""

import contextlib
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from hocket.dist import provide
from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.memory.layouts import LayoutEstimator, Machines
from hocket.dist.memory.proposal import propose_only
from hocket.recipes.gpt import GPT, GPTConfig
from hocket.recipes.mixture import MixtureConfig, MixtureGPT
from support import layouts
from support.sent_bytes import SentBytes
from support.standing_ranks import StandingRanks

Sent = dict[tuple[str, tuple[int, ...]], float]
"""Bytes by operator and ranks."""

MICROBATCHES = 2
AGAIN = {"activation_checkpointing": True}
PARTS = {"sequence_parallel": True}
BOTH = {"sequence_parallel": True, "loss_parallel": True}
MLP = {"blocks.*.mlp_in": "colwise", "blocks.*.mlp_out": "rowwise"}
SPLIT = {"blocks.*.mlp_in": "colwise_gather_output", "blocks.*.mlp_out": "rowwise_split_input"}

MIXTURES: dict[str, dict[str, Any]] = {
    "ep 4": {"dp_shard": 4, "ep": 4},
    "dp_shard 4 × ep 2": {"dp_shard": 4, "ep": 2},
    "dp_replicate 2 × ep 2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "dp_shard 2 × cp 2": {"dp_shard": 2, "cp": 2},
    "dp_shard 2 × cp 2 × ep 4": {"dp_shard": 2, "cp": 2, "ep": 4},
    "tp 4, sequences": {"tp": {"degree": 4, **PARTS}},
    "tp 4, sequences, computed again": {"tp": {"degree": 4, **PARTS}, "fsdp": AGAIN},
    "dp_shard 2 × tp 2 × ep 2, sequences, loss": {"dp_shard": 2, "tp": {"degree": 2, **BOTH}, "ep": 2},
    "cp 2 × tp 2, sequences": {"cp": 2, "tp": {"degree": 2, **PARTS}},
    "pp 2 × tp 2, sequences": {"pp": 2, "tp": {"degree": 2, **PARTS}},
}
GPTS: dict[str, dict[str, Any]] = {
    "tp 4": {"tp": 4},
    "tp 4, computed again": {"tp": 4, "fsdp": AGAIN},
    "tp 4, sequences": {"tp": {"degree": 4, **PARTS}},
    "tp 4, sequences, computed again": {"tp": {"degree": 4, **PARTS}, "fsdp": AGAIN},
    "tp 4, every second block computed again": {
        "tp": {"degree": 4, **PARTS},
        "fsdp": {**AGAIN, "activation_checkpointing_every": 2},
    },
    "tp 4, loss": {"tp": {"degree": 4, "loss_parallel": True}},
    "tp 4, a plan": {"tp": {"degree": 4, "plan": MLP}},
    "tp 4, a plan with whole activations": {"tp": {"degree": 4, "plan": SPLIT}},
    "dp_shard 2 × tp 2, sequences, loss": {"dp_shard": 2, "tp": {"degree": 2, **BOTH}},
    "dp_replicate 2 × tp 2, sequences": {"dp_replicate": 2, "tp": {"degree": 2, **PARTS}},
    "cp 2 × tp 2": {"cp": 2, "tp": 2},
    "cp 2 × tp 2, sequences, loss": {"cp": 2, "tp": {"degree": 2, **BOTH}},
    "cp 2 × tp 2, sequences, computed again": {"cp": 2, "tp": {"degree": 2, **PARTS}, "fsdp": AGAIN},
    "pp 2 × tp 2": {"pp": 2, "tp": 2},
    "pp 2 × tp 2, sequences, loss": {"pp": 2, "tp": {"degree": 2, **BOTH}},
    "pp 2 × tp 2, interleaved, sequences": {
        "pp": {"degree": 2, "schedule": "Interleaved1F1B"},
        "tp": {"degree": 2, **PARTS},
    },
    "cp 4, ring": {"cp": {"degree": 4, "method": "ring"}},
    "dp_shard 2 × cp 2, ring": {
        "dp_shard": 2,
        "cp": {"degree": 2, "method": "ring", "rotate_method": "alltoall"},
    },
}
OTHERS: dict[str, dict[str, Any]] = {
    "tp 4": {"tp": 4},
    "tp 4, sequences": {"tp": {"degree": 4, **PARTS}},
    "dp_shard 2 × tp 2, sequences, computed again": {
        "dp_shard": 2,
        "tp": {"degree": 2, **PARTS},
        "fsdp": AGAIN,
    },
}
CASES = {
    f"{kind}, {name}": (kind, config)
    for kind, configs in {"mixture": MIXTURES, "gpt": GPTS, "gpt2": OTHERS}.items()
    for name, config in configs.items()
}


def _model(kind: str, *, is_even: bool = False) -> Any:
    size = GPTConfig(context=16, width=32, num_layers=4, num_heads=4)
    if kind == "gpt":
        return GPT(size)
    if kind != "mixture":
        return layouts.build(kind)
    model = MixtureGPT(MixtureConfig(gpt=size, num_experts=4))
    if is_even:  # all rows choose the same experts, one on each half of the ranks
        for block in model.blocks:
            nn.init.zeros_(block.mixture.router.weight)  # type: ignore[union-attr, arg-type]
            block.mixture.bias.copy_(torch.tensor([1.0, 0.0, 1.0, 0.0]))  # type: ignore[union-attr, operator]
    return model


def _batch(kind: str) -> dict[str, torch.Tensor]:
    if kind in ("gpt", "mixture"):
        return {"tokens": torch.zeros(2, 17, dtype=torch.uint8)}
    return default_collate(layouts.samples(kind, 1)[:2])


def _sent(kind: str, config: dict[str, Any]) -> Sent:
    """Return the bytes that this rank sends in a step, without those of `fully_shard`. Collective."""
    with provide(config, device="cpu", timeout_s=60) as parallelism:
        model = _model(kind, is_even=True)
        step = _step_of(parallelism, model, _batch(kind))
        step()  # also compares blocks and modules with whole ones
        with (counter := SentBytes()):
            step()
    return dict(counter.sent)


def _step_of(parallelism: Any, model: Any, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Lay a model out, and return a step of training without the update. Collective."""
    module = parallelism.lay_out(model)

    def step() -> None:
        for index in range(MICROBATCHES):
            parallelism.sync_gradients(module, index == MICROBATCHES - 1)
            model.loss(module(batch), batch).backward()

    if not hasattr(parallelism, "run_pipeline"):
        return step
    with parallelism.skip_blocks():
        outputs = module(batch)
        hidden = parallelism.check_skipped([outputs, model.loss(outputs, batch)])
    batches = [batch] * MICROBATCHES

    def loss_of(outputs: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = model.loss(outputs, batches[index])
        return loss

    return lambda: parallelism.run_pipeline(batches, hidden, loss_of, contextlib.nullcontext)


def _by_axis(sent: Sent, tensor: int) -> dict[str, float]:
    """Return the bytes that travel along `tp`, along `pp`, and along `cp` and `ep` together."""
    found = {"tp": 0.0, "pp": 0.0, "cp, ep": 0.0}
    for (name, ranks), size in sent.items():
        if name == "send":
            found["pp"] += size
        elif tensor > 1 and ranks[-1] - ranks[0] == tensor - 1:  # they are consecutive
            found["tp"] += size
        elif name not in ("all_reduce", "allreduce_"):  # these are gradients of copies
            found["cp, ep"] += size
    return found


@pytest.mark.parametrize("name", CASES)
def test_ranks_send_what_was_estimated(four_ranks: StandingRanks, name: str) -> None:
    kind, config = CASES[name]
    with torch.device("meta"):
        model = _model(kind)
    sharding = FSDPConfig(**config.get("fsdp", {}))
    machines = Machines(ranks=4, ranks_each=4)
    estimator = LayoutEstimator(model, _batch(kind), machines, config=sharding, microbatches=MICROBATCHES)
    given = {axis: value for axis, value in config.items() if axis != "fsdp"}
    (found,) = propose_only(estimator, given, None).best
    sent = [_by_axis(one, found.degrees["tp"]) for one in four_ranks.run(_sent, kind, config)]
    # Of stages the one that sends most is estimated. Some ranks have more rows of their experts than others.
    whole = max if "pp" in config else statistics.fmean
    measured = {axis: whole(one[axis] for one in sent) for axis in sent[0]}
    estimated = {axis: found.sent.get(axis, 0.0) for axis in ("tp", "pp")}
    estimated["cp, ep"] = found.sent.get("cp", 0.0) + found.sent.get("ep", 0.0)
    assert measured == pytest.approx(estimated, rel=1e-6)
