"""Ranks that share experts train as one process does, and their checkpoints continue under other layouts."""

from __future__ import annotations

import contextlib
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hocket.dist import provide
from hocket.dist.errors import ConfigError, ModelError
from hocket.dist.layout.experts import check_experts
from hocket.recipes.gpt import GPTConfig
from hocket.recipes.mixture import ExpertBalance, Experts, Mixture, MixtureConfig, MixtureGPT
from hocket.trainer import Trainer
from hocket.trainer.callbacks import GradNormMonitor
from hocket.trainer.loggers import InMemoryLogger
from support import layouts
from support.standing_ranks import StandingRanks

TOLERANCE = 1e-5
SEQUENCES = {"degree": 2, "sequence_parallel": True, "loss_parallel": True}
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "ep 4": ({"dp_shard": 4, "ep": 4}, 4),
    "dp_replicate 2 × ep 2": ({"ep": 2}, 4),
    "ep 4, checkpointed": ({"ep": 4, "fsdp": {"activation_checkpointing": True}}, 4),
    "dp_shard 4 × ep 2": ({"dp_shard": 4, "ep": 2}, 4),
    "dp_shard 4 × ep 2, checkpointed": (
        {"dp_shard": 4, "ep": 2, "fsdp": {"activation_checkpointing": True}},
        4,
    ),
    "dp_shard 4 × ep 2, kept": ({"dp_shard": 4, "ep": 2, "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}, 4),
    "dp_shard 2 × tp 2 × ep 2": ({"dp_shard": 2, "tp": 2, "ep": 2}, 2),
    "dp_shard 2 × tp 2 × ep 2, sequences": ({"dp_shard": 2, "tp": SEQUENCES, "ep": 2}, 2),
    "dp_replicate 2 × cp 2 × ep 2": ({"dp_replicate": 2, "cp": 2, "ep": 2}, 2),
    "dp_shard 2 × cp 2 × ep 2": ({"dp_shard": 2, "cp": 2, "ep": 2}, 2),
    "dp_shard 2 × cp 2 × ep 4": ({"dp_shard": 2, "cp": 2, "ep": -1}, 2),
}
"""Each layout of four ranks, and the ranks that have data of their own."""
OTHERS = (
    "dp_shard 4 × ep 2, checkpointed",
    "dp_shard 2 × tp 2 × ep 2, sequences",
    "dp_shard 2 × cp 2 × ep 2",
)
"""The layouts of other models with experts, whose modules and plans differ; the exchange is the same."""
CASES = [
    *(("mixture", name) for name in LAYOUTS),
    *((kind, name) for kind in ("mixtral", "qwen3 moe") for name in OTHERS),
]
SAVED = [name for name in LAYOUTS if "," not in name]
"""The layouts that place parameters in ways of their own."""


def _train(kind: str, config: dict[str, Any] | None, num_ranks: int, steps: int) -> Any:
    memory = InMemoryLogger()
    callbacks = [GradNormMonitor(), ExpertBalance()]
    numbers = layouts.train(kind, config, num_ranks, steps=steps, memory=memory, callbacks=callbacks)
    counts = {name: values for name, values in memory.data.items() if name.startswith("experts/")}
    return numbers, {name: [float(value) for _, value in values] for name, values in counts.items()}


@functools.cache
def _alone(kind: str, steps: int) -> Any:
    return _train(kind, None, 1, steps)


def _check(ranks: StandingRanks, kind: str, name: str, steps: int) -> None:
    alone, counted = _alone(kind, steps)
    for numbers, counts in ranks.run(_train, kind, *LAYOUTS[name], steps):
        differences = numbers.largest_differences(alone)
        print(f"{kind} | {name} | " + " | ".join(f"{value:.1e}" for value in differences.values()))
        assert max(differences.values()) <= TOLERANCE, (numbers.description, differences)
        assert "stacks of experts shared" in numbers.description
        assert counts == counted
        if kind == "mixture":
            each = sum(values[0] for name, values in counts.items() if "blocks.0." in name)
            assert each == layouts.GLOBAL_BATCH * (layouts.LENGTH - 1) * 2


@pytest.mark.parametrize(
    "name",
    ["dp_replicate 2 × ep 2", "dp_shard 4 × ep 2", "dp_shard 2 × tp 2 × ep 2", "dp_shard 2 × cp 2 × ep 2"],
)
def test_ranks_that_share_experts_train_as_one_process(four_ranks: StandingRanks, name: str) -> None:
    _check(four_ranks, "mixture", name, 3)


@pytest.mark.parametrize("name", ["ep 4", "dp_shard 4 × ep 2"])
def test_ranks_whose_experts_get_no_rows_train_as_one_process(four_ranks: StandingRanks, name: str) -> None:
    """The router is made of zeros, so that all rows go to the same two of four experts."""
    _check(four_ranks, "starved mixtral", name, 1)


def _held(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parts of experts that this rank holds, of models with 8 and with 2 experts.

    Those of the first one are marked as groups of their own.
    """
    size = GPTConfig(context=8, width=10, num_layers=1, num_heads=2)
    with provide(config, device="cpu", timeout_s=60) as parallelism:
        shapes = {}
        for num_experts in (8, 2):
            model: Any = MixtureGPT(MixtureConfig(gpt=size, num_experts=num_experts))
            if num_experts == 8:
                model.blocks[0].mixture.experts._fsdp_wrap = True
            parallelism.lay_out(model)
            for name, one in model.named_parameters():
                if "experts" in name:
                    shapes[f"{num_experts} {name.rpartition('.')[2]}"] = tuple(one.to_local().shape)
        return shapes


def test_ranks_hold_a_part_of_the_experts_that_they_share(four_ranks: StandingRanks) -> None:
    for held in four_ranks.run(_held, {"dp_shard": 4, "ep": 2}):
        assert held["8 up"] == (2, 40, 10)
        assert held["2 up"] == (1, 20, 10), "one expert on two ranks of `ep`, cut in two"


def _train_by_deepspeed() -> layouts.Numbers:
    config = {"zero_optimization": {"stage": 3}, "expert_parallel": {"enabled": True, "autoep_size": 2}}
    return layouts.train("mixture", None, 4, deepspeed_config=config)


def test_experts_of_a_deepspeed_config_train_as_one_process(four_ranks: StandingRanks) -> None:
    alone = layouts.train("mixture", None, 1)
    for one in four_ranks.run(_train_by_deepspeed):
        assert "dp_shard 4" in one.description
        assert "stacks of experts shared by 2 ranks" in one.description
        assert max(one.largest_differences(alone).values()) <= TOLERANCE


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_layout_of_experts_trains_as_one_process(
    four_ranks: StandingRanks, kind: str, name: str
) -> None:
    _check(four_ranks, kind, name, layouts.num_steps(kind))


def _resume(
    config: dict[str, Any] | None, num_ranks: int, folder: str, load: str | None, stop: str
) -> dict[str, torch.Tensor]:
    """Train and save, after loading if there is something to load; return what was loaded, or saved."""
    model = layouts.build("mixture")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(layouts.samples("gpt", 4), batch_size=layouts.GLOBAL_BATCH // num_ranks),
        optimizers=optimizer,
        callbacks=[ExpertBalance()],
        max_duration=stop,
        parallelism_config=config,
        save_folder=folder,
        save_interval="1ba",
        load_path=load,
        progress_bar=False,
        device="cpu",
        seed=7,
    )
    with contextlib.closing(trainer):
        found = {} if load is None else _tensors(model, optimizer)
        trainer.fit()
        return found or _tensors(model, optimizer)


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, one in model.named_parameters():
        found |= {f"{name} {slot}": optimizer.state[one][slot] for slot in ("exp_avg", "exp_avg_sq")}
    return {
        name: (one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone()
        for name, one in found.items()
    }


def _check_resumed(ranks: StandingRanks, folder: Path, name: str) -> None:
    """Resume what ranks saved on one process, and what that saved on the ranks."""
    config, num_ranks = LAYOUTS[name]
    shared, alone = str(folder / "shared"), str(folder / "alone")
    saved = ranks.run(_resume, config, num_ranks, shared, None, "2ba")[0]
    _assert_same(saved, _resume(None, 1, alone, f"{shared}/latest", "3ba"))
    saved = _resume(None, 1, str(folder / "other"), f"{alone}/latest", "4ba")
    for loaded in ranks.run(_resume, config, num_ranks, str(folder / "back"), f"{alone}/latest", "4ba"):
        _assert_same(saved, loaded)


@pytest.mark.parametrize("name", ["dp_replicate 2 × ep 2", "dp_shard 4 × ep 2"])
def test_experts_resume_on_one_process_and_back(four_ranks: StandingRanks, tmp_path: Path, name: str) -> None:
    _check_resumed(four_ranks, tmp_path, name)


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize("name", SAVED)
def test_experts_of_every_layout_resume_on_one_process_and_back(
    four_ranks: StandingRanks, tmp_path: Path, name: str
) -> None:
    _check_resumed(four_ranks, tmp_path, name)


RESUMED = ("ep 4", "dp_shard 4 × ep 2", "dp_shard 2 × tp 2 × ep 2", "dp_shard 2 × cp 2 × ep 2")


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize("pair", list(itertools.permutations(RESUMED, 2)), ids=" to ".join)
def test_experts_of_one_layout_resume_under_another(
    four_ranks: StandingRanks, tmp_path: Path, pair: tuple[str, str]
) -> None:
    first, second = (LAYOUTS[name] for name in pair)
    saved = four_ranks.run(_resume, *first, str(tmp_path / "saved"), None, "2ba")[0]
    load = str(tmp_path / "saved" / "latest")
    for loaded in four_ranks.run(_resume, *second, str(tmp_path / "resumed"), load, "3ba"):
        _assert_same(saved, loaded)


def _assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(other[name], value), name


SHARED_SEQUENCES: dict[str, dict[str, int]] = {"cp": {"cp": 2, "dp_shard": 2}, "pp": {"pp": 2, "dp_shard": 2}}


def _count(
    config: dict[str, int] | None, num_ranks: int
) -> tuple[dict[str, list[float]], list[torch.Tensor]]:
    """Return the positions of each expert by batch, and the biases that this rank's blocks then have."""
    memory = InMemoryLogger()
    trainer = Trainer(
        model=layouts.build("mixture"),
        train_dataloader=DataLoader(
            layouts.samples("mixture", 2), batch_size=layouts.GLOBAL_BATCH // num_ranks
        ),
        device_train_microbatch_size=2,
        callbacks=[ExpertBalance(rate=0.1)],
        loggers=[memory],
        max_duration="2ba",
        parallelism_config=config,
        progress_bar=False,
        device="cpu",
        seed=7,
    )
    with contextlib.closing(trainer):
        trainer.fit()
        biases = [one.bias.clone() for one in trainer.state.model.modules() if isinstance(one, Mixture)]
    counts = {name: values for name, values in memory.data.items() if name.startswith("experts/")}
    return {name: [float(value) for _, value in values] for name, values in counts.items()}, biases


@pytest.mark.parametrize("axis", SHARED_SEQUENCES)
def test_positions_are_counted_once_where_ranks_share_sequences_or_blocks(
    four_ranks: StandingRanks, axis: str
) -> None:
    counts, biases = _count(None, 1)
    for counted, moved in four_ranks.run(_count, SHARED_SEQUENCES[axis], 2):
        assert counted == counts
        assert all(torch.equal(one, other) for one, other in zip(moved, biases, strict=True))


def _lose_terms() -> str:
    size = GPTConfig(context=8, width=8, num_layers=2, num_heads=2)
    trainer = Trainer(
        model=MixtureGPT(MixtureConfig(gpt=size, aux_loss=0.01)),
        train_dataloader=DataLoader(layouts.samples("mixture", 1), batch_size=4),
        device_train_microbatch_size=2,
        max_duration="1ba",
        parallelism_config={"pp": 2, "dp_shard": 2},
        progress_bar=False,
        device="cpu",
    )
    with contextlib.closing(trainer), pytest.raises(ValueError, match="`aux_loss` is") as caught:
        trainer.fit()
    return str(caught.value)


def test_terms_of_routers_on_other_stages_are_refused_on_every_rank(four_ranks: StandingRanks) -> None:
    for index, message in enumerate(four_ranks.run(_lose_terms)):
        assert f"experts of `blocks.{1 - index // 2}.mixture` are on another stage" in message


def _values(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    with provide(config, device="cpu", timeout_s=60) as parallelism:
        torch.manual_seed(5)
        with torch.device("meta"):
            model = layouts.build("mixture")
        parallelism.lay_out(model)
        return layouts.whole(model)


def test_experts_that_are_built_on_the_meta_device_have_the_same_values(four_ranks: StandingRanks) -> None:
    first, *others = [
        values
        for config in ({"dp_shard": 4}, {"ep": 4}, {"ep": 2}, {"dp_shard": 4, "ep": 2}, {"tp": 2, "ep": 2})
        for values in four_ranks.run(_values, config)
    ]
    for values in others:
        _assert_same(first, values)


class _Block(torch.nn.Module):
    """A router and experts, which has as many experts as they, as its attribute says."""

    def __init__(self, stack: torch.nn.Module) -> None:
        super().__init__()
        self.num_experts = 4
        self.router = torch.nn.Linear(8, 4, bias=False)
        self.experts = stack


class _Dense(torch.nn.Module):
    """Experts that all compute with all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = torch.nn.Parameter(torch.zeros(4, 8, 8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows @ self.up).sum(0)


def test_stacks_of_experts_are_told_from_what_is_around_them() -> None:
    assert list(check_experts(_Block(Experts(4, 8)), 2)) == ["experts"]
    with pytest.raises(ModelError, match=r"`experts` has experts, and `forward\(rows: "):
        check_experts(_Block(_Dense()), 2)


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "fewer": ({"ep": 4}, 2, "`blocks.0.mixture.experts` has 2 experts, fewer than the 4 ranks of `ep`. Use"),
    "uneven": (
        {"ep": 4},
        6,
        "has 6 experts, which cannot be shared evenly by the 4 ranks of `ep`. Use `ep` 2",
    ),
    "shard": (
        {"ep": 3, "dp_shard": 4},
        6,
        "nearest layout of 4 ranks is `dp_replicate` 2 × `dp_shard` 2 × `ep` 2",
    ),
    "more than shards": ({"ep": 4, "dp_shard": 2, "tp": 2}, 4, "it divides them. The nearest layout of 4"),
    "ranks": ({"ep": 3}, 3, "which does not multiply to the 4 ranks"),
    "stages": (
        {"ep": 2, "pp": 4},
        4,
        "to the 4 ranks of the job. The nearest layout of 4 ranks is `pp` 2 × `dp_shard` 2 × `ep` 2",
    ),
    "uneven in stages": (
        {"ep": 2, "pp": 2},
        3,
        "has 3 experts, which cannot be shared evenly by the 2 ranks",
    ),
    "no experts in stages": ({"ep": 2, "pp": 2}, 0, "GPT has no experts for the 2 ranks of `ep`"),
    "half in stages": ({"pp": 2, "ep": 2}, 4, "`precision` is 'amp_fp16', which does not work beside it"),
    "offloaded stages": (
        {"pp": 2, "ep": 2, "fsdp": {"cpu_offload": True}},
        4,
        "has `pp`, and `cpu_offload` in `fsdp` is True",
    ),
    "split backward": (
        {"pp": {"degree": 2, "schedule": "ZBVZeroBubble"}, "ep": 2},
        4,
        "is 'ZBVZeroBubble' with `ep`: it computes the gradients of weights later",
    ),
    "zero": ({"ep": 0}, 4, "expected a number of ranks from 1"),
    "key": ({"ep": {"degre": 2}}, 4, "Did you mean `degree`?"),
    "offloaded": ({"ep": 4, "fsdp": {"cpu_offload": True}}, 4, "`cpu_offload` is True, which does not work"),
    "half": ({"dp_shard": 4, "ep": 2}, 4, "`precision` is 'amp_fp16', which does not work beside it"),
    "no experts": ({"ep": 4}, 0, "GPT has no experts for the 4 ranks of `ep`"),
}


PRECISIONS = {"half": "amp_fp16", "half in stages": "amp_fp16"}


def _refuse() -> dict[str, str]:
    messages = {}
    for name, (config, num_experts, _) in REFUSED.items():
        size = GPTConfig(context=8, width=8, num_layers=1, num_heads=2)
        model = (
            MixtureGPT(MixtureConfig(gpt=size, num_experts=num_experts))
            if num_experts
            else layouts.build("gpt")
        )
        with (
            pytest.raises((ConfigError, ModelError)) as caught,
            provide(config, device="cpu", timeout_s=60, precision=PRECISIONS.get(name)) as parallelism,
        ):
            parallelism.lay_out(model)
        messages[name] = str(caught.value)
    return messages


def test_experts_that_ranks_cannot_share_are_refused_alike_on_every_rank(four_ranks: StandingRanks) -> None:
    by_rank = four_ranks.run(_refuse)
    for name, (_, _, words) in REFUSED.items():
        assert words in by_rank[0][name], by_rank[0][name]
    assert by_rank == [by_rank[0]] * 4
