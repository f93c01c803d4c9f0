"""Stages whose matrices, sequences and parameters are cut too train and resume as one process does.

Tolerance: losses, gradients' norms and the clipped update in float32 within a relative 1e-5.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from support import layouts
from support.stage_checkpoints import Layout, Once, check_pair
from support.stages import (
    NEEDS_TORCH,
    check_numbers,
    microbatch_size,
    num_blocks,
    train_alone,
    train_layout,
)
from support.standing_ranks import StandingRanks

pytestmark = NEEDS_TORCH

LOOPED = {"degree": 2, "schedule": "Interleaved1F1B"}
SEQUENCE = {"degree": 2, "sequence_parallel": True}
LOSS = {"degree": 2, "loss_parallel": True}
BOTH = {"degree": 2, "sequence_parallel": True, "loss_parallel": True}

OF_4: dict[str, Layout] = {
    "pp 2 × tp 2": ({"pp": 2, "tp": 2}, 1),
    "pp 2 × tp 2, interleaved": ({"pp": LOOPED, "tp": 2}, 1),
    "pp 2 × tp 2, sequences": ({"pp": 2, "tp": SEQUENCE}, 1),
    "pp 2 × tp 2, sequences, interleaved": ({"pp": LOOPED, "tp": SEQUENCE}, 1),
    "pp 2 × tp 2, loss": ({"pp": 2, "tp": LOSS}, 1),
    "pp 2 × cp 2": ({"pp": 2, "cp": 2}, 1),
    "pp 2 × cp 2, interleaved": ({"pp": LOOPED, "cp": 2}, 1),
    "pp 2 × cp 2, ring": ({"pp": 2, "cp": {"degree": 2, "method": "ring"}}, 1),
}
OF_8: dict[str, Layout] = {
    "pp 2 × dp_shard 2 × tp 2": ({"pp": 2, "dp_shard": 2, "tp": 2}, 2),
    "pp 2 × dp_replicate 2 × tp 2": ({"pp": 2, "dp_replicate": 2, "tp": 2}, 2),
    "pp 2 × dp_shard 2 × tp 2, sequences, loss": ({"pp": LOOPED, "dp_shard": 2, "tp": BOTH}, 2),
    "pp 2 × dp_shard 2 × cp 2": ({"pp": 2, "dp_shard": 2, "cp": 2}, 2),
    "pp 2 × dp_replicate 2 × cp 2, interleaved": ({"pp": LOOPED, "dp_replicate": 2, "cp": 2}, 2),
    "pp 2 × cp 2 × tp 2, sequences": ({"pp": 2, "cp": 2, "tp": SEQUENCE}, 1),
    "pp 4 × tp 2": ({"pp": 4, "tp": 2}, 1),
    "pp 2 × dp_replicate 2 × dp_shard 2": ({"pp": 2, "dp_replicate": 2, "dp_shard": 2}, 4),
}
CASES_OF_4 = [
    *(("gpt", name) for name in OF_4),
    *(
        ("mixture", name)
        for name in ("pp 2 × tp 2", "pp 2 × tp 2, sequences", "pp 2 × cp 2", "pp 2 × cp 2, ring")
    ),
    *(
        ("llama", name)
        for name in ("pp 2 × tp 2, sequences, interleaved", "pp 2 × tp 2, loss", "pp 2 × cp 2, ring")
    ),
    *(("qwen3", name) for name in ("pp 2 × tp 2, sequences", "pp 2 × cp 2, interleaved")),
    *(("untied gpt2", name) for name in ("pp 2 × tp 2, sequences, interleaved", "pp 2 × cp 2")),
]
CASES_OF_8 = [
    *(("gpt", name) for name in OF_8),
    *(
        ("tied llama", name)
        for name in (
            "pp 2 × dp_shard 2 × tp 2",
            "pp 2 × dp_shard 2 × tp 2, sequences, loss",
            "pp 2 × dp_shard 2 × cp 2",
            "pp 2 × dp_replicate 2 × dp_shard 2",
        )
    ),
]
"""Every layout for one model. Others differ by what `tp` and `cp` cut: routers, two heads of keys, norms of
queries, and packed matrices; `test_pipeline_tied.py` has those of four ranks for tied weights."""


def _check(ranks: StandingRanks, layout: Layout, kind: str, name: str, steps: int) -> None:
    config, num_ranks = layout
    size = microbatch_size(config["pp"], num_ranks, is_long=ranks.world_size == 4)
    blocks = num_blocks(config["pp"])
    found = ranks.run(train_layout, kind, config, num_ranks, steps, size, blocks)
    degree = config["pp"] if isinstance(config["pp"], int) else config["pp"]["degree"]
    copies, num_tied = len(found) // degree, int(kind.startswith("tied"))
    alone = train_alone(kind, steps, layers=blocks)
    check_numbers(found, alone, f"{kind} | {name}", copies=copies, num_tied=num_tied)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gpt", "pp 2 × tp 2, sequences, interleaved"),
        ("llama", "pp 2 × cp 2, ring"),
    ],
)
def test_cut_stages_train_as_one_process(four_ranks: StandingRanks, kind: str, name: str) -> None:
    _check(four_ranks, OF_4[name], kind, name, 3)


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize(("kind", "name"), CASES_OF_4)
def test_a_product_of_stages_trains_as_one_process(four_ranks: StandingRanks, kind: str, name: str) -> None:
    _check(four_ranks, OF_4[name], kind, name, layouts.num_steps(kind))


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize(("kind", "name"), CASES_OF_8)
def test_a_product_of_stages_on_8_ranks_trains_as_one_process(
    eight_ranks: StandingRanks, kind: str, name: str
) -> None:
    _check(eight_ranks, OF_8[name], kind, name, layouts.num_steps(kind))


CHECKPOINTS: dict[str, Layout] = {
    "pp 2 × tp 2": ({"pp": 2, "tp": 2}, 1),
    "pp 2 × tp 2, sequences": ({"pp": LOOPED, "tp": SEQUENCE}, 1),
    "pp 2 × cp 2": ({"pp": 2, "cp": 2}, 1),
    "pp 2 × dp_shard 2": ({"pp": LOOPED, "dp_shard": 2}, 2),
    "dp_shard 4": ({"dp_shard": 4}, 4),
    "dp_shard 2 × tp 2": ({"dp_shard": 2, "tp": 2}, 2),
}
PAIRS = [
    pair for pair in itertools.permutations(CHECKPOINTS, 2) if any("tp" in one or "cp" in one for one in pair)
]
RESUMED = [
    *(("gpt", pair) for pair in PAIRS),
    ("llama", ("pp 2 × tp 2, sequences", "pp 2 × cp 2")),
    ("llama", ("pp 2 × cp 2", "dp_shard 2 × tp 2")),
]
"""Every pair for one model, and two of a model with two heads of keys."""


def test_a_checkpoint_of_cut_stages_resumes_under_another_layout(
    four_ranks: StandingRanks, once: Once, tmp_path: Path
) -> None:
    pair = ("pp 2 × tp 2", "pp 2 × cp 2")
    check_pair(four_ranks, once, tmp_path, "gpt", *map(CHECKPOINTS.__getitem__, pair))


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize(
    ("kind", "pair"),
    [pytest.param(kind, pair, id=f"{kind}: {' to '.join(pair)}") for kind, pair in RESUMED],
)
def test_every_pair_of_layouts_with_cut_stages(
    four_ranks: StandingRanks, once: Once, tmp_path: Path, kind: str, pair: tuple[str, str]
) -> None:
    check_pair(four_ranks, once, tmp_path, kind, *map(CHECKPOINTS.__getitem__, pair))
