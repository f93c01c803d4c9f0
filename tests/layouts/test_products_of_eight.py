"""Products of two and of three axes on two and on eight ranks train as one process does, as those on four do.

Of each product a dense model, a mixture of experts or a ResNet; the tolerance is that of `test_products.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from hocket.recipes.mixture import ExpertBalance
from hocket.trainer.callbacks import GradNormMonitor
from support import layouts
from support.standing_ranks import StandingRanks

TOLERANCE = 1e-5
TENSOR = {"degree": 2, "sequence_parallel": True, "loss_parallel": True}

DATA: dict[str, tuple[dict[str, Any], int]] = {
    "dp_replicate 8": ({"dp_replicate": 8, "dp_shard": 1}, 8),
    "dp_shard 8": ({"dp_shard": 8}, 8),
    "dp_replicate 2 × dp_shard 4": ({"dp_replicate": 2, "dp_shard": 4}, 8),
    "dp_replicate 4 × dp_shard 2": ({"dp_replicate": 4, "dp_shard": 2}, 8),
}
DENSE: dict[str, tuple[dict[str, Any], int]] = {
    "dp_shard 4 × tp 2": ({"dp_shard": 4, "tp": 2}, 4),
    "dp_shard 2 × tp 4": ({"dp_shard": 2, "tp": 4}, 2),
    "dp_replicate 4 × tp 2": ({"dp_replicate": 4, "dp_shard": 1, "tp": 2}, 4),
    "dp_replicate 2 × dp_shard 2 × tp 2": ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, 4),
    "dp_shard 4 × tp 2, sequences, loss": ({"dp_shard": 4, "tp": TENSOR}, 4),
    "dp_shard 2 × tp 4, sequences, loss": ({"dp_shard": 2, "tp": {**TENSOR, "degree": 4}}, 2),
    "dp_replicate 2 × dp_shard 2 × tp 2, sequences, loss": (
        {"dp_replicate": 2, "dp_shard": 2, "tp": TENSOR},
        4,
    ),
    "dp_shard 4 × cp 2": ({"dp_shard": 4, "cp": 2}, 4),
    "dp_shard 2 × cp 4": ({"dp_shard": 2, "cp": 4}, 2),
    "dp_replicate 4 × cp 2": ({"dp_replicate": 4, "dp_shard": 1, "cp": 2}, 4),
    "dp_replicate 2 × dp_shard 2 × cp 2": ({"dp_replicate": 2, "dp_shard": 2, "cp": 2}, 4),
    "dp_shard 2 × cp 2 × tp 2": ({"dp_shard": 2, "cp": 2, "tp": 2}, 2),
    "dp_shard 2 × cp 2 × tp 2, sequences, loss": ({"dp_shard": 2, "cp": 2, "tp": TENSOR}, 2),
    "dp_replicate 2 × cp 2 × tp 2": ({"dp_replicate": 2, "dp_shard": 1, "cp": 2, "tp": 2}, 2),
}
EXPERTS: dict[str, tuple[dict[str, Any], int]] = {
    "dp_shard 8 × ep 2": ({"dp_shard": 8, "ep": 2}, 8),
    "dp_shard 8 × ep 4": ({"dp_shard": 8, "ep": 4}, 8),
    "dp_replicate 2 × dp_shard 4 × ep 2": ({"dp_replicate": 2, "dp_shard": 4, "ep": 2}, 8),
    "dp_replicate 2 × dp_shard 4 × ep 4": ({"ep": 4}, 8),
    "dp_shard 4 × tp 2 × ep 2": ({"dp_shard": 4, "tp": 2, "ep": 2}, 4),
    "dp_shard 4 × tp 2 × ep 4": ({"tp": 2, "ep": 4}, 4),
    "dp_replicate 2 × dp_shard 2 × tp 2 × ep 2": ({"tp": TENSOR, "ep": 2}, 4),
    "dp_shard 4 × cp 2 × ep 2": ({"dp_shard": 4, "cp": 2, "ep": 2}, 4),
    "dp_shard 4 × cp 2 × ep 4": ({"dp_shard": 4, "cp": 2, "ep": 4}, 4),
    "dp_replicate 2 × dp_shard 2 × cp 2 × ep 2": (
        {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "ep": 2},
        4,
    ),
    "dp_shard 2 × cp 2 × tp 2 × ep 2": ({"dp_shard": 2, "cp": 2, "tp": 2, "ep": 2}, 2),
    "dp_shard 2 × cp 2 × tp 2 × ep 4, sequences, loss": ({"dp_shard": 2, "cp": 2, "tp": TENSOR, "ep": 4}, 2),
}
OF_TWO: dict[str, tuple[dict[str, Any], int]] = {
    "dp_replicate 2": ({"dp_replicate": 2, "dp_shard": 1}, 2),
    "dp_shard 2": ({"dp_shard": 2}, 2),
    "tp 2": ({"tp": 2}, 1),
    "tp 2, sequences, loss": ({"tp": TENSOR}, 1),
    "cp 2": ({"cp": 2}, 1),
}
LAYOUTS = DATA | DENSE | EXPERTS
CUT_BY_FOUR = [name for name in DENSE if "tp 4" in name or "cp 4" in name or "cp 2 × tp 2" in name]
"""Four ranks of `cp` and `tp` cannot share the two heads of keys of the Llama."""
CASES = [
    *(("gpt", name) for name in (*DATA, *DENSE)),
    *(("resnet", name) for name in DATA),
    *(("tied llama", name) for name in DENSE if name not in CUT_BY_FOUR),
    *(("mixture", name) for name in ("dp_shard 8", "dp_shard 4 × tp 2", "dp_shard 4 × cp 2", *EXPERTS)),
]
CASES_OF_TWO = [
    *((kind, name) for kind in ("gpt", "tied llama", "mixture") for name in OF_TWO),
    *(("resnet", name) for name in ("dp_replicate 2", "dp_shard 2")),
    ("mixture", "ep 2"),
]


def _train(
    kind: str, config: dict[str, Any] | None, num_ranks: int, steps: int, size: int | None = None
) -> layouts.Numbers:
    callbacks = [GradNormMonitor(), *([ExpertBalance()] if kind == "mixture" else [])]
    options = {} if size is None else {"device_train_microbatch_size": size}
    return layouts.train(kind, config, num_ranks, steps=steps, callbacks=callbacks, **options)


@functools.cache
def _alone(kind: str, steps: int) -> layouts.Numbers:
    return _train(kind, None, 1, steps)


def _check(ranks: StandingRanks, kind: str, name: str, layout: tuple[dict[str, Any], int]) -> None:
    # Eight ranks share two cores: with `dp`, gradients of several microbatches are for the products of four.
    size = layouts.GLOBAL_BATCH // layout[1] if ranks.world_size == 8 else None
    found = ranks.run(_train, kind, *layout, 20, size)
    for one in found:
        differences = one.largest_differences(_alone(kind, 20))
        assert max(differences.values()) <= TOLERANCE, (one.description, differences)
        assert one.losses == found[0].losses
        assert one.norms == found[0].norms
    print(f"{kind} | {name} | {' | '.join(f'{value:.1e}' for value in differences.values())}")


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_product_of_axes_on_eight_ranks_trains_as_one_process(
    eight_ranks: StandingRanks, kind: str, name: str
) -> None:
    _check(eight_ranks, kind, name, LAYOUTS[name])


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize(("kind", "name"), CASES_OF_TWO)
def test_an_axis_on_two_ranks_trains_as_one_process(two_ranks: StandingRanks, kind: str, name: str) -> None:
    _check(two_ranks, kind, name, OF_TWO.get(name, ({"ep": 2}, 2)))
