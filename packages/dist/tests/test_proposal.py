"""`hocket-launch plan --layouts` proposes layouts, and estimates the one that it is asked for."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.dist.errors import ModelError
from hocket.dist.launch import command as launch
from hocket.dist.memory.layouts import LayoutEstimator, Machines
from hocket.dist.memory.proposal import propose
from hocket.recipes.gpt import GPT, GPTConfig
from hocket.recipes.mixture import MixtureConfig, MixtureGPT
from support import layouts
from support.stages import NEEDS_TORCH

BUILD = """
import torch
from torch import nn
def build():
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))), torch.ones(8, 1024)
"""
GPT_BUILD = """
import torch
from hocket.recipes.gpt import GPT, GPTConfig
from hocket.recipes.mixture import MixtureConfig, MixtureGPT
def build():
    model = GPT(GPTConfig(context=32, width=128, num_layers=4, num_heads=4))
    return model, {"tokens": torch.zeros(2, 33, dtype=torch.uint8)}
def alone():
    return build()[0]
def mixture():
    size = GPTConfig(context=32, width=128, num_layers=4, num_heads=4)
    return MixtureGPT(MixtureConfig(gpt=size, num_experts=12)), build()[1]
class Reading(GPT):
    def encode(self, seen):
        x = super().encode(seen)
        return x if x.sum() > 0 else -x
def reading():
    return Reading(GPTConfig(context=32, width=128, num_layers=4, num_heads=4)), build()[1]
class Fixed(GPT):
    def encode(self, seen):
        x = super().encode(seen)
        batch, length, width = x.shape
        return x + self.blocks[0].qkv(x).view(batch, length, 3, 4, 32)[:, :, 0].reshape(x.shape)
def fixed():
    return Fixed(GPTConfig(context=32, width=128, num_layers=4, num_heads=4)), build()[1]
"""


def test_plan_proposes_the_three_best_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpt.py"
    path.write_text(GPT_BUILD)
    arguments = ["plan", f"{path}:build", "--world_size", "4096", "-n", "8"]
    assert launch.main([*arguments, "--layouts", "--memory", "1"]) == 0
    out = capsys.readouterr().out
    assert "4096 ranks, 8 on a machine and 1 GiB on each" in out
    assert [line[:2] for line in out.splitlines() if line[1:2] == "."] == ["1.", "2.", "3."]
    assert out.count("why      fits with") == 3
    assert launch.main([*arguments, "--layouts", "--memory", "0.001"]) == 3
    assert "The smallest:" in capsys.readouterr().out
    assert launch.main([*arguments, "--parallelism-config", "{'pp': 4, 'dp_shard': 1024}"]) == 0
    assert "1. {'pp': 4, 'dp_shard': 1024}" in capsys.readouterr().out
    for given in (
        "{'cp': {'degree': 2, 'method': 'ring'}, 'tp': {'degree': 2, 'sequence_parallel': True}}",
        "{'tp': {'degree': 4, 'loss_parallel': True}}",
    ):
        assert launch.main([*arguments, "--parallelism-config", given]) == 0
        assert given[1:-1] in capsys.readouterr().out
    for options, message in (
        (["--parallelism-config", "{'tp': 3}"], "The nearest layout that does is"),
        (
            ["--parallelism-config", "{'tp': {'degree': 2, 'plan': {'blocks.*.nothing': 'colwise'}}}"],
            "names `blocks.*.nothing`, which is no module of GPT",
        ),
        (["--parallelism-config", "{'fsdp': {'cpu_offload': True}}"], "Give these keys in `--fsdp-config`"),
        (["--parallelism-config", "{'tq': 2}"], "Did you mean `tp`?"),
        (["--parallelism-config", "{'ep': 8}"], "GPT has no experts for the 8 ranks of `ep`"),
        (["--parallelism-config", "{'pp': 8}"], "has 4 blocks"),
        (["--parallelism-config", "{'cp': 8}"], "has `num_heads` 4, which 8 ranks of `cp`"),
        (["--parallelism-config", "{'pp': {'degree': 2, 'schedule': '2F2B'}}"], "which is unknown"),
        (["--layouts", "--parallelism-config", "{}"], "Give one of them"),
        (["--layouts", "-n", "3"], "3 ranks on each machine do not divide"),
        (["--layouts", "--fsdp-config", "{'data_parallel_shard_degree': 8}"], "Leave it out"),
    ):
        assert launch.main([*arguments, *options]) == 1
        assert message in capsys.readouterr().err
    assert launch.main(["plan", f"{path}:alone", "--layouts"]) == 1
    assert "returned a model alone" in capsys.readouterr().err
    assert launch.main(["plan", f"{path}:reading", "--layouts"]) == 1
    assert "A model that reads values of tensors has no estimate of its layouts" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config",
    [
        "{'ep': 4}",
        "{'dp_shard': 12, 'ep': 6}",
        "{'dp_shard': 3, 'cp': 2, 'tp': 2, 'ep': 3}",
        "{'pp': 2, 'dp_shard': 3, 'tp': 2}",
        "{'pp': 2, 'dp_shard': 6, 'ep': 6}",
        "{'pp': 2, 'dp_shard': 3, 'cp': 2}",
        "{'pp': {'degree': 2, 'schedule': 'Interleaved1F1B'}}",
        "{'pp': {'degree': 2, 'schedule': 'ZBVZeroBubble'}, 'dp_replicate': 6}",
        "{'pp': {'degree': 2, 'split': ['blocks.1']}}",
        "{'cp': {'degree': 2}, 'tp': {'degree': 2}}",
    ],
)
@NEEDS_TORCH
def test_a_layout_that_was_asked_for_is_estimated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str
) -> None:
    path = tmp_path / "gpt.py"
    path.write_text(GPT_BUILD)
    arguments = ["plan", f"{path}:mixture", "--world_size", "12", "--parallelism-config", config]
    assert launch.main([*arguments, "--memory", "80GB"]) == 0
    out = capsys.readouterr().out
    assert "1 layout of 12 ranks, 12 on a machine and 74.5058 GiB on each" in out
    for axis in ast.literal_eval(config):
        sent = out.split("traffic")[1].splitlines()[0]
        assert f"`{axis}`" in sent or axis in ("dp_replicate", "cp" if "ep" in config else "")
    assert ("experts get equal numbers of rows" in out) == ("'ep'" in config)
    assert launch.main([*arguments, "--memory", "1MB"]) == 3


def test_plan_proposes_layouts_of_a_mixture_of_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpt.py"
    path.write_text(GPT_BUILD)
    arguments = ["plan", f"{path}:mixture", "--world_size", "12", "-n", "4", "--layouts"]
    assert launch.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.count("why      computes") == 3
    assert "without `" not in out
    # Seven experts: no number of ranks that divides twelve shares them.
    path.write_text(GPT_BUILD.replace("num_experts=12", "num_experts=7"))
    assert launch.main(arguments) == 0
    assert "without `ep`: `blocks.0.mixture.experts` has 7 experts" in capsys.readouterr().out


def test_ranks_that_share_experts_gather_fewer_parameters_and_send_rows() -> None:
    size = GPTConfig(context=32, width=128, num_layers=4, num_heads=4)
    with torch.device("meta"):
        model = MixtureGPT(MixtureConfig(gpt=size, num_experts=8))
    batch = {"tokens": torch.zeros(2, 33, dtype=torch.uint8)}
    estimator = LayoutEstimator(model, batch, Machines(ranks=8, ranks_each=4))
    found = [estimator.estimate({"dp_shard": 8, "ep": experts}) for experts in (1, 2, 4, 8)]
    gathered = [one.memory.gathered for one in found]
    assert gathered == sorted(gathered, reverse=True)
    assert len({one.memory.parameters for one in found}) == 1
    # Two experts of each of 64 positions in four blocks: there, back, and the gradients of both.
    rows = 4 * 2 * 64 * 128 * 4
    assert [one.sent.get("ep", 0) for one in found] == [
        0,
        *(4 * rows * (experts - 1) / experts for experts in (2, 4, 8)),
    ]
    assert [one.crossing for one in found] == [{"dp_shard"}] * 3 + [{"dp_shard", "ep"}]
    copies = estimator.estimate({"dp_replicate": 2, "dp_shard": 4, "ep": 4})
    experts = 4 * 8 * 8 * 128 * 128 * 4
    assert copies.sent["dp_replicate"] >= experts / 4


def test_layouts_that_a_model_cannot_have_are_left_out_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.py"
    path.write_text(BUILD)
    assert launch.main(["plan", f"{path}:build", "--layouts"]) == 0
    out = capsys.readouterr().out
    assert "without `tp`: Sequential has no tensor-parallel plan" in out
    assert "without `pp`: Sequential has no `ModuleList` of equal blocks" in out
    path.write_text(GPT_BUILD)
    assert launch.main(["plan", f"{path}:fixed", "--layouts"]) == 0
    assert "without `tp`: Fixed does not compute with the share of its matrices" in capsys.readouterr().out
    assert (
        launch.main(["plan", f"{path}:fixed", "--world_size", "2", "--parallelism-config", "{'tp': 2}"]) == 1
    )
    assert "that each of 2 ranks of `tp` has (shape" in capsys.readouterr().err


def test_more_memory_and_fewer_layouts_go_together() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(context=32, width=128, num_layers=4, num_heads=4))
    batch = {"tokens": torch.zeros(2, 33, dtype=torch.uint8)}
    estimator = LayoutEstimator(model, batch, Machines(ranks=8, ranks_each=8))
    every = propose(estimator, None, count=1000)
    assert every.fitting == every.estimated == len(every.best)
    shares = [one.share for one in every.best]
    assert all(0 < share <= 1 for share in shares)
    assert shares == sorted(shares, key=lambda share: -round(share, 2))
    totals = sorted(one.memory.total for one in every.best)
    found = propose(estimator, totals[len(totals) // 2], count=1000)
    assert found.fitting >= len(totals) // 2
    assert all(one.memory.total <= totals[len(totals) // 2] for one in found.best)
    # What a rank holds of the model does not depend on which axis cuts it.
    whole = sum(parameter.numel() * 4 for parameter in model.parameters())
    for degrees in ({"dp_shard": 8}, {"dp_shard": 4, "cp": 2}, {"dp_shard": 4, "tp": 2}):
        one = estimator.estimate(degrees)
        assert one.memory.parameters == one.memory.gradients
        assert whole / 8 <= one.memory.parameters < whole / 8 * 1.1


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama", "qwen3", "mixtral"])
def test_a_model_of_transformers_with_a_plan_is_estimated_over_tp(kind: str) -> None:
    model = layouts.build(kind).to("meta")
    batch = {key: one[None] for key, one in layouts.samples(kind, 1)[0].items()}
    estimator = LayoutEstimator(model, batch, Machines(ranks=2, ranks_each=2))
    cut, whole = estimator.estimate({"tp": 2}), estimator.estimate({"dp_replicate": 2})
    assert whole.memory.parameters / 2 <= cut.memory.parameters < whole.memory.parameters * 0.95
    assert cut.memory.activations < whole.memory.activations
    assert cut.sent["tp"] > 0


def test_a_model_that_recomputes_its_blocks_by_itself_is_not_estimated() -> None:
    model: Any = layouts.build("llama").to("meta")
    model.model.model.layers[1].gradient_checkpointing = True
    batch = {key: one[None] for key, one in layouts.samples("llama", 1)[0].items()}
    with pytest.raises(
        ModelError, match=r"^`model\.model\.layers\.1` has the checkpointing of transformers, whose"
    ):
        LayoutEstimator(model, batch, Machines(ranks=2, ranks_each=2))


def test_a_weight_tied_over_two_stages_is_of_both_and_its_gradient_is_sent() -> None:
    batch = {"tokens": torch.zeros(2, 33, dtype=torch.uint8)}

    def estimate(is_tied: bool) -> Any:
        with torch.device("meta"):
            model = GPT(GPTConfig(context=32, width=128, num_layers=4, num_heads=4))
        if is_tied:
            model.head.weight = model.byte_embedding.weight
        estimator = LayoutEstimator(model, batch, Machines(ranks=4, ranks_each=4))
        return estimator.estimate({"pp": 2, "dp_shard": 2})

    tied, untied = estimate(True), estimate(False)
    assert tied.memory == untied.memory
    assert tied.sent["pp"] - untied.sent["pp"] == 256 * 128 * 4 / 2
