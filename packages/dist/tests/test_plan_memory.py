"""The memory that `hocket-launch plan` estimates for a layout is what the ranks of that layout then use."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hocket.dist.memory.layouts import LayoutEstimator, Machines
from hocket.dist.memory.proposal import propose_only
from hocket.recipes.gpt import GPT, GPTConfig
from hocket.recipes.mixture import MixtureConfig, MixtureGPT
from hocket.trainer import Trainer
from support.ranks import run_ranks
from support.sampling import plan
from support.stages import NEEDS_TORCH

TOLERANCE = 0.1
MIB = 2**20
LENGTH, ROWS, MICROBATCHES = 64, 2, 2
LOOPED = {"degree": 2, "schedule": "Interleaved1F1B"}
LAYOUTS_OF_2: dict[str, dict[str, Any]] = {
    "dp_shard 2": {"dp_shard": 2},
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
    "cp 2": {"cp": 2},
    "cp 2, ring": {"cp": {"degree": 2, "method": "ring"}},
    "tp 2, sequences, loss": {"tp": {"degree": 2, "sequence_parallel": True, "loss_parallel": True}},
    "tp 2, a plan": {
        "tp": {"degree": 2, "plan": {"blocks.*.mlp_in": "colwise", "blocks.*.mlp_out": "rowwise"}}
    },
}
LAYOUTS_OF_4: dict[str, dict[str, Any]] = {
    "pp 2 × tp 2": {"pp": 2, "tp": 2},
    "pp 2 × cp 2": {"pp": 2, "cp": 2},
    "pp 4": {"pp": 4},
    "pp 4, interleaved": {"pp": {**LOOPED, "degree": 4}},
    "pp 2 × dp_replicate 2, breadth first": {"pp": {**LOOPED, "schedule": "LoopedBFS"}, "dp_replicate": 2},
    "pp 2 × dp_shard 2, interleaved": {"pp": LOOPED, "dp_shard": 2},
    "pp 2 × tp 2, interleaved": {"pp": LOOPED, "tp": 2},
    "pp 2 × dp_replicate 2, later weights": {
        "pp": {**LOOPED, "schedule": "InterleavedZeroBubble"},
        "dp_replicate": 2,
    },
    "pp 2 × dp_replicate 2, both ends on a rank": {
        "pp": {**LOOPED, "schedule": "ZBVZeroBubble"},
        "dp_replicate": 2,
    },
}
EXPERTS_OF_4: dict[str, dict[str, Any]] = {
    "dp_shard 4": {"dp_shard": 4},
    "ep 4": {"dp_shard": 4, "ep": 4},
    "dp_shard 4 × ep 2": {"dp_shard": 4, "ep": 2},
    "dp_replicate 2 × dp_shard 2 × ep 2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "dp_shard 2 × tp 2 × ep 2": {"dp_shard": 2, "tp": 2, "ep": 2},
    "dp_shard 2 × cp 2 × ep 2": {"dp_shard": 2, "cp": 2, "ep": 2},
}
EXPERTS_OF_STAGES: dict[str, dict[str, Any]] = {
    "pp 2 × dp_shard 2 × ep 2": {"pp": 2, "dp_shard": 2, "ep": 2},
    "pp 2 × dp_shard 2 × ep 2, interleaved": {"pp": LOOPED, "dp_shard": 2, "ep": 2},
}
LAYOUTS_OF_8: dict[str, dict[str, Any]] = {
    "dp_replicate 2 × dp_shard 2 × tp 2": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    "pp 4 × dp_shard 2": {"pp": 4, "dp_shard": 2},
    "dp_shard 2 × cp 2 × tp 2": {"dp_shard": 2, "cp": 2, "tp": 2},
    "pp 2 × dp_shard 2 × tp 2": {"pp": 2, "dp_shard": 2, "tp": 2},
    "pp 2 × cp 2 × tp 2": {"pp": 2, "cp": 2, "tp": 2},
}
ON_REQUEST = pytest.mark.skipif(not plan().asks_for("slow"), reason="many ranks, for a minute: `-m slow`")
SIZE = (384, 8)
"""The width and the blocks of the model."""
EXPERTS = (256, 4, 8)
"""The width, the blocks and the experts of a block of a mixture."""

# Return freed blocks to the system at once, so that the resident set has used memory only.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs /proc/self/clear_refs"
)


def _model(width: int, num_layers: int, num_experts: int = 0) -> GPT:
    config = GPTConfig(context=LENGTH, width=width, num_layers=num_layers, num_heads=8)
    if num_experts:
        return MixtureGPT(MixtureConfig(gpt=config, num_experts=num_experts))
    return GPT(config)


def _samples(num_microbatches: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    return [
        {"tokens": torch.randint(256, (LENGTH + 1,), generator=generator, dtype=torch.uint8)}
        for _ in range(2 * 8 * ROWS * num_microbatches)
    ]


def _train(degrees: dict[str, Any], size: tuple[int, ...], num_microbatches: int) -> None:
    # A model that each process builds whole takes room that the estimate leaves out; stages are cut from one.
    has_stages = "pp" in degrees
    with torch.device("cpu" if has_stages else "meta"):
        model = _model(*size)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(_samples(num_microbatches), batch_size=ROWS * num_microbatches),
        optimizers=optimizer,
        device_train_microbatch_size=ROWS,
        max_duration="2ba",
        parallelism_config=degrees,
        progress_bar=False,
        device="cpu",
        seed=7,
    )
    with contextlib.closing(trainer):
        if has_stages:
            gc.collect()
            _forget_peak()
        trainer.fit()


def _num_microbatches(degrees: dict[str, Any]) -> int:
    pipeline = degrees.get("pp", 1)
    return 4 if isinstance(pipeline, dict) else max(MICROBATCHES, pipeline)


def _peaks(layouts: dict[str, dict[str, Any]], size: tuple[int, ...]) -> dict[str, int]:
    """Return the growth of the resident set of each layout, from before the model to the peak of training."""
    torch.set_num_threads(1)
    peaks = {}
    for name, degrees in layouts.items():
        num_microbatches = _num_microbatches(degrees)
        _train(degrees, (32, *size[1:]), num_microbatches)  # makes torch load and cache what it needs
        gc.collect()
        _forget_peak()
        before = _status("VmRSS")
        _train(degrees, size, num_microbatches)
        peaks[name] = _status("VmHWM") - before
        gc.collect()
    return peaks


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _check(layouts: dict[str, dict[str, Any]], world_size: int, size: tuple[int, ...]) -> None:
    with torch.device("meta"):
        model = _model(*size)
    batch = {"tokens": torch.zeros(ROWS, LENGTH + 1, dtype=torch.uint8)}
    machines = Machines(ranks=world_size, ranks_each=world_size)
    by_rank = run_ranks(_peaks, world_size, layouts, size, init="gloo", timeout_s=400, env=ENVIRONMENT)
    wrong = []
    for name, degrees in layouts.items():
        estimator = LayoutEstimator(model, batch, machines, microbatches=_num_microbatches(degrees))
        (estimate,) = propose_only(estimator, degrees, None).best
        # The estimate is that of the rank that needs most.
        measured = max(peaks[name] for peaks in by_rank)
        ratio = measured / estimate.memory.total
        print(f"{name}: {measured / MIB:.0f} MiB resident, {ratio:.3f} of the estimate; {estimate.memory}")
        if abs(ratio - 1) > TOLERANCE:
            wrong.append(
                f"{name}: {measured / MIB:.0f} MiB used, {estimate.memory.total / MIB:.0f} estimated"
            )
    assert not wrong, wrong


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize("name", LAYOUTS_OF_2)
def test_two_ranks_use_the_memory_that_was_estimated(name: str) -> None:
    _check({name: LAYOUTS_OF_2[name]}, 2, SIZE)


@pytest.mark.slow(one_run_in=4)
@ON_REQUEST
@NEEDS_TORCH
def test_four_ranks_of_stages_use_the_memory_that_was_estimated() -> None:
    _check(LAYOUTS_OF_4, 4, SIZE)


@pytest.mark.slow(one_run_in=4)
@ON_REQUEST
def test_four_ranks_with_experts_use_the_memory_that_was_estimated() -> None:
    _check(EXPERTS_OF_4, 4, EXPERTS)


@pytest.mark.slow(one_run_in=4)
@ON_REQUEST
@NEEDS_TORCH
def test_four_ranks_of_stages_with_experts_use_the_memory_that_was_estimated() -> None:
    _check(EXPERTS_OF_STAGES, 4, EXPERTS)


@pytest.mark.slow(one_run_in=4)
@ON_REQUEST
def test_eight_ranks_use_the_memory_that_was_estimated() -> None:
    _check(LAYOUTS_OF_8, 8, SIZE)
