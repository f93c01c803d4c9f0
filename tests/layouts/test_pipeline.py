"""A model in stages trains as one process does, and what stages cannot do is refused by name."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, default_collate

from hocket.dist import DistError, ModelError
from hocket.dist.config.pipeline import PipelineConfig
from hocket.dist.layout.pipeline.blocks import StageBlocks
from hocket.dist.layout.pipeline.stages import cut_stages
from hocket.recipes.gpt import GPT, Block, GPTConfig
from hocket.trainer import Algorithm, Callback, Trainer
from hocket.trainer.callbacks import GradNormMonitor, LoadCheckpoint
from hocket.trainer.errors import TrainerError
from hocket.trainer.loggers import InMemoryLogger
from support import layouts
from support.stages import (
    KINDS,
    NEEDS_TORCH,
    Five,
    check_numbers,
    train_alone,
    train_copies,
    train_stages,
)
from support.standing_ranks import StandingRanks

pytestmark = NEEDS_TORCH

SCHEDULES: dict[str, Any] = {
    "1F1B": 4,
    "GPipe": {"degree": 4, "schedule": "gpipe"},
    "split": {"degree": 4, "split": ["2", "3", "4"]},
}


def _train_low(config: Any, num_ranks: int) -> layouts.Numbers:
    return layouts.train("llama", config, num_ranks, layers=5, callbacks=[], precision="amp_bf16")


def _train_by_deepspeed(stage: int, axes: dict[str, Any], num_ranks: int) -> layouts.Numbers:
    config = {"zero_optimization": {"stage": stage}, "pipeline": {"stages": 2}, **axes}
    return layouts.train("gpt", None, num_ranks, layers=5, callbacks=[], deepspeed_config=config)


@pytest.mark.parametrize(("kind", "name"), [("gpt", "1F1B"), ("llama", "GPipe")])
def test_stages_train_as_one_process(four_ranks: StandingRanks, kind: str, name: str) -> None:
    check_numbers(
        four_ranks.run(train_stages, kind, SCHEDULES[name], 3), train_alone(kind, 3), f"{kind} | {name}"
    )


SCHEDULED = [*(("gpt", name) for name in SCHEDULES), *((kind, "1F1B") for kind in KINDS if kind != "gpt")]
"""Every schedule for one model; the others differ by what is before and after their blocks."""


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize(("kind", "name"), SCHEDULED)
def test_every_schedule_trains_as_one_process(four_ranks: StandingRanks, kind: str, name: str) -> None:
    steps = layouts.num_steps(kind)
    found = four_ranks.run(train_stages, kind, SCHEDULES[name], steps)
    check_numbers(found, train_alone(kind, steps), f"{kind} | {name}")


def test_copies_of_stages_train_as_one_process(four_ranks: StandingRanks) -> None:
    found = four_ranks.run(train_copies, "qwen3", 3)
    assert "pp 2 × dp_replicate 2" in found[0].description
    check_numbers(found, train_alone("qwen3", 3), "qwen3 | copies", copies=2)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_shards_of_stages_train_as_one_process(four_ranks: StandingRanks, schedule: str) -> None:
    found = four_ranks.run(train_copies, "gpt", 3, "dp_shard", schedule)
    assert "pp 2 × dp_shard 2" in found[0].description
    check_numbers(found, train_alone("gpt", 3), "gpt | shards", copies=2)


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize("stage", [0, 3])
def test_stages_of_a_deepspeed_config_train_as_one_process(four_ranks: StandingRanks, stage: int) -> None:
    found = four_ranks.run(_train_by_deepspeed, stage, {}, 2)
    assert ("dp_replicate 2" if stage == 0 else "dp_shard 2") in found[0].description
    check_numbers(found, train_alone("gpt", 3), f"gpt | ZeRO {stage}", copies=2)


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize(
    ("axes", "shown", "stage"),
    [({"tensor_parallel": {"autotp_size": 2}}, "tp 2", 0), ({"sequence_parallel_size": 2}, "cp 2", 3)],
)
def test_cut_stages_of_a_deepspeed_config_train_as_one_process(
    four_ranks: StandingRanks, axes: dict[str, Any], shown: str, stage: int
) -> None:
    found = four_ranks.run(_train_by_deepspeed, stage, axes, 1)
    assert f"pp 2 × {shown}" in found[0].description
    check_numbers(found, train_alone("gpt", 3), f"gpt | ZeRO {stage} | {shown}", copies=2)


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "tp", "cp"])
def test_stages_in_bf16_are_within_a_hundredth_of_one_process(four_ranks: StandingRanks, axis: str) -> None:
    alone = _train_low(None, 1)
    for found in four_ranks.run(_train_low, {"pp": 2, axis: 2}, 1 if axis in ("tp", "cp") else 2):
        assert found.losses == pytest.approx(alone.losses, rel=1e-2)


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_copies_and_shards_of_stages_train_long_as_one_process(
    four_ranks: StandingRanks, kind: str, axis: str
) -> None:
    steps = layouts.num_steps(kind)
    found = four_ranks.run(train_copies, kind, steps, axis)
    check_numbers(found, train_alone(kind, steps), f"{kind} | pp 2 × {axis} 2", copies=2)


@pytest.mark.slow(one_run_in=4)
def test_checkpointed_blocks_train_as_one_process(four_ranks: StandingRanks) -> None:
    found = four_ranks.run(train_stages, "qwen3, checkpointed", SCHEDULES["1F1B"], 3)
    check_numbers(found, train_alone("qwen3", 3), "qwen3 | checkpointed")


class LateNorm(Five):
    """A model that registers its last norm before the blocks."""

    def __init__(self) -> None:
        super().__init__()
        blocks, norm = self.blocks, self.norm
        del self.blocks, self.norm
        self.norm, self.blocks = norm, blocks
        self.head = self._modules.pop("head")


class Skip(Five):
    """A model that adds the output of the first block to that of the last."""

    def encode(self, seen: Tensor) -> Tensor:
        x = self.byte_embedding(seen)
        x = first = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        features: Tensor = self.norm(x + first)
        return features


class ScaledBetween(Five):
    """A model that computes between its blocks."""

    def encode(self, seen: Tensor) -> Tensor:
        x = self.byte_embedding(seen)
        for block in self.blocks:
            x = block(x) * 0.5
        features: Tensor = self.norm(x)
        return features


class Conditioned(Five):
    """A model whose blocks get a value beside the activations, computed of them without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Shifted(self.config) for _ in range(5))

    def encode(self, seen: Tensor) -> Tensor:
        x = self.byte_embedding(seen)
        mean = x.detach().mean(dim=1, keepdim=True)
        for block in self.blocks:
            x = block(x, mean)
        features: Tensor = self.norm(x)
        return features


class Shifted(Block):
    """A block that adds a value to its input."""

    def forward(self, x: Tensor, value: Tensor) -> Tensor:
        return super().forward(x + value)


class Unpacking(Five):
    """A model that takes a part of what its blocks return."""

    def encode(self, seen: Tensor) -> Tensor:
        x = self.byte_embedding(seen)
        for block in self.blocks:
            x = block(x)["activations"]
        features: Tensor = self.norm(x)
        return features


class Transposing(Block):
    """A block whose output is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mT.contiguous().mT


class Uneven(Five):
    """A model that leaves out a block."""

    def encode(self, seen: Tensor) -> Tensor:
        x = self.byte_embedding(seen)
        for index, block in enumerate(self.blocks):
            x = x if index == 1 else block(x)
        features: Tensor = self.norm(x)
        return features


class Recomputing(Five):
    """A model whose activation checkpointing runs blocks without gradients."""

    def encode(self, seen: Tensor) -> Tensor:
        x = self.byte_embedding(seen)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        features: Tensor = self.norm(x)
        return features


def routed() -> Any:
    """Return a mixture of experts whose loss has a term of all routers."""
    model = layouts.build("mixtral", 5)
    model.config.output_router_logits = True
    return model


def odd_heads() -> GPT:
    return GPT(GPTConfig(context=layouts.LENGTH - 1, width=24, num_layers=5, num_heads=3))


class MixingNeighbours(Block):
    """A block in which each position sees the one before it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.5 * x.roll(1, dims=1))


def mixing_neighbours() -> Any:
    """Return a model whose blocks let positions act on each other by themselves."""
    model = Five()
    model.blocks = nn.ModuleList(MixingNeighbours(model.config) for _ in range(5))
    return model


def tied_blocks() -> Any:
    """Return a model whose first and last block share a matrix."""
    model = Five()
    model.blocks[4].mlp_in.weight = model.blocks[0].mlp_in.weight
    return model


class Listening(Callback):
    """A callback that is called with each microbatch."""

    def after_forward(self, state: Any, logger: Any) -> None:
        """Do nothing."""


class Averaging(Algorithm):
    """An algorithm that does nothing."""

    def match(self, event: Any, state: Any) -> bool:
        return False

    def apply(self, event: Any, state: Any, logger: Any) -> None:
        """Do nothing."""


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "degrees": ({"config": {"pp": 3}}, "The nearest layout that does is `pp` 2 × `dp_shard` 2"),
    "beside": ({"config": {"pp": 2, "tp": 3}}, "The nearest layout that does is `pp` 2 × `tp` 2"),
    "context": ({"config": {"pp": 2, "cp": 3}}, "The nearest layout that does is `pp` 2 × `cp` 2"),
    "plan of all stages": (
        {"config": {"pp": 2, "tp": {"degree": 2, "plan": {"blocks": "replicated_with_grad_allreduce"}}}},
        "the tensor-parallel plan names `blocks`, which has the blocks of all stages of `pp`",
    ),
    "split backward of matrices": (
        {"config": {"pp": {"degree": 2, "schedule": "ZBVZeroBubble"}, "tp": 2}},
        "is 'ZBVZeroBubble' with `tp`: it computes the gradients of weights later",
    ),
    "heads": (
        {"config": {"pp": 2, "cp": 2}, "model": odd_heads},
        "GPT has `num_heads` 3, which 2 ranks of `cp` cannot share evenly",
    ),
    "length": (
        {"config": {"pp": 2, "cp": 2}, "data": [{"tokens": torch.zeros(8, dtype=torch.uint8)}] * 8},
        "the input of `blocks` has the shape (2, 7, 24), expected (batch, sequence, features) with a",
    ),
    "neighbours": (
        {"config": {"pp": 2, "cp": 2}, "model": mixing_neighbours},
        "`blocks.0`, a MixingNeighbours, does not compute with a part of the sequence what it computes with",
    ),
    "offloaded": (
        {"config": {"pp": 2, "fsdp": {"cpu_offload": True}}},
        "and `cpu_offload` in `fsdp` is True",
    ),
    "schedule": (
        {"config": {"pp": {"degree": 4, "schedule": "2F2B"}}},
        "'2F2B', which is unknown. Use '1F1B'",
    ),
    "stages": (
        {"config": {"pp": {"degree": 4, "schedule": "ZBVZeroBubble"}}},
        "which 8 stages of `pp` cannot share. Use `pp` 2 or less with 2 stages for each rank",
    ),
    "stages of a rank": (
        {"config": {"pp": {"degree": 2, "stages_per_rank": 2}}},
        "`parallelism_config['pp']['stages_per_rank']` is 2, and the schedule '1F1B' needs 1",
    ),
    "split backward": (
        {"config": {"pp": {"degree": 2, "schedule": "ZBVZeroBubble"}, "dp_shard": 2}},
        "is 'ZBVZeroBubble' with `dp_shard`: it computes the gradients of weights later",
    ),
    "split of two": (
        {"config": {"pp": {"degree": 2, "schedule": "LoopedBFS", "split": ["2"]}, "dp_replicate": 2}},
        "and `degree` is 2 with 2 stages each. Name the 3 blocks",
    ),
    "few of two": (
        {
            "config": {"pp": {"degree": 2, "schedule": "DualPipeV"}, "dp_replicate": 2},
            "device_train_microbatch_size": 4,
        },
        "`pp` has 4 stages on 2 ranks, which torch's schedule 'DualPipeV' refuses",
    ),
    "split": ({"config": {"pp": {"degree": 4, "split": ["2"]}}}, "names 1 blocks, which make 2 stages"),
    "no block": (
        {"config": {"pp": {"degree": 4, "split": ["2", "1", "3"]}}},
        "`1` is no block after the first one of the stage before. Name blocks from `blocks.1` to `blocks.4`",
    ),
    "few blocks": ({"kind": "gpt", "layers": 3}, "has 3 blocks in `blocks`, which 4 stages of `pp` cannot"),
    "tied blocks": (
        {"model": tied_blocks},
        "`blocks.0.mlp_in.weight` and `blocks.4.mlp_in.weight` are one tied weight, and `pp` puts them into",
    ),
    "routers": ({"model": routed}, "`output_router_logits` of HuggingFaceModel is True"),
    "late norm": ({"model": LateNorm}, "after the blocks of `blocks`, and it is part of stage 0, expected 3"),
    "skip": ({"model": Skip}, "uses activations from between the blocks of `blocks` after them"),
    "between": ({"model": ScaledBetween}, "`blocks.1` does not get the output of the block before it"),
    "value": (
        {"model": Conditioned},
        "`blocks.0` gets, beside the activations, a value of the shape (2, 1, 24) that is another one on",
    ),
    "size": ({"device_train_microbatch_size": 3}, "`device_train_microbatch_size` 3 does not divide: all"),
    "few": ({"device_train_microbatch_size": 4}, "'1F1B' needs at least 4 microbatches. Set a smaller"),
    "auto": ({"device_train_microbatch_size": "auto"}, "`device_train_microbatch_size='auto'` does not work"),
    "loading": (
        {"callbacks": [LoadCheckpoint("no_run/ep0")]},
        "`LoadCheckpoint` loads the whole model, and with `pp` each rank has one stage",
    ),
    "algorithm": ({"algorithms": [Averaging()]}, "the algorithm `Averaging` does not work with `pp`"),
    "microbatches": ({"callbacks": [Listening()]}, "is called at `after_forward` with each microbatch, does"),
    "norms": ({"callbacks": [GradNormMonitor()]}, "`GradNormMonitor`, which reads the whole model, does not"),
    "reentrant": ({"model": Recomputing}, "as in activation checkpointing with `use_reentrant=True`"),
    "state": (
        {"optimizer": torch.optim.Adagrad},
        "Adagrad has state already, which `pp` does not cut into stages. Build a new optimizer, of a kind",
    ),
    "fp16": ({"precision": "amp_fp16"}, "`pp` is 4 and `precision` is 'amp_fp16'"),
}


def _fit(given: dict[str, Any]) -> None:
    options = dict(given)
    kind, layers = options.pop("kind", "gpt"), options.pop("layers", 5)
    model = options.pop("model")() if "model" in options else layouts.build(kind, layers)
    defaults = {"device_train_microbatch_size": 2, "progress_bar": False, "device": "cpu", "seed": 7}
    data = options.pop("data", layouts.samples(kind, 1))
    if "optimizer" in options:
        options["optimizers"] = options.pop("optimizer")(model.parameters())
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=layouts.GLOBAL_BATCH),
        max_duration="1ba",
        parallelism_config=options.pop("config", {"pp": 4}),
        **{**defaults, **options},
    )
    with contextlib.closing(trainer):
        trainer.fit()


def _refuse() -> dict[str, str]:
    messages = {}
    for name, (given, _) in REFUSED.items():
        with pytest.raises((DistError, TrainerError)) as caught:
            _fit(given)
        messages[name] = str(caught.value)
    return messages


def test_what_stages_cannot_do_is_refused_on_every_rank(four_ranks: StandingRanks) -> None:
    by_rank = four_ranks.run(_refuse)
    for messages in by_rank:
        for name in ("degrees", "beside", "context"):
            assert messages[name] == by_rank[0][name]
        for name, (_, words) in REFUSED.items():
            assert words in messages[name], name


def mixed() -> Any:
    """Return a model whose last stage, if it is sharded, has a group of two dtypes."""
    model = Five()
    model.head.bfloat16()
    return model


def _refuse_mixed() -> str:
    with pytest.raises(ModelError) as caught:
        _fit({"model": mixed, "config": {"pp": 2, "fsdp": {}}})
    return str(caught.value)


def test_a_refusal_of_one_stage_is_told_to_the_others(two_ranks: StandingRanks) -> None:
    first, second = two_ranks.run(_refuse_mixed)
    assert second.startswith("`norm.weight` is float32 and `head.weight` is bfloat16, both in the group")
    assert first == f"rank 1: {second}"


def _train_first(config: Any) -> layouts.Numbers:
    """Train the first block, and a norm of the last stage that nothing uses. Collective."""

    def freeze(model: Any) -> torch.optim.SGD:
        model.unused = nn.LayerNorm(24)
        model.requires_grad_(False)
        trained = [
            *model.blocks[0].requires_grad_().parameters(),
            *model.unused.requires_grad_().parameters(),
        ]
        return torch.optim.SGD(trained, lr=0.1)

    return layouts.train("gpt", config, 1, layers=5, callbacks=[], make_optimizers=freeze)


def test_a_stage_without_gradients_takes_part_in_clipping(two_ranks: StandingRanks) -> None:
    alone = _train_first(None)
    for found in two_ranks.run(_train_first, {"pp": 2}):
        assert found.losses == pytest.approx(alone.losses, rel=1e-5)
        assert found.norms == pytest.approx(alone.norms, rel=1e-5)


def _fail_without_blocks() -> list[str]:
    with pytest.raises(IndexError) as caught:
        _fit({"model": Unpacking, "config": {"pp": 2}})
    return caught.value.__notes__


def test_an_error_of_the_pass_without_blocks_says_so(two_ranks: StandingRanks) -> None:
    for notes in two_ranks.run(_fail_without_blocks):
        assert "raised in a pass that skips the blocks of `blocks`" in "\n".join(notes)


def _train_transposing(config: Any) -> list[float]:
    torch.manual_seed(3)
    model = Five()
    model.blocks = nn.ModuleList(Transposing(model.config) for _ in range(5))
    memory = InMemoryLogger()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(layouts.samples("gpt", 2), batch_size=layouts.GLOBAL_BATCH),
        max_duration="2ba",
        device_train_microbatch_size=2,
        loggers=[memory],
        parallelism_config=config,
        progress_bar=False,
        device="cpu",
        seed=7,
    )
    with contextlib.closing(trainer):
        trainer.fit()
    return [float(value) for _, value in memory.data["loss/train/total"]]


def test_activations_that_are_not_contiguous_are_sent(two_ranks: StandingRanks) -> None:
    alone = _train_transposing(None)
    for losses in two_ranks.run(_train_transposing, {"pp": 2}):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_a_block_that_is_left_out_of_a_microbatch_is_refused() -> None:
    model = Uneven()
    blocks = StageBlocks(model, cut_stages(model, PipelineConfig(degree=2)), [0], {})
    batch = default_collate(layouts.samples("gpt", 1))
    with pytest.raises(ModelError, match=r"Uneven leaves out or repeats `blocks\.1` in a microbatch"):
        blocks.run(0, batch, None)
