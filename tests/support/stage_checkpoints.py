"""Checkpoints of models in stages, loaded under another layout and on one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hocket.trainer import Callback, Trainer
from hocket.trainer.loggers import InMemoryLogger
from support import layouts
from support.standing_ranks import StandingRanks

Layout = tuple[dict[str, Any], int]
"""A `parallelism_config`, and the number of its data-parallel ranks."""
Once = Callable[[str, Callable[[Path], Any]], Any]
"""The fixture `once` of the layouts' tests."""


class Part(NamedTuple):
    """A rank's whole tensors at the start and the end of a part of a training, and its losses."""

    start: dict[str, Tensor]
    end: dict[str, Tensor]
    losses: list[float]


def train_part(
    kind: str,
    layout: Layout | None,
    folder: str,
    load: str | None,
    until: int,
    callbacks: Sequence[Callback] = (),
) -> Part:
    """Train until a batch, from the start or a checkpoint, and save each second batch. Collective."""
    config, num_ranks = (None, 1) if layout is None else layout
    model = layouts.build(kind, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(layouts.samples(kind, 4), batch_size=layouts.GLOBAL_BATCH // num_ranks),
        optimizers=optimizer,
        max_duration=f"{until}ba",
        device_train_microbatch_size=layouts.GLOBAL_BATCH // num_ranks // 4 or 1,
        parallelism_config=config,
        save_folder=folder,
        save_filename="ba{batch}",
        save_interval="2ba",
        load_path=load,
        callbacks=list(callbacks),
        loggers=[memory := InMemoryLogger()],
        progress_bar=False,
        device="cpu",
        seed=7,
    )
    with contextlib.closing(trainer):
        start = {} if load is None else _tensors(model, optimizer)
        trainer.fit()
        losses = [float(value) for _, value in memory.data["loss/train/total"]]
        return Part(start, _tensors(model, optimizer), losses)


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return parameters, slots and buffers by name, without the buffers of other stages. Collective."""
    found = layouts.whole(model)
    buffers = {
        name: one
        for name, one in model.named_buffers()
        if any(key.startswith(f"{name.rpartition('.')[0]}.") for key in found)
    }
    for name, one in model.named_parameters():
        for slot in ("exp_avg", "exp_avg_sq"):
            value = optimizer.state[one][slot]
            found[f"{name} {slot}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return {name: value.detach().clone() for name, value in (found | buffers).items()}


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of all stages; those of one stage are equal on its ranks, and so are tied ones."""
    whole: dict[str, Tensor] = {}
    for tensors in parts:
        for name, value in tensors.items():
            assert torch.equal(whole.setdefault(name, value), value), name
    return whole


def check_pair(
    ranks: StandingRanks,
    once: Once,
    folder: Path,
    kind: str,
    layout: Layout | None,
    other: Layout,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Save under one layout, or on one process, and load under another and on one process."""

    def save(to: Path) -> tuple[str, dict[str, Tensor], Part]:
        first = (kind, layout, f"{to}/saved", None, 2, callbacks)
        parts = ranks.run(train_part, *first) if layout else [train_part(*first)]
        ba2 = f"{to}/saved/ba2"
        alone = train_part(kind, None, f"{to}/alone", ba2, 4, callbacks)
        return ba2, joined([one.end for one in parts]), alone

    ba2, saved, alone = once(f"{kind} {layout}", save)
    resumed = ranks.run(train_part, kind, other, f"{folder}/resumed", ba2, 4, callbacks)
    for found in (joined([one.start for one in resumed]), alone.start):
        assert found.keys() == saved.keys()
        for tensor, value in saved.items():
            assert torch.equal(found[tensor], value), tensor
    for one in resumed:
        assert one.losses == pytest.approx(alone.losses, rel=1e-4)
    assert len(alone.losses) == 2
