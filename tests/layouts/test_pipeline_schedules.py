"""Schedules that give a rank several stages, and checkpointed blocks, train as one process does."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hocket.dist import ModelError
from hocket.trainer import Trainer
from hocket.trainer.errors import TrainerError
from support import layouts
from support.stages import (
    NEEDS_TORCH,
    Five,
    check_numbers,
    train_alone,
    train_copies,
    train_stages,
)
from support.standing_ranks import StandingRanks

pytestmark = NEEDS_TORCH

SEVERAL: dict[str, Any] = {
    name: {"degree": 4, "schedule": name}
    for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
}
"""The schedules that give each of four ranks two stages."""


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize("name", SEVERAL)
def test_four_ranks_of_two_stages_train_as_one_process(four_ranks: StandingRanks, name: str) -> None:
    found = four_ranks.run(train_stages, "gpt", SEVERAL[name], 20, 1, 9)
    check_numbers(found, train_alone("gpt", 20, 1, 9), f"gpt | {name}")


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize(
    ("axis", "schedule"),
    [
        *(("dp_replicate", name) for name in SEVERAL),
        ("dp_shard", "Interleaved1F1B"),
        ("dp_shard", "LoopedBFS"),
    ],
)
def test_copies_and_shards_of_two_stages_train_as_one_process(
    four_ranks: StandingRanks, axis: str, schedule: str
) -> None:
    steps = layouts.num_steps("llama")
    found = four_ranks.run(train_copies, "llama", steps, axis, schedule, 1)
    check_numbers(found, train_alone("llama", steps, 1), f"llama | {schedule} | {axis} 2", copies=2)


def _train_counted(config: Any, num_ranks: int) -> tuple[layouts.Numbers, Counter[str]]:
    """Train checkpointed blocks, and count the forward passes of each. Collective."""
    counts: Counter[str] = Counter()

    def watch(model: nn.Module) -> torch.optim.AdamW:
        for name, one in model.named_modules():
            if name.endswith(".q_proj"):
                # A check of the first batch computes once more, without gradients.
                one.register_forward_hook(
                    lambda *_, name=name: counts.update([name] * torch.is_grad_enabled())
                )
        return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)

    options = {
        "callbacks": [],
        "layers": 5,
        "make_optimizers": watch,
        "device_train_microbatch_size": 2,
    }
    return layouts.train("llama, checkpointed", config, num_ranks, **options), counts


def _check_counted(ranks: StandingRanks, config: Any, num_ranks: int, copies: int) -> None:
    found = ranks.run(_train_counted, config, num_ranks)
    check_numbers(
        [one for one, _ in found], train_alone("llama", 3), f"checkpointed | {config}", copies=copies
    )
    microbatches = 3 * layouts.GLOBAL_BATCH // num_ranks // 2
    for _, counts in found:
        assert set(counts.values()) == {2 * microbatches}, "each block computes its activations twice"


def test_checkpointed_blocks_of_sharded_stages_are_computed_twice(two_ranks: StandingRanks) -> None:
    _check_counted(two_ranks, {"pp": 2, "fsdp": {}}, 1, 1)


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize(
    ("config", "num_ranks"),
    [({"pp": 2, "dp_shard": 2}, 2), ({"pp": 2, "dp_replicate": 2}, 2), ({"pp": 2, "tp": 2}, 1)],
)
def test_checkpointed_blocks_of_every_axis_are_computed_twice(
    four_ranks: StandingRanks, config: dict[str, Any], num_ranks: int
) -> None:
    _check_counted(four_ranks, config, num_ranks, 2)


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize("name", SEVERAL)
def test_checkpointed_blocks_of_two_stages_train_as_one_process(four_ranks: StandingRanks, name: str) -> None:
    found = four_ranks.run(train_stages, "llama, checkpointed", SEVERAL[name], 3, 1, 9)
    check_numbers(found, train_alone("llama", 3, 1, 9), f"llama | {name} | checkpointed")


class Counting(Five):
    """A model that counts its calls in training, before the blocks and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.byte_embedding.register_buffer("calls", torch.zeros(()))
        self.norm.register_buffer("calls", torch.zeros(()))

    def encode(self, seen: Tensor) -> Tensor:
        if self.training:
            self.byte_embedding.calls += 1
        features = super().encode(seen)
        if self.training:
            self.norm.calls += 1
        return features


def _count_calls(schedule: str) -> dict[str, float]:
    """Return the counts after three batches that this rank's state has, by module. Collective."""
    trainer = Trainer(
        model=Counting(),
        train_dataloader=DataLoader(layouts.samples("gpt", 3), batch_size=layouts.GLOBAL_BATCH // 2),
        max_duration="3ba",
        device_train_microbatch_size=2,
        parallelism_config={"pp": {"degree": 2, "schedule": schedule}, "dp_replicate": 2},
        progress_bar=False,
        device="cpu",
        seed=7,
    )
    with contextlib.closing(trainer):
        trainer.fit()
        model, is_own = trainer.state.model, trainer.state.parallelism.is_own
        counts = {name: float(model.get_buffer(f"{name}.calls")) for name in ("byte_embedding", "norm")}
        return {name: count for name, count in counts.items() if is_own(f"{name}.calls")}


@pytest.mark.slow(one_run_in=4)
def test_what_is_outside_of_the_blocks_counts_once_a_microbatch(four_ranks: StandingRanks) -> None:
    for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        counts = four_ranks.run(_count_calls, schedule)
        for name in ("byte_embedding", "norm"):
            assert [count[name] for count in counts if name in count] == [6, 6], (schedule, name)


class Untouched(Dataset):
    """Twenty samples that nobody may read."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        raise AssertionError(f"sample {index} was read before the refusal")


EARLY: dict[str, tuple[str, int | None, str]] = {
    "five": ("Interleaved1F1B", 2, "`pp` has 4 stages on 2 ranks, which torch's schedule 'Interleaved1F1B'"),
    "one": ("1F1B", None, "a batch has 1 microbatches and `pp` has 2 stages: the schedule '1F1B' needs"),
    "few": ("DualPipeV", 5, "which torch's schedule 'DualPipeV' refuses"),
    "size": ("1F1B", 3, "the batch has 10 samples, which `device_train_microbatch_size` 3 does not divide"),
}


def _refuse_early() -> dict[str, list[str]]:
    """Return the messages of fits whose data nobody reads, with batches of a rank and of all ranks."""
    messages: dict[str, list[str]] = {}
    for name, (schedule, size, _) in EARLY.items():
        for total in (None, 20):
            trainer = Trainer(
                model=Five(),
                train_dataloader=DataLoader(Untouched(), batch_size=10 if total is None else 3),
                max_duration="1ba",
                device_train_microbatch_size=size,
                global_train_batch_size=total,
                parallelism_config={"pp": {"degree": 2, "schedule": schedule}, "dp_replicate": 2},
                progress_bar=False,
                device="cpu",
                seed=7,
            )
            with contextlib.closing(trainer), pytest.raises((ModelError, TrainerError)) as caught:
                trainer.fit()
            messages.setdefault(name, []).append(str(caught.value))
    return messages


def test_microbatches_that_a_schedule_refuses_are_refused_before_training(four_ranks: StandingRanks) -> None:
    for messages in four_ranks.run(_refuse_early):
        for name, (_, _, words) in EARLY.items():
            for message in messages[name]:
                assert words in message, name
