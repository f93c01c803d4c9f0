"""A checkpoint that was saved under one layout resumes under any other, equal in every bit."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hocket.trainer import Trainer
from support import layouts
from support.stage_checkpoints import Once
from support.standing_ranks import StandingRanks

LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "dp_shard 2 × tp 2": ({"dp_shard": 2, "tp": 2}, 2),
    "dp_shard 4": ({"dp_shard": 4}, 4),
    "cp 2 × tp 2": ({"dp_shard": 1, "cp": 2, "tp": {"degree": 2, "sequence_parallel": True}}, 1),
    "dp_replicate 2 × dp_shard 2": ({"dp_replicate": 2, "dp_shard": 2}, 4),
    "tp 4": ({"dp_shard": 1, "tp": 4}, 1),
}
TIED = ("dp_shard 2 × tp 2", "dp_shard 4", "dp_replicate 2 × dp_shard 2")
"""The layouts of a model with two heads of keys."""
PAIRS = {
    "gpt": list(itertools.permutations(LAYOUTS, 2)),
    "tied llama": list(zip(TIED, (*TIED[1:], TIED[0]), strict=True)),
    "gpt2": [("cp 2 × tp 2", "dp_shard 4"), ("dp_replicate 2 × dp_shard 2", "tp 4")],
}
"""Every pair for one model. Others differ by a tied weight, saved and loaded once under each layout, and by
packed matrices, which only `tp` cuts."""
CASES = [
    pytest.param(kind, pair, id=f"{kind}: {' to '.join(pair)}")
    for kind, pairs in PAIRS.items()
    for pair in pairs
]


def _run(kind: str, config: dict[str, Any] | None, num_ranks: int, folder: str, load: str | None) -> Any:
    """Train two batches and save, or load; return the whole tensors of model and optimizer. Collective."""
    model = layouts.build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(layouts.samples(kind, 4), batch_size=layouts.GLOBAL_BATCH // num_ranks),
        optimizers=optimizer,
        max_duration="2ba" if load is None else "3ba",
        parallelism_config=config,
        save_folder=folder,
        save_interval="2ba",
        load_path=load,
        progress_bar=False,
        device="cpu",
        seed=7,
    )
    with contextlib.closing(trainer):
        if load is None:
            trainer.fit()
        found = _tensors(model, optimizer)
        if load is not None:
            trainer.fit()
        return found, [name for name, _ in model.named_parameters()]


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = layouts.whole(model)
    for name, one in model.named_parameters():
        for slot in ("exp_avg", "exp_avg_sq"):
            value = optimizer.state[one][slot]
            found[f"{name} {slot}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return {name: value.detach().clone() for name, value in found.items()}


def _check(ranks: StandingRanks, once: Once, folder: Path, kind: str, name: str, other: str) -> None:
    """Save under one layout, and load under another."""

    def save(to: Path) -> tuple[str, Any]:
        config, num_ranks = LAYOUTS[name]
        return str(to / "latest"), ranks.run(_run, kind, config, num_ranks, str(to), None)[0]

    latest, (saved, names) = once(f"{kind} {name}", save)
    config, num_ranks = LAYOUTS[other]
    for found, same_names in ranks.run(_run, kind, config, num_ranks, str(folder), latest):
        assert same_names == names
        assert list(found) == list(saved)
        for tensor, value in saved.items():
            assert torch.equal(found[tensor], value), tensor


def test_a_checkpoint_of_one_layout_resumes_under_another(
    four_ranks: StandingRanks, once: Once, tmp_path: Path
) -> None:
    _check(four_ranks, once, tmp_path, "gpt", "tp 4", "dp_shard 2 × tp 2")


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize(("kind", "pair"), CASES)
def test_every_pair_of_layouts(
    four_ranks: StandingRanks, once: Once, tmp_path: Path, kind: str, pair: tuple[str, str]
) -> None:
    _check(four_ranks, once, tmp_path, kind, *pair)
