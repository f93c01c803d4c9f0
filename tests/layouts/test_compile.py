"""A compiled model trains on shards as one process does."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from support import layouts
from support.ranks import run_ranks

TOLERANCE = 1e-5
COLUMNS = {"byte_embedding": "embedding_colwise", "head": "colwise_gather_output"}
LAYOUTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "dp_shard 4": ("gpt", {"dp_shard": 4}, 4),
    "dp_replicate 2 × dp_shard 2": ("gpt", {"dp_replicate": 2, "dp_shard": 2}, 4),
    "tp 4": ("gpt", {"dp_shard": 1, "tp": 4}, 1),
    "tied": ("tied llama", {"dp_shard": 2, "tp": 2}, 2),
    "columns": ("gpt", {"dp_shard": 2, "tp": {"degree": 2, "plan": COLUMNS}}, 2),
    "sequence_parallel": ("gpt", {"dp_shard": 2, "tp": {"degree": 2, "sequence_parallel": True}}, 2),
    "loss_parallel": ("tied llama", {"dp_shard": 2, "tp": {"degree": 2, "loss_parallel": True}}, 2),
    "dp_shard 2 × cp 2": ("gpt", {"dp_shard": 2, "cp": 2}, 2),
    "dp_shard 2 × cp 2, ring": ("gpt", {"dp_shard": 2, "cp": {"degree": 2, "method": "ring"}}, 2),
    "dp_shard 4, ep 2": ("mixture", {"dp_shard": 4, "ep": 2}, 4),
}


def _train(kind: str, config: dict[str, Any] | None, num_ranks: int) -> layouts.Numbers:
    torch._dynamo.reset()
    compile_config = None if config is None else {"backend": "aot_eager"}
    try:
        return layouts.train(kind, config, num_ranks, compile_config=compile_config)
    finally:
        torch._dynamo.reset()


@functools.cache
def _alone(kind: str) -> layouts.Numbers:
    return _train(kind, None, 1)


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_compiled_model_trains_as_one_process(name: str) -> None:
    """Each layout has new ranks: torch keeps more of a compiled program than `reset` forgets."""
    kind, config, num_ranks = LAYOUTS[name]
    for one in run_ranks(_train, 4, kind, config, num_ranks, init="gloo", timeout_s=240):
        differences = one.largest_differences(_alone(kind))
        assert max(differences.values()) <= TOLERANCE, (one.description, differences)
    print(f"{name} | {differences}")
