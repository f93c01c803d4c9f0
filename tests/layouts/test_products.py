"""Every product of axes trains as one process does.

Tolerance: losses, gradients' norms and the clipped update in float32 within a relative 1e-5. The labels of
    the samples differ in number, so that a loss that is weighed by ranks and not by labels is found.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch

from hocket.dist import provide
from support import layouts
from support.standing_ranks import StandingRanks

TOLERANCE = 1e-5

LAYOUTS_OF_4: dict[str, tuple[dict[str, Any], int]] = {
    "dp_shard 2 × tp 2": ({"dp_shard": 2, "tp": 2}, 2),
    "dp_replicate 2 × tp 2": ({"dp_replicate": 2, "dp_shard": 1, "tp": 2}, 2),
    "tp 4": ({"dp_shard": 1, "tp": 4}, 1),
    "dp_replicate 2 × dp_shard 2": ({"dp_replicate": 2, "dp_shard": -1}, 4),
    "dp_shard 4": ({"dp_shard": 4}, 4),
    "dp_shard 2 × tp 2, offloaded": (
        {"dp_shard": 2, "tp": 2, "fsdp": {"cpu_offload": True, "activation_cpu_offload": True}},
        2,
    ),
    "dp_shard 2 × tp 2, checkpointed": (
        {"tp": -1, "fsdp": {"data_parallel_shard_degree": 2, "activation_checkpointing": True}},
        2,
    ),
}
SEQUENCE = {"degree": 2, "sequence_parallel": True}
LOSS = {"degree": 2, "loss_parallel": True}
BOTH = {"degree": 4, "sequence_parallel": True, "loss_parallel": True}
LAYOUTS_OF_SEQUENCES: dict[str, tuple[dict[str, Any], int]] = {
    "dp_shard 2 × tp 2, sequences": ({"dp_shard": 2, "tp": SEQUENCE}, 2),
    "dp_shard 2 × tp 2, sequences, checkpointed": (
        {"tp": SEQUENCE, "fsdp": {"data_parallel_shard_degree": 2, "activation_checkpointing": True}},
        2,
    ),
    "dp_replicate 2 × tp 2, loss": ({"dp_replicate": 2, "dp_shard": 1, "tp": LOSS}, 2),
    "tp 4, sequences, loss": ({"dp_shard": 1, "tp": BOTH}, 1),
    "dp_shard 2 × cp 2": ({"dp_shard": 2, "cp": 2}, 2),
    "dp_replicate 2 × cp 2, checkpointed": (
        {
            "cp": 2,
            "fsdp": {"data_parallel_replicate_degree": 2, "activation_checkpointing": True},
        },
        2,
    ),
    "cp 4": ({"dp_shard": 1, "cp": 4}, 1),
    "cp 2 × tp 2": ({"dp_shard": 1, "cp": 2, "tp": 2}, 1),
    "cp 2 × tp 2, sequences": ({"dp_shard": 1, "cp": 2, "tp": SEQUENCE}, 1),
}
LAYOUTS_OF_4 |= LAYOUTS_OF_SEQUENCES
CUT_BY_4 = ("tp 4", "tp 4, sequences, loss", "cp 4", "cp 2 × tp 2", "cp 2 × tp 2, sequences")
"""The layouts in which four ranks share heads, of which the Llama has two of keys."""
OTHERS: dict[str, tuple[str, ...]] = {
    "resnet": ("dp_replicate 2 × dp_shard 2", "dp_shard 4"),
    "llama": ("dp_replicate 2 × tp 2, loss",),
    "qwen2": ("dp_shard 2 × tp 2", "dp_shard 2 × cp 2"),
    "qwen3": ("dp_shard 2 × tp 2, sequences", "dp_replicate 2 × cp 2, checkpointed"),
    "mistral": ("dp_replicate 2 × tp 2, loss", "dp_shard 2 × cp 2"),
    "mixtral": ("dp_shard 2 × tp 2, checkpointed", "dp_shard 2 × tp 2, sequences", "dp_shard 2 × cp 2"),
    "gpt2": ("tp 4", "cp 2 × tp 2, sequences"),
    "bert": ("tp 4", "dp_shard 2 × tp 2, sequences", "cp 4", "cp 2 × tp 2"),
}
"""Other models under layouts that differ for them: by biases or norms of queries, experts, packed matrices,
or attention in both directions."""
CASES = [
    *(("gpt", name) for name in LAYOUTS_OF_4),
    *(("tied llama", name) for name in LAYOUTS_OF_4 if name not in CUT_BY_4),
    *((kind, name) for kind, names in OTHERS.items() for name in names),
]


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


@pytest.mark.parametrize("name", ["cp 2 × tp 2, sequences", "tp 4, sequences, loss"])
def test_cut_shards_and_sequences_train_as_one_process(four_ranks: StandingRanks, name: str) -> None:
    _check(four_ranks, "gpt", name, 3)


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_product_of_axes_trains_as_one_process(four_ranks: StandingRanks, kind: str, name: str) -> None:
    _check(four_ranks, kind, name, layouts.num_steps(kind))


def _train_by_deepspeed() -> layouts.Numbers:
    config = {
        "zero_optimization": {"stage": 3},
        "tensor_parallel": {"autotp_size": 2},
        "train_batch_size": layouts.GLOBAL_BATCH,
    }
    return layouts.train("gpt", None, 2, deepspeed_config=config)


def test_axes_of_a_deepspeed_config_train_as_one_process(four_ranks: StandingRanks) -> None:
    for one in four_ranks.run(_train_by_deepspeed):
        assert "dp_shard 2 × tp 2" in one.description
        assert max(one.largest_differences(_alone("gpt", 3)).values()) <= TOLERANCE


def _values(kind: str, config: dict[str, Any], is_rank_0_only: bool) -> dict[str, torch.Tensor]:
    """Return the initial values of a model that is built on the meta device, on all ranks or but rank 0."""
    with provide(config, device="cpu", timeout_s=60) as parallelism:
        torch.manual_seed(5)
        is_real = is_rank_0_only and parallelism.global_rank == 0
        with contextlib.nullcontext() if is_real else torch.device("meta"):
            model = layouts.build(kind)
        parallelism.lay_out(model)
        return layouts.whole(model)


@pytest.mark.parametrize("is_rank_0_only", [False, True])
def test_initial_values_are_the_same_under_every_layout(
    four_ranks: StandingRanks, is_rank_0_only: bool
) -> None:
    by_layout = [
        values
        for config in (
            {"dp_shard": 4},
            {"dp_shard": 2, "tp": 2},
            {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
            {"dp_shard": 1, "tp": 4},
        )
        for values in four_ranks.run(_values, "gpt", config, is_rank_0_only)
    ]
    for values in by_layout:
        for name, value in by_layout[0].items():
            assert torch.equal(values[name], value), name
    if is_rank_0_only:
        for name, value in layouts.whole(layouts.build("gpt")).items():
            assert torch.equal(by_layout[0][name], value), name
