"""Products of axes in bf16 stay within a stated bound of one process in bf16.

One process casts by `torch.autocast`, which leaves norms and the loss in float32. Sharded layouts cast the
parameters, so that whole blocks compute in bf16: the numbers differ by roundings, and not by more.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from support import layouts
from support.standing_ranks import StandingRanks

BOUNDS = {"loss": 2e-3, "norm": 0.05, "update": 0.05}
"""The largest relative differences of losses, gradients' norms and the update as a whole after 20 steps."""
UPDATE_OF_EXPERTS = 0.15
"""The same for the update of a mixture, in which a rounding may give a position to another expert."""

TENSOR = {"degree": 2, "sequence_parallel": True, "loss_parallel": True}
DENSE: dict[str, tuple[dict[str, Any], int]] = {
    "dp_shard 4": ({"dp_shard": 4}, 4),
    "dp_replicate 2 × dp_shard 2": ({"dp_replicate": 2, "dp_shard": 2}, 4),
    "dp_shard 2 × tp 2": ({"dp_shard": 2, "tp": 2}, 2),
    "dp_shard 2 × tp 2, sequences, loss": ({"dp_shard": 2, "tp": TENSOR}, 2),
    "dp_shard 2 × cp 2": ({"dp_shard": 2, "cp": 2}, 2),
    "dp_shard 2 × cp 2, ring": ({"dp_shard": 2, "cp": {"degree": 2, "method": "ring"}}, 2),
}
EXPERTS: dict[str, tuple[dict[str, Any], int]] = {
    "ep 4": ({"ep": 4}, 4),
    "dp_shard 4 × ep 2": ({"dp_shard": 4, "ep": 2}, 4),
    "dp_shard 2 × tp 2 × ep 2": ({"tp": 2, "ep": 2}, 2),
    "dp_shard 2 × cp 2 × ep 2": ({"dp_shard": 2, "cp": 2, "ep": 2}, 2),
}
CASES = [
    *(("gpt", name) for name in DENSE),
    *(("tied llama", name) for name in DENSE if "tp" in name or "cp" in name),
    *(("mixture", name) for name in EXPERTS),
]


def _train(kind: str, config: dict[str, Any] | None, num_ranks: int) -> layouts.Numbers:
    return layouts.train(kind, config, num_ranks, steps=20, precision="amp_bf16")


@functools.cache
def _alone(kind: str) -> layouts.Numbers:
    return _train(kind, None, 1)


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_product_of_axes_in_bf16_is_within_the_bound(
    four_ranks: StandingRanks, kind: str, name: str
) -> None:
    found = four_ranks.run(_train, kind, *(DENSE | EXPERTS)[name])
    for one in found:
        differences = one.largest_differences(_alone(kind))
        bounds = BOUNDS | ({"update": UPDATE_OF_EXPERTS} if kind == "mixture" else {})
        assert all(differences[key] <= bound for key, bound in bounds.items()), (one.description, differences)
        assert one.losses == found[0].losses
        assert one.norms == found[0].norms
        assert differences["loss"] > 1e-6, "computed in bf16"
    print(f"{kind} | {name} | {' | '.join(f'{value:.1e}' for value in differences.values())}")
