"""A model in stages trains and resumes as one process does, and what stages cannot do is refused by name."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import hocket.ckpt
from hocket.dist import ConfigError, ModelError
from hocket.recipes.gpt import GPT, GPTConfig
from hocket.trainer import Algorithm, Callback, Trainer
from hocket.trainer.callbacks import GradNormMonitor, LoadCheckpoint
from hocket.trainer.errors import TrainerError
from support import layouts
from support.standing_ranks import StandingRanks

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.10", reason="`pp` needs torch 2.10: gloo of torch 2.9 ends ranks of several stages"
)

TOLERANCE = 1e-5
KINDS = ("gpt", "llama", "qwen3", "mistral", "untied gpt2")
SCHEDULES: dict[str, Any] = {
    "1F1B": 4,
    "GPipe": {"degree": 4, "schedule": "gpipe"},
    "split": {"degree": 4, "split": ["2", "3", "4"]},
}
SEVERAL: dict[str, Any] = {
    name: {"degree": 4, "schedule": name}
    for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
}
"""The schedules that give each of four ranks two stages."""


@functools.cache
def _alone(kind: str, steps: int, size: int = 2, layers: int = 5) -> layouts.Numbers:
    return layouts.train(
        kind, None, 1, steps=steps, layers=layers, callbacks=[], device_train_microbatch_size=size
    )


def _train(kind: str, pipeline: Any, steps: int, size: int = 2, layers: int = 5) -> layouts.Numbers:
    return layouts.train(
        kind,
        {"pp": pipeline},
        1,
        steps=steps,
        layers=layers,
        callbacks=[],
        device_train_microbatch_size=size,
    )


def _train_low(config: Any, num_ranks: int) -> layouts.Numbers:
    return layouts.train("llama", config, num_ranks, layers=5, callbacks=[], precision="amp_bf16")


def _train_by_deepspeed(stage: int) -> layouts.Numbers:
    config = {"zero_optimization": {"stage": stage}, "pipeline": {"stages": 2}}
    return layouts.train("gpt", None, 2, layers=5, callbacks=[], deepspeed_config=config)


def _train_copies(
    kind: str, steps: int, axis: str = "dp_replicate", schedule: str = "1F1B", size: int = 2
) -> layouts.Numbers:
    config = {"pp": {"degree": 2, "schedule": schedule}, axis: 2}
    return layouts.train(
        kind, config, 2, steps=steps, layers=5, callbacks=[], device_train_microbatch_size=size
    )


def _check(found: list[layouts.Numbers], alone: layouts.Numbers, name: str, *, copies: int = 1) -> None:
    """Compare each rank's losses and norms, and the parameters of all stages together."""
    for stage in range(0, len(found), copies):
        for one in found[stage + 1 : stage + copies]:
            _check_equal(one.trained, found[stage].trained)
    names = [key for one in found[::copies] for key in one.trained]
    assert sorted(names) == sorted(alone.trained), "each parameter is on one stage, under its own name"
    trained = {key: value for one in found for key, value in one.trained.items()}
    trained = {key: trained[key] for key in alone.trained}
    for one in found:
        differences = one._replace(trained=trained).largest_differences(alone)
        assert max(differences.values()) <= TOLERANCE, (one.description, differences)
        assert one.losses == found[0].losses
        assert one.norms == found[0].norms
    print(f"{name} | {' | '.join(f'{value:.1e}' for value in differences.values())}")


@pytest.mark.parametrize(("kind", "name"), [("gpt", "1F1B"), ("llama", "GPipe")])
def test_stages_train_as_one_process(four_ranks: StandingRanks, kind: str, name: str) -> None:
    _check(four_ranks.run(_train, kind, SCHEDULES[name], 3), _alone(kind, 3), f"{kind} | {name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_trains_as_one_process(four_ranks: StandingRanks, kind: str, name: str) -> None:
    _check(four_ranks.run(_train, kind, SCHEDULES[name], 20), _alone(kind, 20), f"{kind} | {name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
def test_four_ranks_of_two_stages_train_as_one_process(four_ranks: StandingRanks, name: str) -> None:
    found = four_ranks.run(_train, "gpt", SEVERAL[name], 20, 1, 9)
    _check(found, _alone("gpt", 20, 1, 9), f"gpt | {name}")


def test_copies_of_stages_train_as_one_process(four_ranks: StandingRanks) -> None:
    found = four_ranks.run(_train_copies, "qwen3", 3)
    assert "pp 2 × dp_replicate 2" in found[0].description
    _check(found, _alone("qwen3", 3), "qwen3 | copies", copies=2)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_shards_of_stages_train_as_one_process(four_ranks: StandingRanks, schedule: str) -> None:
    found = four_ranks.run(_train_copies, "gpt", 3, "dp_shard", schedule)
    assert "pp 2 × dp_shard 2" in found[0].description
    _check(found, _alone("gpt", 3), "gpt | shards", copies=2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_stages_of_a_deepspeed_config_train_as_one_process(four_ranks: StandingRanks, stage: int) -> None:
    found = four_ranks.run(_train_by_deepspeed, stage)
    assert ("dp_replicate 2" if stage == 0 else "dp_shard 2") in found[0].description
    _check(found, _alone("gpt", 3), f"gpt | ZeRO {stage}", copies=2)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_stages_in_bf16_are_within_a_hundredth_of_one_process(four_ranks: StandingRanks, axis: str) -> None:
    alone = _train_low(None, 1)
    for found in four_ranks.run(_train_low, {"pp": 2, axis: 2}, 2):
        assert found.losses == pytest.approx(alone.losses, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_shards_of_stages_train_long_as_one_process(
    four_ranks: StandingRanks, kind: str, axis: str
) -> None:
    found = four_ranks.run(_train_copies, kind, 20, axis)
    _check(found, _alone(kind, 20), f"{kind} | pp 2 × {axis} 2", copies=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "schedule"),
    [
        *(("dp_replicate", name) for name in SEVERAL),
        ("dp_shard", "Interleaved1F1B"),
        ("dp_shard", "LoopedBFS"),
    ],
)
@pytest.mark.parametrize("kind", KINDS[1:])
def test_copies_and_shards_of_two_stages_train_as_one_process(
    four_ranks: StandingRanks, kind: str, axis: str, schedule: str
) -> None:
    found = four_ranks.run(_train_copies, kind, 20, axis, schedule, 1)
    _check(found, _alone(kind, 20, 1), f"{kind} | {schedule} | {axis} 2", copies=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_checkpointed_blocks_train_as_one_process(four_ranks: StandingRanks, kind: str) -> None:
    found = four_ranks.run(_train, f"{kind}, checkpointed", SCHEDULES["1F1B"], 3)
    _check(found, _alone(kind, 3), f"{kind} | checkpointed")


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
def test_checkpointed_blocks_of_two_stages_train_as_one_process(four_ranks: StandingRanks, name: str) -> None:
    found = four_ranks.run(_train, "llama, checkpointed", SEVERAL[name], 3, 1, 9)
    _check(found, _alone("llama", 3, 1, 9), f"llama | {name} | checkpointed")


class Five(GPT):
    """A model of five blocks."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(context=layouts.LENGTH - 1, width=24, num_layers=5, num_heads=4))


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


@pytest.mark.slow
def test_what_is_outside_of_the_blocks_counts_once_a_microbatch(four_ranks: StandingRanks) -> None:
    for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        counts = four_ranks.run(_count_calls, schedule)
        for name in ("byte_embedding", "norm"):
            assert [count[name] for count in counts if name in count] == [6, 6], (schedule, name)


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
    "beside": (
        {"config": {"pp": 2, "tp": 2}},
        (
            "`pp` 2 and `tp` 2, which is not implemented beside `pp`. The nearest layouts that are: `pp` 2 × "
            "`dp_shard` 2, or `dp_shard` 2 × `tp` 2"
        ),
    ),
    "context": (
        {"config": {"pp": 2, "cp": 2}},
        (
            "`pp` 2 and `cp` 2, which is not implemented beside `pp`. The nearest layouts that are: `pp` 2 × "
            "`dp_shard` 2, or `dp_shard` 2 × `cp` 2"
        ),
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
    "tied": (
        {"kind": "gpt2", "layers": 5},
        "are one tied weight, and `pp` puts them into the stages 0 and 3",
    ),
    "tied llama": ({"kind": "tied llama", "layers": 5}, "Untie them (`tie_word_embeddings=False`"),
    "routers": ({"model": routed}, "`output_router_logits` of HuggingFaceModel is True"),
    "late norm": ({"model": LateNorm}, "after the blocks of `blocks`, and it is part of stage 0, expected 3"),
    "skip": ({"model": Skip}, "uses activations from between the blocks of `blocks` after them"),
    "between": ({"model": ScaledBetween}, "`blocks.1` does not get the output of the block before it"),
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
    "fp16": ({"precision": "amp_fp16"}, "`pp` is 4 and `precision` is 'amp_fp16'"),
}


def _fit(given: dict[str, Any]) -> None:
    options = dict(given)
    kind, layers = options.pop("kind", "gpt"), options.pop("layers", 5)
    model = options.pop("model")() if "model" in options else layouts.build(kind, layers)
    defaults = {"device_train_microbatch_size": 2, "progress_bar": False, "device": "cpu", "seed": 7}
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(layouts.samples(kind, 1), batch_size=layouts.GLOBAL_BATCH),
        max_duration="1ba",
        parallelism_config=options.pop("config", {"pp": 4}),
        **{**defaults, **options},
    )
    with contextlib.closing(trainer):
        trainer.fit()


def _refuse() -> dict[str, str]:
    messages = {}
    for name, (given, _) in REFUSED.items():
        with pytest.raises((ConfigError, ModelError, TrainerError)) as caught:
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


class Watching(nn.Module):
    """A block with the running mean of its input and a random number in buffers."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("drawn", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.mean.lerp_(x.abs().mean(), 0.1)
            self.drawn.copy_(torch.rand(()))
        return self.block(x)


def watching(kind: str = "gpt") -> Any:
    model: Any = layouts.build(kind, 5)
    if kind == "gpt":
        model.blocks = nn.ModuleList(map(Watching, model.blocks))
    return model


class Course(NamedTuple):
    """The tensors of a rank at the start of a training, after two batches, and at its end."""

    start: dict[str, Tensor]
    middle: dict[str, Tensor]
    end: dict[str, Tensor]


class Taken(Callback):
    """A callback that takes a rank's tensors after two batches."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def batch_end(self, state: Any, logger: Any) -> None:
        """Take them."""
        if state.timestamp.counts.batch == 2:
            self.tensors = _tensors(state)


def _tensors(state: Any) -> dict[str, Tensor]:
    """Return parameters, slots and buffers by name, without the buffers of other stages. Collective."""
    found = layouts.whole(state.model)
    (optimizer,) = state.optimizers
    buffers = {
        name: one
        for name, one in state.model.named_buffers()
        if any(key.startswith(f"{name.rpartition('.')[0]}.") for key in found)
    }
    for name, one in state.model.named_parameters():
        for slot, value in optimizer.state.get(one, {}).items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{name} {slot}"] = whole.clone()
    return found | {name: one.clone() for name, one in buffers.items()}


def _go_on(kind: str, config: Any, num_ranks: int, folder: str, load: str | None) -> Course:
    """Train four batches, and save after two; or load and train the rest. Collective with several ranks."""
    model = watching(kind)
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0}]
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(layouts.samples(kind, 4), batch_size=layouts.GLOBAL_BATCH // num_ranks),
        optimizers=torch.optim.AdamW(groups, lr=3e-3, eps=1e-4),
        max_duration="4ba",
        gradient_clipping=0.5,
        device_train_microbatch_size=2,
        parallelism_config=config,
        callbacks=[taken := Taken()],
        save_folder=folder,
        save_filename="ba{batch}",
        save_interval="2ba",
        load_path=load,
        progress_bar=False,
        device="cpu",
        seed=7,
    )
    with contextlib.closing(trainer):
        start = _tensors(trainer.state)
        trainer.fit()
        return Course(start, taken.tensors, _tensors(trainer.state))


def _resume(kind: str, folder: str, of_one: str) -> dict[str, Course]:
    """Train in stages and go on under layouts of four ranks. Collective."""
    stages, copies, sharded = {"pp": 4}, {"pp": 2, "dp_replicate": 2}, {"pp": 2, "dp_shard": 2}
    return {
        "stages": _go_on(kind, stages, 1, f"{folder}/stages", None),
        "stages again": _go_on(kind, stages, 1, f"{folder}/again", f"{folder}/stages/ba2"),
        "shards": _go_on(kind, {"dp_shard": 4}, 4, f"{folder}/shards", f"{folder}/stages/ba2"),
        "of one": _go_on(kind, stages, 1, f"{folder}/of_one", of_one),
        "copies": _go_on(kind, copies, 2, f"{folder}/copies", None),
        "copies again": _go_on(kind, copies, 2, f"{folder}/copies_again", f"{folder}/copies/ba2"),
        "sharded": _go_on(kind, sharded, 2, f"{folder}/sharded", None),
        "sharded again": _go_on(kind, sharded, 2, f"{folder}/sharded_again", f"{folder}/sharded/ba2"),
        "sharded of copies": _go_on(kind, sharded, 2, f"{folder}/of", f"{folder}/copies/ba2"),
        "of sharded": _go_on(kind, stages, 1, f"{folder}/of_sharded", f"{folder}/sharded/ba2"),
        "of copies": _go_on(kind, stages, 1, f"{folder}/of_copies", f"{folder}/copies/ba2"),
    }


def _resume_several(folder: str) -> dict[str, Course]:
    """Train with two stages on each rank, and go on with others. Collective."""
    looped = {"pp": {"degree": 2, "schedule": "Interleaved1F1B"}, "dp_shard": 2}
    turned = {"pp": {"degree": 2, "schedule": "ZBVZeroBubble"}, "dp_replicate": 2}
    return {
        "turned": _go_on("gpt", turned, 2, f"{folder}/turned", None),
        "turned again": _go_on("gpt", turned, 2, f"{folder}/again", f"{folder}/turned/ba2"),
        "looped": _go_on("gpt", looped, 2, f"{folder}/looped", f"{folder}/turned/ba2"),
        "stages": _go_on("gpt", {"pp": 4}, 1, f"{folder}/stages", f"{folder}/turned/ba2"),
        "looped again": _go_on("gpt", looped, 2, f"{folder}/new", None),
        "of looped": _go_on("gpt", turned, 2, f"{folder}/of", f"{folder}/new/ba2"),
    }


def _joined(found: list[dict[str, Course]], name: str) -> Course:
    """Return the tensors of all stages, each of which one of the ranks has."""
    courses = [one[name] for one in found]
    parts = [[getattr(one, name) for one in courses] for name in Course._fields]
    joined = Course(*({key: value for part in each for key, value in part.items()} for each in parts))
    assert len(joined.end) == sum(len(one.end) for one in courses)
    return joined


def _parameters(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without buffers, which each copy of a stage has of its own samples."""
    return {name: one for name, one in tensors.items() if not name.endswith((".drawn", ".mean"))}


def _check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def _check_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare parameters and slots; buffers are of random numbers, and of the samples of one rank."""
    for name in (one for one in expected if not one.endswith((".drawn", ".mean"))):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_stages_resume_as_one_process(four_ranks: StandingRanks, tmp_path: Path, kind: str) -> None:
    one = _go_on(kind, None, 1, str(tmp_path / "one"), None)
    found = four_ranks.run(_resume, kind, str(tmp_path), str(tmp_path / "one" / "ba2"))
    stages, again, of_one = (_joined(found, name) for name in ("stages", "stages again", "of one"))
    model = watching(kind)
    assert len(stages.middle) == 3 * len(list(model.parameters())) + len(model.state_dict())
    _check_equal(again.start, stages.middle)
    _check_equal(again.end, stages.end)
    _check_equal(of_one.start, one.middle)
    _check_near(of_one.end, one.end)
    for courses in found:
        _check_equal(courses["shards"].start, stages.middle)
        _check_near(courses["shards"].end, stages.end)
    for name in ("copies", "sharded"):
        copies, copies_again = (_joined(found[1::2], one) for one in (name, f"{name} again"))
        of_copies = _joined(found, f"of {name}")
        for courses in (found[0], found[2]):
            _check_equal(courses[f"{name} again"].start, courses[name].middle)
        _check_equal(_parameters(copies_again.end), _parameters(copies.end))
        _check_equal(_parameters(of_copies.start), _parameters(copies.middle))
        _check_near(of_copies.end, copies.end)
    for courses in (found[0], found[2]):
        _check_equal(courses["sharded of copies"].start, courses["copies"].middle)
    alone = _go_on(kind, None, 1, str(tmp_path / "alone"), str(tmp_path / "stages" / "ba2"))
    _check_equal(alone.start, stages.middle)
    _check_near(alone.end, stages.end)
    folders = [tmp_path / name / "ba2" for name in ("stages", "one")]
    saved, expected = (sorted(hocket.ckpt.open(str(folder))) for folder in folders)
    assert saved == expected
    sizes = [sum(one.stat().st_size for one in folder.rglob("*")) for folder in folders]
    assert sizes[0] < 1.5 * sizes[1], "each tensor is written once"


@pytest.mark.slow
def test_two_stages_on_a_rank_resume_under_other_layouts(four_ranks: StandingRanks, tmp_path: Path) -> None:
    found = four_ranks.run(_resume_several, str(tmp_path))
    names = ("turned", "turned again", "looped", "looped again", "of looped")
    turned, again, looped, new, of_looped = (_joined(found[1::2], name) for name in names)
    for courses in (found[0], found[2]):
        _check_equal(courses["turned again"].start, courses["turned"].middle)
    _check_equal(_parameters(again.end), _parameters(turned.end))
    _check_equal(_parameters(looped.start), _parameters(turned.middle))
    _check_near(looped.end, turned.end)
    _check_equal(_parameters(_joined(found, "stages").start), _parameters(turned.middle))
    _check_equal(_parameters(of_looped.start), _parameters(new.middle))
    _check_near(of_looped.end, new.end)


def _load(load: str, **options: Any) -> dict[str, Tensor]:
    """Return this rank's tensors after a load in stages. Collective."""
    model = watching()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters()),
        parallelism_config={"pp": 4},
        load_path=load,
        progress_bar=False,
        device="cpu",
        seed=7,
        **options,
    )
    with contextlib.closing(trainer):
        return _tensors(trainer.state)


def _without_head(tree: dict[str, Any]) -> None:
    del tree["model"]["head.weight"]


def _load_parts(folder: str) -> list[dict[str, Tensor]]:
    saved = f"{folder}/saved"
    return [
        _load(saved),
        _load(saved, load_ignore_keys=["model/head.*"]),
        _load(saved, load_ignore_keys=_without_head),
        _load(saved, load_weights_only=True),
        _load(f"{folder}/foreign.pt", load_weights_only=True),
    ]


def _save_alone(folder: Path) -> Any:
    """Save a model with other values than those of a new one."""
    model = watching()
    with torch.no_grad():
        for one in model.state_dict().values():
            one.add_(1)
    options: dict[str, Any] = {"progress_bar": False, "device": "cpu", "seed": 7}
    trainer = Trainer(model=model, optimizers=torch.optim.AdamW(model.parameters()), **options)
    with contextlib.closing(trainer):
        trainer.save_checkpoint(folder / "saved")
    torch.save(model.state_dict(), folder / "foreign.pt")
    return model


def test_parts_of_a_checkpoint_are_loaded_into_stages(four_ranks: StandingRanks, tmp_path: Path) -> None:
    expected = _save_alone(tmp_path).state_dict()
    new = expected | {"head.weight": watching().head.weight.detach()}
    for case, found in enumerate(zip(*four_ranks.run(_load_parts, str(tmp_path)), strict=True)):
        loaded = {name: value for one in found for name, value in one.items()}
        _check_equal(loaded, new if case in (1, 2) else expected)


class OwnState(torch.optim.SGD):
    """An optimizer with a `state_dict` of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": 1}


class OwnEntries(Five):
    """A model with a `state_dict` of its own."""

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        return {name: one.clone() for name, one in super().state_dict(*args, **options).items()}


def _regroup(trainer: Trainer) -> None:
    (optimizer,) = trainer.state.optimizers
    optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()]})


def _refuse_states(folder: str) -> list[str]:
    """Return the messages of checkpoints that stages do not save or load. Collective."""

    def refused(
        model: Any, kind: Any, *, load: str | None = None, change: Callable[[Trainer], object] = str
    ) -> str:
        parameters = list(model.parameters())
        parts = [parameters] if load is None else [parameters[::2], parameters[1::2]]
        with contextlib.ExitStack() as stack:
            try:
                trainer = Trainer(
                    model=model,
                    optimizers=kind([{"params": one} for one in parts], lr=0.1),
                    parallelism_config={"pp": 4},
                    load_path=load,
                    save_folder=f"{folder}/never_made",
                    progress_bar=False,
                    device="cpu",
                )
                stack.callback(trainer.close)
                change(trainer)
                trainer.save_checkpoint_to_save_folder()
            except TrainerError as error:
                return str(error)
        return "nothing"

    return [
        refused(watching(), OwnState),
        refused(OwnEntries(), torch.optim.SGD),
        refused(watching(), torch.optim.SGD, change=_regroup),
        refused(watching(), torch.optim.AdamW, load=f"{folder}/saved"),
    ]


def test_states_that_stages_cannot_save_are_refused(four_ranks: StandingRanks, tmp_path: Path) -> None:
    _save_alone(tmp_path)
    for own, entries, groups, differing in four_ranks.run(_refuse_states, str(tmp_path)):
        assert "`OwnState` has a state beyond that of single parameters, or a `state_dict` of its own" in own
        assert "`OwnEntries` saves or loads its state in a way of its own" in entries
        assert "`SGD` has 2 groups of parameters that are not those of the start of training, 1" in groups
        assert "the parameter groups of `AdamW` differ from the checkpoint's" in differing
