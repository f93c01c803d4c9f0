"""Stages whose ranks share experts train and resume as one process does.

Tolerance: losses, gradients' norms and the clipped update in float32 within a relative 1e-5. The positions of
each expert are counted alike.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hocket.dist import provide
from hocket.dist.errors import ModelError
from hocket.recipes.mixture import ExpertBalance, Mixture, MixtureConfig
from hocket.trainer import Trainer
from hocket.trainer.loggers import InMemoryLogger
from support import layouts
from support.stage_checkpoints import Layout, Once, Part, check_pair, joined, train_part
from support.stages import NEEDS_TORCH, check_equal, check_numbers, microbatch_size, num_blocks
from support.standing_ranks import StandingRanks

pytestmark = NEEDS_TORCH

LOOPED = {"degree": 2, "schedule": "Interleaved1F1B"}
SEQUENCE = {"degree": 2, "sequence_parallel": True}
BOTH = {"degree": 2, "sequence_parallel": True, "loss_parallel": True}
OF_4: dict[str, Layout] = {
    "pp 2 × ep 2": ({"pp": 2, "ep": 2}, 2),
    "pp 2 × ep 2, interleaved": ({"pp": LOOPED, "ep": -1}, 2),
    "pp 2 × ep 2, gpipe": ({"pp": {"degree": 2, "schedule": "GPipe"}, "dp_shard": 2, "ep": 2}, 2),
    "pp 2 × cp 2 × ep 2": ({"pp": 2, "cp": 2, "ep": 2}, 1),
    "pp 2 × cp 2 × ep 2, interleaved": ({"pp": LOOPED, "cp": 2, "ep": 2}, 1),
    "pp 2 × cp 2 × ep 2, ring": ({"pp": 2, "cp": {"degree": 2, "method": "ring"}, "ep": 2}, 1),
}
OF_8: dict[str, Layout] = {
    "pp 2 × dp_shard 4 × ep 2": ({"pp": 2, "dp_shard": 4, "ep": 2}, 4),
    "pp 2 × dp_shard 4 × ep 2, interleaved": ({"pp": LOOPED, "dp_shard": 4, "ep": 2}, 4),
    "pp 2 × dp_shard 4 × ep 4": ({"pp": 2, "ep": 4}, 4),
    "pp 2 × dp_replicate 2 × dp_shard 2 × ep 2": ({"pp": 2, "ep": 2}, 4),
    "pp 2 × dp_replicate 2 × dp_shard 2 × ep 2, interleaved": ({"pp": LOOPED, "ep": 2}, 4),
    "pp 4 × dp_shard 2 × ep 2": ({"pp": 4, "ep": 2}, 2),
    "pp 2 × dp_shard 2 × tp 2 × ep 2": ({"pp": 2, "tp": 2, "ep": 2}, 2),
    "pp 2 × dp_shard 2 × tp 2 × ep 2, sequences, loss": ({"pp": LOOPED, "tp": BOTH, "ep": 2}, 2),
    "pp 2 × dp_shard 2 × cp 2 × ep 2": ({"pp": 2, "dp_shard": 2, "cp": 2, "ep": 2}, 2),
    "pp 2 × dp_shard 2 × cp 2 × ep 4, interleaved": ({"pp": LOOPED, "dp_shard": 2, "cp": 2, "ep": 4}, 2),
    "pp 2 × cp 2 × tp 2 × ep 2": ({"pp": 2, "cp": 2, "tp": SEQUENCE, "ep": 2}, 1),
}
CASES_OF_4 = [
    *(("mixture", name) for name in OF_4),
    *(("mixtral", name) for name in ("pp 2 × ep 2, interleaved", "pp 2 × cp 2 × ep 2, ring")),
    *(("dense first", name) for name in ("pp 2 × ep 2, interleaved", "pp 2 × cp 2 × ep 2, interleaved")),
    ("qwen3 moe", "pp 2 × cp 2 × ep 2"),
    ("qwen3 moe, checkpointed", "pp 2 × ep 2, interleaved"),
    ("starved mixtral", "pp 2 × ep 2, interleaved"),
]
CASES_OF_8 = [
    *(("mixture", name) for name in OF_8),
    ("mixtral", "pp 2 × dp_shard 2 × tp 2 × ep 2, sequences, loss"),
    ("dense first", "pp 2 × dp_shard 4 × ep 2, interleaved"),
]
"""Every layout for one model. Others differ by their modules and plans, by stages of dense blocks and by
experts without positions."""


def _train(
    kind: str, config: dict[str, Any] | None, num_ranks: int, steps: int, size: int, blocks: int = 5
) -> tuple[layouts.Numbers, dict[str, list[float]]]:
    """Train; return the numbers, and the positions of each expert by batch. Collective."""
    memory = InMemoryLogger()
    options = {
        "callbacks": [ExpertBalance(rate=0.01)],
        "device_train_microbatch_size": size,
        "layers": blocks,
    }
    numbers = layouts.train(kind, config, num_ranks, steps=steps, memory=memory, **options)
    counts = {name: values for name, values in memory.data.items() if name.startswith("experts/")}
    return numbers, {name: [float(value) for _, value in values] for name, values in counts.items()}


@functools.cache
def _alone(
    kind: str, steps: int, size: int, blocks: int = 5
) -> tuple[layouts.Numbers, dict[str, list[float]]]:
    return _train(kind, None, 1, steps, size, blocks)


def _check(ranks: StandingRanks, layout: Layout, kind: str, name: str, steps: int) -> None:
    config, num_ranks = layout
    size = microbatch_size(config["pp"], num_ranks, is_long=ranks.world_size == 4)
    blocks = 5 if kind == "dense first" else num_blocks(config["pp"])  # of 5 a stage has dense ones alone
    found = ranks.run(_train, kind, config, num_ranks, steps, size, blocks)
    alone, counted = _alone(kind.removesuffix(", checkpointed"), steps, size, blocks)
    degree = config["pp"] if isinstance(config["pp"], int) else config["pp"]["degree"]
    numbers = [one for one, _ in found]
    check_numbers(numbers, alone, f"{kind} | {name}", copies=len(numbers) // degree)
    for one, counts in found:
        assert counts == counted
        assert "stacks of experts shared by" in one.description
    assert bool(counted) == (kind == "mixture")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("dense first", "pp 2 × ep 2"),
        ("mixture", "pp 2 × cp 2 × ep 2"),
    ],
)
def test_stages_that_share_experts_train_as_one_process(
    four_ranks: StandingRanks, kind: str, name: str
) -> None:
    _check(four_ranks, OF_4[name], kind, name, 3)


def test_a_tied_weight_goes_with_experts_that_a_stage_shares(four_ranks: StandingRanks) -> None:
    found = four_ranks.run(_train, "tied mixture", {"pp": 2, "ep": 2}, 2, 3, 1)
    alone, counted = _alone("tied mixture", 3, 1)
    check_numbers([one for one, _ in found], alone, "tied mixture | pp 2 × ep 2", copies=2, num_tied=1)
    assert all(counts == counted for _, counts in found)


def _train_frozen(part: str, config: dict[str, Any] | None, num_ranks: int) -> layouts.Numbers:
    """Train without the parameters that have `part` in their names. Collective."""

    def freeze(model: nn.Module) -> torch.optim.AdamW:
        for name, one in model.named_parameters():
            one.requires_grad_(part not in name)
        return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)

    options = {"callbacks": [], "device_train_microbatch_size": 2, "layers": 5}
    return layouts.train("mixture", config, num_ranks, make_optimizers=freeze, **options)


@pytest.mark.parametrize("part", ["router", "blocks.0.mixture.experts"])
def test_parts_of_a_stage_that_are_not_trained_keep_their_values(
    four_ranks: StandingRanks, part: str
) -> None:
    found = four_ranks.run(_train_frozen, part, {"pp": 2, "ep": 2}, 2)
    for one in found:
        kept = [name for name, value in one.trained.items() if torch.equal(value, one.initial[name])]
        assert kept == [name for name in one.trained if part in name]
    check_numbers(found, _train_frozen(part, None, 1), f"{part} frozen", copies=2)


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize(("kind", "name"), CASES_OF_4)
def test_a_product_of_stages_and_experts_trains_as_one_process(
    four_ranks: StandingRanks, kind: str, name: str
) -> None:
    _check(four_ranks, OF_4[name], kind, name, layouts.num_steps(kind))


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize(("kind", "name"), CASES_OF_8)
def test_a_product_of_stages_and_experts_on_8_ranks_trains_as_one_process(
    eight_ranks: StandingRanks, kind: str, name: str
) -> None:
    _check(eight_ranks, OF_8[name], kind, name, layouts.num_steps(kind))


CHECKPOINTS: dict[str, Layout | None] = {
    "pp 2 × ep 2": ({"pp": 2, "ep": 2}, 2),
    "pp 2 × ep 2, interleaved": ({"pp": LOOPED, "ep": 2}, 2),
    "pp 2 × cp 2 × ep 2": ({"pp": 2, "cp": 2, "ep": 2}, 1),
    "dp_shard 4 × ep 2": ({"dp_shard": 4, "ep": 2}, 4),
    "pp 4": ({"pp": 4}, 1),
    "dp_shard 4": ({"dp_shard": 4}, 4),
    "one process": None,
}
PAIRS = [
    pair
    for pair in itertools.permutations(CHECKPOINTS, 2)
    if any("pp" in one and "ep" in one for one in pair) and pair[1] != "one process"
]
"""What each layout saves is loaded on one process, too."""
RESUMED = [
    *(("mixture", pair) for pair in PAIRS),
    ("dense first", ("pp 2 × ep 2", "pp 2 × ep 2, interleaved")),
    ("dense first", ("pp 2 × ep 2, interleaved", "dp_shard 4 × ep 2")),
    ("dense first", ("dp_shard 4 × ep 2", "pp 2 × cp 2 × ep 2")),
]
"""Every pair for one model; one whose first stage has no experts is saved and loaded under a few."""


def _check_pair(ranks: StandingRanks, once: Once, folder: Path, kind: str, pair: tuple[str, str]) -> None:
    first, second = (CHECKPOINTS[name] for name in pair)
    assert second is not None
    check_pair(ranks, once, folder, kind, first, second, [ExpertBalance(rate=0.01)])


def test_a_checkpoint_of_stages_that_share_experts_resumes_under_another_layout(
    four_ranks: StandingRanks, once: Once, tmp_path: Path
) -> None:
    _check_pair(four_ranks, once, tmp_path, "mixture", ("pp 2 × ep 2, interleaved", "dp_shard 4 × ep 2"))


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize(
    ("kind", "pair"),
    [pytest.param(kind, pair, id=f"{kind}: {' to '.join(pair)}") for kind, pair in RESUMED],
)
def test_every_pair_of_layouts_with_stages_that_share_experts(
    four_ranks: StandingRanks, once: Once, tmp_path: Path, kind: str, pair: tuple[str, str]
) -> None:
    _check_pair(four_ranks, once, tmp_path, kind, pair)


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if "pp" in name and "ep" in name])
def test_stages_that_share_experts_resume_bit_for_bit(
    four_ranks: StandingRanks, tmp_path: Path, name: str
) -> None:
    def run(folder: str, load: str | None) -> list[Part]:
        place, balance = str(tmp_path / folder), [ExpertBalance(rate=0.01)]
        return four_ranks.run(train_part, "mixture", CHECKPOINTS[name], place, load, 4, balance)

    through = run("through", None)
    resumed = run("resumed", str(tmp_path / "through" / "ba2"))
    check_equal(joined([one.end for one in resumed]), joined([one.end for one in through]))
    assert resumed[0].losses == through[0].losses[2:]


def _with_other_experts(block: int, num_experts: int) -> Any:
    """Return a model of five blocks, of which one has another number of experts; 0 for a dense one."""
    model: Any = layouts.build("mixture", 5)
    size = model.mixture_config.gpt
    mixture = Mixture(MixtureConfig(gpt=size, num_experts=num_experts)) if num_experts else None
    model.blocks[block].mixture = mixture or nn.Linear(size.width, size.width)
    return model


def _refuse_and_describe() -> tuple[list[str], str]:
    messages = []
    for block, num_experts in ((4, 3), (0, 5)):
        with (
            pytest.raises(ModelError) as caught,
            provide({"pp": 2, "ep": 2}, device="cpu", timeout_s=60) as parallelism,
        ):
            parallelism.lay_out(_with_other_experts(block, num_experts))
        messages.append(str(caught.value))
    with provide({"pp": 2, "ep": 2}, device="cpu", timeout_s=60) as parallelism:
        model = _with_other_experts(2, 0)
        parallelism.lay_out(model)
        return messages, parallelism.describe()


def test_experts_of_one_stage_that_ranks_cannot_share_are_refused_on_every_rank(
    four_ranks: StandingRanks,
) -> None:
    found = four_ranks.run(_refuse_and_describe)
    assert found == [found[0]] * 4
    (of_last, of_first), description = found[0]
    assert "`blocks.4.mixture.experts` has 3 experts, which cannot be shared evenly by the 2 ranks" in of_last
    assert (
        "`blocks.0.mixture.experts` has 5 experts, which cannot be shared evenly by the 2 ranks" in of_first
    )
    assert "pp 2 × dp_shard 2; stage 0" in description
    assert "4 stacks of experts shared by 2 ranks" in description


def _held() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parts of experts that this rank holds in two stages of a model."""
    with provide({"pp": {"degree": 2, "split": ["model.layers.3"]}, "ep": 2}, device="cpu") as parallelism:
        model = layouts.build("dense first", 5)
        parallelism.lay_out(model)
        return {
            name: tuple(one.to_local().shape) for name, one in model.named_parameters() if ".experts." in name
        }


def test_a_stage_may_have_no_experts(four_ranks: StandingRanks) -> None:
    first, _, *last = four_ranks.run(_held)
    assert first == {}
    for held in last:
        assert {shape[0] for shape in held.values()} == {2}, "two of four experts"
        assert {name.split(".experts")[0] for name in held} == {f"model.model.layers.{i}.mlp" for i in (3, 4)}


def _train_by_deepspeed() -> layouts.Numbers:
    config = {"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}, "autoep_size": 2}
    options = {"callbacks": [], "device_train_microbatch_size": 2}
    return layouts.train("mixture", None, 2, deepspeed_config=config, **options)


def test_stages_and_experts_of_a_deepspeed_config_train_as_one_process(four_ranks: StandingRanks) -> None:
    alone = layouts.train("mixture", None, 1, callbacks=[])
    check_numbers(four_ranks.run(_train_by_deepspeed), alone, "by DeepSpeed's keys", copies=2)


def _evaluate(config: dict[str, Any] | None, num_ranks: int) -> tuple[dict[str, list[float]], torch.Tensor]:
    """Train and evaluate; return what was logged of it, and tokens that the model then generates."""
    model: Any = layouts.build("mixtral", 5)
    samples, size = layouts.samples("mixtral", 2), layouts.GLOBAL_BATCH // num_ranks
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(samples, batch_size=size),
        eval_dataloader=DataLoader(samples[:13], batch_size=size),
        eval_interval="1ba",
        max_duration="2ba",
        device_train_microbatch_size=1,
        optimizers=torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4),
        parallelism_config=config,
        loggers=[memory := InMemoryLogger()],
        progress_bar=False,
        device="cpu",
        seed=7,
    )
    with contextlib.closing(trainer):
        trainer.fit()
        with torch.no_grad():
            prompt = torch.tensor([[2, 3, 5, 7]])
            tokens = model.generate(prompt, max_new_tokens=4, use_cache=False, do_sample=False)
    values = {name: [float(one) for _, one in values] for name, values in memory.data.items()}
    return {name: one for name, one in values.items() if name.startswith(("metrics/eval", "loss"))}, tokens


@pytest.mark.slow(one_run_in=4)
def test_an_evaluation_of_stages_that_share_experts_is_that_of_one_process(four_ranks: StandingRanks) -> None:
    expected, text = _evaluate(None, 1)
    assert any(name.startswith("metrics/eval") for name in expected)
    for values, tokens in four_ranks.run(_evaluate, {"pp": 2, "ep": 2}, 2):
        assert torch.equal(tokens, text)
        assert values.keys() == expected.keys()
        for name, one in values.items():
            assert one == pytest.approx(expected[name], rel=1e-5), name
