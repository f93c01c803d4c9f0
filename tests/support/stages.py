"""Small models in stages of a pipeline, trained and compared with one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.recipes.gpt import GPT, GPTConfig
from support import layouts

NEEDS_TORCH = pytest.mark.skipif(
    torch.__version__ < "2.10", reason="`pp` needs torch 2.10: gloo of torch 2.9 ends ranks of several stages"
)
TOLERANCE = 1e-5
KINDS = ("gpt", "llama", "qwen3", "mistral", "untied gpt2")


def num_blocks(pipeline: Any) -> int:
    """Return a number of blocks that the stages of a pipeline cannot share evenly: few, for short tests."""
    return 3 if pipeline == 2 else 5


def microbatch_size(pipeline: Any, num_ranks: int, *, is_long: bool) -> int:
    """Return the samples of a microbatch with which each rank has enough microbatches for its stages.

    Args:
        pipeline: The number of stages, or the settings.
        num_ranks: Data-parallel ranks.
        is_long: Whether there are at least four microbatches.
    """
    degree = pipeline if isinstance(pipeline, int) else pipeline["degree"]
    return layouts.GLOBAL_BATCH // num_ranks // (max(4, degree) if is_long else degree)


@functools.cache
def train_alone(kind: str, steps: int, size: int = 2, layers: int = 5) -> layouts.Numbers:
    """Train on one process."""
    return train_layout(kind, None, 1, steps, size, layers)


def train_layout(
    kind: str, config: Any, num_ranks: int, steps: int, size: int = 2, layers: int = 5
) -> layouts.Numbers:
    """Train under a layout, as `layouts.train`, without the callbacks that stages refuse. Collective.

    Args:
        kind: The model.
        config: The `parallelism_config`.
        num_ranks: Data-parallel ranks of it.
        steps: The number of batches.
        size: Samples in a microbatch.
        layers: The number of blocks.
    """
    options = {"callbacks": [], "device_train_microbatch_size": size}
    return layouts.train(kind, config, num_ranks, steps=steps, layers=layers, **options)


def train_stages(kind: str, pipeline: Any, steps: int, size: int = 2, layers: int = 5) -> layouts.Numbers:
    """Train one pipeline. Collective."""
    return train_layout(kind, {"pp": pipeline}, 1, steps, size, layers)


def train_copies(
    kind: str, steps: int, axis: str = "dp_replicate", schedule: str = "1F1B", size: int = 2
) -> layouts.Numbers:
    """Train two pipelines of two ranks, or one whose stages are shards. Collective."""
    return train_layout(kind, {"pp": {"degree": 2, "schedule": schedule}, axis: 2}, 2, steps, size)


def check_numbers(
    found: list[layouts.Numbers], alone: layouts.Numbers, name: str, *, copies: int = 1, num_tied: int = 0
) -> None:
    """Compare each rank's losses and norms, and the parameters of all stages together.

    Args:
        found: The numbers of all ranks.
        alone: Those of one process.
        name: The case, for the table of largest differences.
        copies: The number of ranks that have a stage.
        num_tied: The number of parameters that two stages have, with the same bits.
    """
    for stage in range(0, len(found), copies):
        for one in found[stage + 1 : stage + copies]:
            check_equal(one.trained, found[stage].trained)
    names = [key for one in found[::copies] for key in one.trained]
    assert len(names) == len(alone.trained) + num_tied, "any other parameter is on one stage"
    trained: dict[str, Tensor] = {}
    for one in found:
        for key, value in one.trained.items():
            assert torch.equal(trained.setdefault(key, value), value), key
    assert sorted(trained) == sorted(alone.trained), "parameters have the names of the whole model"
    trained = {key: trained[key] for key in alone.trained}
    for one in found:
        differences = one._replace(trained=trained).largest_differences(alone)
        assert max(differences.values()) <= TOLERANCE, (one.description, differences)
        assert one.losses == found[0].losses
        assert one.norms == found[0].norms
    print(f"{name} | {' | '.join(f'{value:.1e}' for value in differences.values())}")


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare tensors by name in every bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class Five(GPT):
    """A model of five blocks."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(context=layouts.LENGTH - 1, width=24, num_layers=5, num_heads=4))
