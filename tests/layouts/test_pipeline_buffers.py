"""State outside of the blocks of a model in stages: saved by the stage that changes it, or refused."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hocket.dist import ModelError
from hocket.recipes.gpt import GPT, GPTConfig
from hocket.trainer import Trainer
from support import layouts
from support.stages import NEEDS_TORCH
from support.standing_ranks import StandingRanks

pytestmark = NEEDS_TORCH

FOUR = {"pp": 4}
TURNED = {"pp": {"degree": 4, "schedule": "ZBVZeroBubble"}}
"""The first of four ranks has the first and the last of eight stages."""
LOOPED = {"pp": {"degree": 4, "schedule": "Interleaved1F1B"}}


class Tracking(GPT):
    """A model with buffers of its own, changed before the blocks, after them and by the loss."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__(GPTConfig(context=layouts.LENGTH - 1, width=24, num_layers=layers, num_heads=4))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(24))
        self.register_buffer("late_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("running_loss", None)
        self.register_buffer("evaluated", torch.zeros(24))
        self.register_buffer("still", torch.arange(3.0))
        self.register_buffer("turns", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("from_second_batch", torch.zeros(24))
        # Registered before the blocks and used after them.
        self.centre = nn.BatchNorm1d(24, affine=False)
        self.blocks = self._modules.pop("blocks")
        self.norm, self.head = self._modules.pop("norm"), self._modules.pop("head")

    def encode(self, seen: Tensor) -> Tensor:
        x = self.byte_embedding(seen) + self.position_embedding.weight[: seen.shape[1]]
        with torch.no_grad():
            if self.training:
                self.seen.lerp_(x.abs().mean(), 0.25)
                self.calls = self.calls + 1
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            mean = x.mean((0, 1))
            if self.training:
                self.mean.data.lerp_(mean, 0.25)
                self.late_calls = self.late_calls + 1
                self.turns += 1
                if self.turns > layouts.GLOBAL_BATCH:
                    self.from_second_batch.lerp_(mean, 0.25)
                self.centre(x.flatten(0, 1))
            else:
                self.evaluated.lerp_(mean, 0.5)
        features: Tensor = self.norm(x)
        return features

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = super().loss(outputs, batch)
        if self.training:
            last = loss.detach() if self.running_loss is None else self.running_loss
            self.running_loss = last.lerp(loss.detach(), 0.25)
        return loss


def _save(config: Any, layers: int, folder: str) -> dict[str, Tensor]:
    """Train three batches with an evaluation after each, and save. Collective with several ranks."""
    torch.manual_seed(3)
    model = Tracking(layers)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(layouts.samples("gpt", 3), batch_size=layouts.GLOBAL_BATCH),
        eval_dataloader=DataLoader(layouts.samples("gpt", 1), batch_size=4),
        eval_interval="1ba",
        optimizers=torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4),
        max_duration="3ba",
        device_train_microbatch_size=1,
        parallelism_config=config,
        save_folder=folder,
        save_filename="saved",
        save_interval="3ba",
        progress_bar=False,
        device="cpu",
        seed=7,
    )
    with contextlib.closing(trainer):
        trainer.fit()
        return {name: one.detach().clone() for name, one in model.named_buffers()}


def _load(folder: Path, layers: int) -> dict[str, Tensor]:
    """Return the buffers of a checkpoint, loaded by one process."""
    model = Tracking(layers)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters()),
        load_path=str(folder / "saved"),
        progress_bar=False,
        device="cpu",
    )
    with contextlib.closing(trainer):
        return {name: one.detach().clone() for name, one in model.named_buffers()}


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        pytest.param(FOUR, 5, id="stages"),
        pytest.param(TURNED, 9, id="turned", marks=pytest.mark.slow(one_run_in=4)),
        pytest.param(LOOPED, 9, id="looped", marks=pytest.mark.slow(one_run_in=4)),
    ],
)
def test_buffers_of_the_model_are_saved_as_one_process_has_them(
    four_ranks: StandingRanks, tmp_path: Path, config: Any, layers: int
) -> None:
    alone = _save(None, layers, str(tmp_path / "alone"))
    four_ranks.run(_save, config, layers, str(tmp_path / "stages"))
    saved = _load(tmp_path / "stages", layers)
    del alone["turns"], saved["turns"]  # not in checkpoints
    assert saved.keys() == alone.keys()
    assert alone["calls"] == alone["late_calls"] == 24
    assert alone["from_second_batch"].any()
    for name, value in alone.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-5, atol=1e-6, msg=name)


class Twice(Tracking):
    """A model that changes one buffer before the blocks and after them."""

    def encode(self, seen: Tensor) -> Tensor:
        features = super().encode(seen)
        with torch.no_grad():
            self.seen.lerp_(features.abs().mean(), 0.25)
        return features


class Between(Tracking):
    """A model that counts its blocks as it calls them."""

    def encode(self, seen: Tensor) -> Tensor:
        x = self.byte_embedding(seen)
        for block in self.blocks:
            x = block(x)
            self.calls += 1
        features: Tensor = self.norm(x)
        return features


class Inside(nn.Module):
    """A block that changes a buffer of the model."""

    def __init__(self, block: nn.Module, mean: Tensor) -> None:
        super().__init__()
        self.block = block
        self.of_model = [mean]

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.of_model[0].copy_(x.mean((0, 1)))
        return self.block(x)


def _with_blocks_that_reach_out() -> nn.Module:
    model: Any = Tracking()
    model.blocks = nn.ModuleList(Inside(block, model.mean) for block in model.blocks)
    return model


class Scaled(Tracking):
    """A model with a parameter of its own, used after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(24))

    def encode(self, seen: Tensor) -> Tensor:
        features = super().encode(seen)
        return features * self.scale


class ScaledTwice(Scaled):
    """A model with a parameter of its own, used before the blocks and after them."""

    def encode(self, seen: Tensor) -> Tensor:
        x = self.byte_embedding(seen) * self.scale
        for block in self.blocks:
            x = block(x)
        features: Tensor = self.norm(x) * self.scale
        return features


REFUSED: dict[str, tuple[Any, str]] = {
    "twice": (Twice, "changes its buffer `seen` before the blocks of `blocks` and after them"),
    "between": (Between, "changes its buffer `calls` in the blocks of `blocks` or between them"),
    "inside": (_with_blocks_that_reach_out, "changes its buffer `mean` in the blocks of `blocks` or between"),
    "parameter": (Scaled, "uses `scale` after the blocks of `blocks`, and it is part of stage 0, expected 3"),
    "parameter twice": (ScaledTwice, "and what is used on both sides under two names, as in"),
}


def _refuse() -> dict[str, str]:
    messages = {}
    for name, (make, _) in REFUSED.items():
        trainer = Trainer(
            model=make(),
            train_dataloader=DataLoader(layouts.samples("gpt", 1), batch_size=layouts.GLOBAL_BATCH),
            max_duration="1ba",
            device_train_microbatch_size=2,
            parallelism_config=FOUR,
            progress_bar=False,
            device="cpu",
            seed=7,
        )
        with contextlib.closing(trainer), pytest.raises(ModelError) as caught:
            trainer.fit()
        messages[name] = str(caught.value)
    return messages


def test_state_that_two_stages_would_change_is_refused_on_every_rank(four_ranks: StandingRanks) -> None:
    for messages in four_ranks.run(_refuse):
        for name, (_, words) in REFUSED.items():
            assert words in messages[name], name
