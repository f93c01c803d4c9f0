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

TENSOR = {"degree": 2, "sequence_parallel": True, "loss_parallel": True}
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "dp_shard 4": ({"dp_shard": 4}, 4),
    "dp_replicate 2 × dp_shard 2": ({"dp_replicate": 2, "dp_shard": 2}, 4),
    "dp_shard 2 × tp 2": ({"dp_shard": 2, "tp": 2}, 2),
    "dp_shard 2 × tp 2, sequences, loss": ({"dp_shard": 2, "tp": TENSOR}, 2),
    "dp_shard 2 × cp 2": ({"dp_shard": 2, "cp": 2}, 2),
}
CASES = [(kind, name) for kind in ("gpt", "tied llama") for name in LAYOUTS]


def _train(kind: str, config: dict[str, Any] | None, num_ranks: int) -> layouts.Numbers:
    return layouts.train(kind, config, num_ranks, steps=20, precision="amp_bf16")


@functools.cache
def _alone(kind: str) -> layouts.Numbers:
    return _train(kind, None, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_product_of_axes_in_bf16_is_within_the_bound(
    four_ranks: StandingRanks, kind: str, name: str
) -> None:
    found = four_ranks.run(_train, kind, *LAYOUTS[name])
    for one in found:
        differences = one.largest_differences(_alone(kind))
        assert all(differences[key] <= bound for key, bound in BOUNDS.items()), (one.description, differences)
        assert one.losses == found[0].losses
        assert one.norms == found[0].norms
        assert differences["loss"] > 1e-6, "computed in bf16"
    print(f"{kind} | {name} | {' | '.join(f'{value:.1e}' for value in differences.values())}")
