"""Every product of axes trains as one process does.

Tolerance: losses, gradients' norms and the clipped update in float32 within a relative 1e-5. The labels of
    the samples differ in number, so that a loss that is weighed by ranks and not by labels is found.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from support import layouts
from support.standing_ranks import StandingRanks

TOLERANCE = 1e-5

LAYOUTS_OF_4: dict[str, tuple[dict[str, Any], int]] = {
    "dp_shard 2 × tp 2": ({"dp_shard": 2, "tp": 2}, 2),
    "dp_replicate 2 × tp 2": ({"dp_replicate": 2, "dp_shard": 1, "tp": 2}, 2),
    "tp 4": ({"dp_shard": 1, "tp": 4}, 1),
    "dp_replicate 2 × dp_shard 2": ({"dp_replicate": 2, "dp_shard": -1}, 4),
    "dp_shard 4": ({"dp_shard": 4}, 4),
    "dp_shard 2 × tp 2, checkpointed": (
        {"tp": -1, "fsdp": {"data_parallel_shard_degree": 2, "activation_checkpointing": True}},
        2,
    ),
}
KINDS = ("gpt", "llama", "tied llama", "qwen2", "qwen3", "mistral", "mixtral", "gpt2", "bert")
TWO_HEADS = ("llama", "tied llama", "qwen2", "qwen3", "mistral", "mixtral")
"""Models with two heads of keys, which four ranks of `tp` cannot share."""
CASES = [(kind, name) for kind in KINDS for name in LAYOUTS_OF_4 if name != "tp 4" or kind not in TWO_HEADS]


@functools.cache
def _alone(kind: str, steps: int) -> layouts.Numbers:
    return layouts.train(kind, None, 1, steps=steps)


def _check(four_ranks: StandingRanks, kind: str, name: str, steps: int) -> None:
    config, num_ranks = LAYOUTS_OF_4[name]
    found = four_ranks.run(_train, kind, config, num_ranks, steps)
    shown = " | ".join(f"{value:.1e}" for value in found[0].largest_differences(_alone(kind, steps)).values())
    print(f"{kind} | {name} | {shown}")  # with `-rP`, the table of largest differences
    for one in found:
        differences = one.largest_differences(_alone(kind, steps))
        assert max(differences.values()) <= TOLERANCE, (one.description, differences)
        assert one.losses == found[0].losses
        assert one.norms == found[0].norms


def _train(kind: str, config: dict[str, Any], num_ranks: int, steps: int) -> layouts.Numbers:
    return layouts.train(kind, config, num_ranks, steps=steps)


def test_tensor_parallel_shards_train_as_one_process(four_ranks: StandingRanks) -> None:
    _check(four_ranks, "gpt", "dp_shard 2 × tp 2", 3)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_product_of_axes_trains_as_one_process(four_ranks: StandingRanks, kind: str, name: str) -> None:
    _check(four_ranks, kind, name, 20)
