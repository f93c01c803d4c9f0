"""Stages whose matrices, sequences and parameters are cut too train and resume as one process does.

Tolerance: losses, gradients' norms and the clipped update in float32 within a relative 1e-5.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hocket.trainer import Trainer
from hocket.trainer.loggers import InMemoryLogger
from support import layouts
from support.stages import NEEDS_TORCH, STEPS, check_numbers, train_alone, train_layout
from support.standing_ranks import StandingRanks, standing_ranks

pytestmark = NEEDS_TORCH

LOOPED = {"degree": 2, "schedule": "Interleaved1F1B"}
SEQUENCE = {"degree": 2, "sequence_parallel": True}
LOSS = {"degree": 2, "loss_parallel": True}
BOTH = {"degree": 2, "sequence_parallel": True, "loss_parallel": True}
Layout = tuple[dict[str, Any], int]
"""A `parallelism_config`, and the number of its data-parallel ranks."""

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
KINDS = ("gpt", "llama", "qwen3", "mistral", "untied gpt2", "mixture")
TWO_HEADS = ("llama", "qwen3", "mistral")
"""Models with two heads of keys, which four ranks of `cp` and `tp` cannot share."""
CASES_OF_4 = [
    (kind, name) for kind in KINDS for name in OF_4 if not ("loss" in name and kind == "untied gpt2")
]
CASES_OF_8 = [
    (kind, name)
    for kind in ("gpt", "llama")
    for name in OF_8
    if not ("cp 2 × tp 2" in name and kind in TWO_HEADS)
]


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[StandingRanks]:
    """Return eight processes that the tests of this file share."""
    with standing_ranks(8) as ranks:
        yield ranks


def _size(num_ranks: int) -> int:
    """Return the samples of a microbatch with which each rank has enough microbatches for its stages."""
    return min(2, layouts.GLOBAL_BATCH // num_ranks // 4) or 1


def _check(ranks: StandingRanks, layout: Layout, kind: str, name: str, steps: int) -> None:
    config, num_ranks = layout
    size = _size(num_ranks)
    found = ranks.run(train_layout, kind, config, num_ranks, steps, size)
    degree = config["pp"] if isinstance(config["pp"], int) else config["pp"]["degree"]
    check_numbers(found, train_alone(kind, steps, size), f"{kind} | {name}", copies=len(found) // degree)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gpt", "pp 2 × tp 2, sequences, interleaved"),
        ("llama", "pp 2 × tp 2"),
        ("gpt", "pp 2 × cp 2"),
        ("llama", "pp 2 × cp 2, interleaved"),
        ("llama", "pp 2 × cp 2, ring"),
    ],
)
def test_cut_stages_train_as_one_process(four_ranks: StandingRanks, kind: str, name: str) -> None:
    _check(four_ranks, OF_4[name], kind, name, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES_OF_4)
def test_a_product_of_stages_trains_as_one_process(four_ranks: StandingRanks, kind: str, name: str) -> None:
    _check(four_ranks, OF_4[name], kind, name, STEPS.get(kind, 20))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES_OF_8)
def test_a_product_of_stages_on_8_ranks_trains_as_one_process(
    eight_ranks: StandingRanks, kind: str, name: str
) -> None:
    _check(eight_ranks, OF_8[name], kind, name, STEPS.get(kind, 20))


CHECKPOINTS: dict[str, Layout] = {
    "pp 2 × tp 2": ({"pp": 2, "tp": 2}, 1),
    "pp 2 × tp 2, sequences": ({"pp": LOOPED, "tp": SEQUENCE}, 1),
    "pp 2 × cp 2": ({"pp": 2, "cp": 2}, 1),
    "pp 4": ({"pp": 4}, 1),
    "pp 2 × dp_shard 2": ({"pp": LOOPED, "dp_shard": 2}, 2),
    "dp_shard 4": ({"dp_shard": 4}, 4),
    "dp_shard 2 × tp 2": ({"dp_shard": 2, "tp": 2}, 2),
}
PAIRS = [
    pair for pair in itertools.permutations(CHECKPOINTS, 2) if any("tp" in one or "cp" in one for one in pair)
]


def _save_or_load(
    kind: str, layout: Layout | None, folder: str, load: str | None
) -> tuple[dict[str, Tensor], list[float]]:
    """Train two batches and save, or load and train two more; return whole tensors and losses. Collective."""
    config, num_ranks = (None, 1) if layout is None else layout
    model = layouts.build(kind, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(layouts.samples(kind, 4), batch_size=layouts.GLOBAL_BATCH // num_ranks),
        optimizers=optimizer,
        max_duration="2ba" if load is None else "4ba",
        device_train_microbatch_size=1,
        parallelism_config=config,
        save_folder=folder,
        save_interval="2ba",
        load_path=load,
        loggers=[memory := InMemoryLogger()],
        progress_bar=False,
        device="cpu",
        seed=7,
    )
    with contextlib.closing(trainer):
        loaded = None if load is None else _tensors(model, optimizer)
        trainer.fit()
        losses = [float(value) for _, value in memory.data["loss/train/total"]]
        return loaded or _tensors(model, optimizer), losses


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = layouts.whole(model)
    for name, one in model.named_parameters():
        for slot in ("exp_avg", "exp_avg_sq"):
            value = optimizer.state[one][slot]
            found[f"{name} {slot}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return {name: value.detach().clone() for name, value in found.items()}


def _joined(results: list[tuple[dict[str, Tensor], list[float]]]) -> dict[str, Tensor]:
    """Return the tensors of all stages; those of one stage are equal on its ranks."""
    joined: dict[str, Tensor] = {}
    for tensors, _ in results:
        for name, value in tensors.items():
            assert torch.equal(joined.setdefault(name, value), value), name
    return joined


def _check_pair(ranks: StandingRanks, folder: Path, kind: str, name: str, other: str) -> None:
    """Save under one layout, and load under another and on one process."""
    saved = _joined(ranks.run(_save_or_load, kind, CHECKPOINTS[name], str(folder / "saved"), None))
    latest = str(folder / "saved" / "latest")
    resumed = ranks.run(_save_or_load, kind, CHECKPOINTS[other], str(folder / "resumed"), latest)
    alone, losses = _save_or_load(kind, None, str(folder / "alone"), latest)
    for found in (_joined(resumed), alone):
        assert found.keys() == saved.keys()
        for tensor, value in saved.items():
            assert torch.equal(found[tensor], value), tensor
    for _, found_losses in resumed:
        assert found_losses == pytest.approx(losses, rel=1e-4)
    assert len(losses) == 2


@pytest.mark.parametrize("pair", [("pp 2 × tp 2", "pp 2 × dp_shard 2"), ("dp_shard 2 × tp 2", "pp 2 × cp 2")])
def test_a_checkpoint_of_cut_stages_resumes_under_another_layout(
    four_ranks: StandingRanks, tmp_path: Path, pair: tuple[str, str]
) -> None:
    _check_pair(four_ranks, tmp_path, "gpt", *pair)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_every_pair_of_layouts_with_cut_stages(
    four_ranks: StandingRanks, tmp_path: Path, kind: str, pair: tuple[str, str]
) -> None:
    _check_pair(four_ranks, tmp_path, kind, *pair)
