"""Sequences that are cut over `cp` and `tp`: masks, positions, metrics, and what is refused by name."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from hocket.dist import ConfigError, ModelError, provide
from hocket.dist.layout.sequence.arguments import part_of_positions
from hocket.dist.layout.sequence.exchange import Axis
from hocket.recipes.gpt import GPT, GPTConfig
from hocket.trainer import Evaluator, Trainer
from hocket.trainer.loggers import InMemoryLogger
from support import layouts
from support.standing_ranks import StandingRanks

CONTEXT = {"dp_shard": 2, "cp": 2}
SEQUENCES = {"dp_shard": 2, "tp": {"degree": 2, "sequence_parallel": True}}
BOTH = {"dp_shard": 1, "cp": 2, "tp": {"degree": 2, "sequence_parallel": True, "loss_parallel": True}}


class Block(nn.Module):
    """Attention in several ways, of which cut sequences allow one."""

    def __init__(self, kind: str, width: int = 8) -> None:
        super().__init__()
        self.kind, self.norm, self.qkv = kind, nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        if kind == "own parameter":
            self.gate = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        projected = self.qkv(self.norm(x))
        q, k, v = projected.view(*projected.shape[:2], 3, -1, 2).permute(2, 0, 3, 1, 4)
        if self.kind == "own positions":
            q = q + torch.arange(x.shape[1])[:, None]
        if self.kind == "matmul":
            mixed = (q @ k.mT).softmax(-1) @ v
        else:
            mask = torch.ones(x.shape[1], x.shape[1]).bool() if self.kind == "own mask" else None
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        if self.kind == "neighbours":
            mixed = mixed + mixed.roll(1, dims=2)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A stack of blocks, which are called in several orders."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order = {"each twice": (0, 0, 1, 1), "from the second": (1,), "the first": (0,)}.get(
            kind, (0, 1)
        )
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


PLAN = {"blocks.*.qkv": "packed_colwise:3", "blocks.*.out": "rowwise"}
REFUSED: dict[str, tuple[Any, str, int, str]] = {
    "length": (
        CONTEXT,
        "plain",
        5,
        "the input of `blocks` has the shape (2, 5, 8), expected (batch, sequence",
    ),
    "length of both": (BOTH, "plain", 6, "4 ranks of `cp` × `tp` can share evenly. Pad or cut sequences"),
    "own positions": (
        CONTEXT,
        "own positions",
        4,
        "`blocks.0`, a Block, does not compute with a part of the",
    ),
    "neighbours": (CONTEXT, "neighbours", 4, "does not compute with a part of the sequence"),
    "neighbours, tp": (
        SEQUENCES,
        "own positions",
        4,
        "takes the length of the sequence for that of its input",
    ),
    "matmul": (CONTEXT, "matmul", 4, "has not called `scaled_dot_product_attention`"),
    "own mask": (CONTEXT, "own mask", 4, "has a mask of the shape (2, 2), expected one for the 4 positions"),
    "each twice": (CONTEXT, "each twice", 4, "`blocks.0` is called again before the last one, and the cut"),
    "each twice, tp": (SEQUENCES, "each twice", 4, "Call these two once in a pass, before and after all"),
    "from the second": (CONTEXT, "from the second", 4, "`blocks.1` is called before the first one or after"),
    "the first": (SEQUENCES, "the first", 4, "the last block of `blocks` is not called, and the cut of"),
    "own parameter": (
        SEQUENCES,
        "own parameter",
        4,
        "`blocks.0.gate` stands beside layers that the plan cuts",
    ),
}


def _run_blocks(config: dict[str, Any], kind: str, length: int) -> None:
    if "tp" in config:
        config = {**config, "tp": {**config["tp"], "loss_parallel": False, "plan": PLAN}}
    with provide(config, device="cpu", timeout_s=30) as parallelism:
        model = parallelism.lay_out(Model(kind))
        model(torch.randn(2, length, 8, generator=torch.Generator().manual_seed(1)))


def _refuse() -> dict[str, str]:
    messages = {}
    for name, (config, kind, length, _) in REFUSED.items():
        with pytest.raises(ModelError) as caught:
            _run_blocks(config, kind, length)
        messages[name] = str(caught.value)
    for name, config, model in (
        ("heads", {"dp_shard": 1, "cp": 4}, GPT(GPTConfig(context=8, width=12, num_heads=2, num_layers=1))),
        ("no blocks", CONTEXT, nn.Linear(4, 4)),
        ("statistics", CONTEXT, nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))] * 2)),
        ("no logits", {"tp": {"degree": 2, "loss_parallel": True, "plan": PLAN}}, Model("plain")),
    ):
        with provide(config, device="cpu", timeout_s=30) as parallelism:
            with pytest.raises((ModelError, ConfigError)) as caught:
                parallelism.lay_out(model)
            messages[name] = str(caught.value)
    return messages


def test_what_cut_sequences_do_not_allow_is_refused(four_ranks: StandingRanks) -> None:
    for messages in four_ranks.run(_refuse):
        for name, (_, _, _, words) in REFUSED.items():
            assert words in messages[name], name
        assert "GPT has `num_heads` 2, which 4 ranks of `cp` cannot share evenly" in messages["heads"]
        assert "Linear has no `ModuleList` of equal blocks" in messages["no blocks"]
        assert "1` is a BatchNorm1d, whose statistics are of all positions" in messages["statistics"]
        assert "`loss_parallel` takes the logits of the one module" in messages["no logits"]


def _gradients(config: dict[str, Any] | None) -> dict[str, Tensor]:
    """Return the loss and gradients of a Llama with padding and positions of packed sequences."""
    model = layouts.build("llama")
    batch = default_collate(layouts.samples("llama", 1)[:2])
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, 6:] = 0
    batch["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 0]])
    with contextlib.ExitStack() as stack:
        if config is not None:
            stack.enter_context(provide(config, device="cpu", timeout_s=60)).lay_out(model)
        loss = model.loss(model(batch), batch)
        loss.backward()
        found = {name: one.grad for name, one in model.named_parameters()}
        whole = {n: one.full_tensor() if hasattr(one, "full_tensor") else one for n, one in found.items()}
    return {"loss": loss.detach()} | whole


def test_masks_and_positions_are_those_of_whole_sequences(four_ranks: StandingRanks) -> None:
    alone = _gradients(None)
    for found in four_ranks.run(_gradients, CONTEXT):
        for name, value in found.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("name", ["position_ids", "rope", "pos_emb", "freqs_cis"])
def test_arguments_with_a_row_for_each_position_are_cut_by_their_names(name: str) -> None:
    axis: Any = Axis(name="cp", group=None, rank=1, size=2)  # type: ignore[arg-type]
    given = torch.arange(8)[None]
    _, found = part_of_positions(((), {name: given, "exposure": given}), axis, 8)
    assert found[name].tolist() == [[4, 5, 6, 7]]
    assert found["exposure"] is given
    args, _ = part_of_positions(((given, given, given, given), {}), axis, 8, ("x", "exposure", name))
    assert [one.shape[1] for one in args] == [8, 8, 4, 8]


class Turned(nn.Module):
    """Blocks that get rotations of queries and keys by place, as those of Llama's first code."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(TurnedBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.1])
        freqs_cis = torch.polar(torch.ones_like(angles), angles)
        for layer in self.layers:
            x = layer(x, 0, freqs_cis, None)
        return x


class TurnedBlock(nn.Module):
    """One of them; `(x, start_pos, freqs_cis, mask)`."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        assert start_pos == 0
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        q, k = (
            torch.view_as_real(torch.view_as_complex(one.unflatten(-1, (2, 2))) * freqs_cis).flatten(-2)
            for one in (q, k)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def _turn(config: dict[str, Any] | None) -> Tensor:
    model: nn.Module = Turned()
    x = torch.arange(128.0).view(2, 8, 8).sin()
    with contextlib.ExitStack() as stack:
        if config is not None:
            model = stack.enter_context(provide(config, device="cpu", timeout_s=60)).lay_out(model)
        return model(x).detach()


def test_rotations_that_blocks_get_by_place_are_cut(four_ranks: StandingRanks) -> None:
    for found in four_ranks.run(_turn, CONTEXT):
        torch.testing.assert_close(found, _turn(None), rtol=1e-5, atol=1e-6)


def _evaluate(config: dict[str, Any] | None, num_ranks: int) -> dict[str, list[float]]:
    """Train and evaluate with metrics of the logits; return what is logged."""
    model, memory = layouts.build("qwen3"), InMemoryLogger()
    loader = DataLoader(layouts.samples("qwen3", 2), batch_size=layouts.GLOBAL_BATCH // num_ranks)
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        eval_dataloader=Evaluator(label="held_out", dataloader=loader),
        max_duration="2ba",
        eval_interval="1ba",
        parallelism_config=config,
        loggers=[memory],
        progress_bar=False,
        device="cpu",
        seed=7,
    )
    with contextlib.closing(trainer):
        trainer.fit()
    return {
        name: [float(value) for _, value in memory.data[name]] for name in memory.data if "held_out" in name
    }


@pytest.mark.slow(one_run_in=4)
def test_metrics_are_those_of_one_process(four_ranks: StandingRanks) -> None:
    alone = _evaluate(None, 1)
    assert any("perplexity" in name.lower() or "crossentropy" in name.lower() for name in alone)
    for config in (
        CONTEXT,
        {"dp_shard": 2, "cp": {"degree": 2, "method": "ring"}},
        {"dp_shard": 2, "tp": {"degree": 2, "loss_parallel": True}},
    ):
        for found in four_ranks.run(_evaluate, config, 2):
            assert found.keys() == alone.keys()
            for name, values in found.items():
                assert values == pytest.approx(alone[name], rel=1e-5), name


def _refuse_generation() -> list[str]:
    messages = []
    for config in (CONTEXT, SEQUENCES, BOTH):
        with provide(config, device="cpu", timeout_s=30) as parallelism, pytest.raises(ModelError) as caught:
            parallelism.check_generation(has_cache=False)
        messages.append(str(caught.value))
    with provide({"dp_shard": 2, "tp": 2}, device="cpu", timeout_s=30) as parallelism:
        parallelism.check_generation(has_cache=True)
    return messages


def test_generation_with_cut_sequences_is_refused_before_training(four_ranks: StandingRanks) -> None:
    for context, sequences, both in four_ranks.run(_refuse_generation):
        assert "`generate` does not work with `cp`" in context
        assert "`generate` does not work with `sequence_parallel`" in sequences
        assert both == context


def _train(fsdp: dict[str, Any] | None, axes: dict[str, Any] | None) -> layouts.Numbers:
    return layouts.train("gpt", None if axes is None else {"dp_shard": 1, **axes, "fsdp": fsdp}, 1, steps=2)


@pytest.mark.parametrize("axes", [{"cp": 2}, {"tp": {"degree": 2, "sequence_parallel": True}}], ids=str)
def test_operators_that_are_kept_in_checkpointed_blocks_change_nothing(
    two_ranks: StandingRanks, axes: dict[str, Any]
) -> None:
    kept = {"activation_checkpointing": True, "activation_checkpointing_save_ops": ["matmul", "attention"]}
    alone = _train(None, None)
    for found in two_ranks.run(_train, kept, axes):
        assert max(found.largest_differences(alone).values()) <= 1e-5
