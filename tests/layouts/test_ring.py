"""Ring attention over `cp` trains as one process does, for any number of heads, and refuses the rest.

Tolerance: losses, gradients' norms and the clipped update in float32 within a relative 1e-5.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from hocket.dist import ConfigError, ModelError, provide
from support import layouts
from support.standing_ranks import StandingRanks

TOLERANCE = 1e-5
RING_2 = {"degree": 2, "method": "ring"}
RING_4 = {"degree": 4, "method": "ring"}
SENT_ON = {"degree": 2, "method": "ring", "rotate_method": "alltoall"}
SEQUENCE = {"degree": 2, "sequence_parallel": True, "loss_parallel": True}
CHECKPOINTED = {"activation_checkpointing": True}
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "cp 4": ({"dp_shard": 1, "cp": RING_4}, 1),
    "cp 4, sent on": ({"dp_shard": 1, "cp": {**RING_4, "rotate_method": "alltoall"}}, 1),
    "dp_shard 2 × cp 2": ({"dp_shard": 2, "cp": SENT_ON}, 2),
    "dp_replicate 2 × cp 2, checkpointed": (
        {"cp": RING_2, "fsdp": {"data_parallel_replicate_degree": 2, **CHECKPOINTED}},
        2,
    ),
    "cp 2 × tp 2": ({"dp_shard": 1, "cp": RING_2, "tp": 2}, 1),
    "cp 2 × tp 2, sequences, loss": ({"dp_shard": 1, "cp": SENT_ON, "tp": SEQUENCE}, 1),
    "dp_shard 2 × cp 2 × ep 2": ({"dp_shard": 2, "cp": RING_2, "ep": 2}, 2),
}
CASES = [
    *(("mixture" if "ep" in name else "gpt", name) for name in LAYOUTS),
    *(("tied llama", name) for name in ("cp 4", "dp_shard 2 × cp 2", "cp 2 × tp 2, sequences, loss")),
    ("mistral", "cp 4, sent on"),
    ("gpt2", "cp 2 × tp 2"),
    ("bert", "cp 4, sent on"),
    ("bert", "dp_replicate 2 × cp 2, checkpointed"),
]
"""Every layout for one model. Others differ by their attention: fewer heads of keys than ranks, packed
matrices and both directions."""


def _train(kind: str, config: dict[str, Any] | None, num_ranks: int, steps: int) -> layouts.Numbers:
    return layouts.train(kind, config, num_ranks, steps=steps)


@functools.cache
def _alone(kind: str, steps: int) -> layouts.Numbers:
    return _train(kind, None, 1, steps)


def _check(ranks: StandingRanks, kind: str, name: str, steps: int) -> None:
    found = ranks.run(_train, kind, *LAYOUTS[name], steps)
    for one in found:
        differences = one.largest_differences(_alone(kind, steps))
        assert max(differences.values()) <= TOLERANCE, (one.description, differences)
        assert "attention over positions by a ring" in one.description
        assert one.losses == found[0].losses
    print(f"{kind} | {name} | " + " | ".join(f"{value:.1e}" for value in differences.values()))


@pytest.mark.parametrize(
    ("kind", "name"),
    [("mixtral", "cp 4"), ("gpt", "dp_shard 2 × cp 2"), ("qwen3", "cp 2 × tp 2, sequences, loss")],
)
def test_a_ring_trains_as_one_process(four_ranks: StandingRanks, kind: str, name: str) -> None:
    """Four ranks share the two heads of keys of the Mixtral, and each has parts of one position."""
    _check(four_ranks, kind, name, 3)


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_products_of_a_ring_train_as_one_process(four_ranks: StandingRanks, kind: str, name: str) -> None:
    _check(four_ranks, kind, name, layouts.num_steps(kind))


def _batch(what: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model and a batch whose attention has a mask, or positions that do not begin at 0."""
    kind = "mistral" if what == "window" else "bert" if what == "both directions" else "llama"
    model: Any = layouts.build(kind)
    batch = default_collate(layouts.samples(kind, 1)[:2])
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if what == "window":
        model.model.config.sliding_window = 3
    elif what == "packed":
        batch["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1]])
        del batch["attention_mask"]
    elif what == "positions":
        batch["position_ids"] = torch.arange(8).add(5).expand(2, 8).contiguous()
    elif what == "padded left":
        batch["attention_mask"][1, :3] = 0
    else:
        batch["attention_mask"][1, 5:] = 0
    return model, batch


def _gradients(config: dict[str, Any] | None, what: str) -> tuple[dict[str, Tensor], set[bool]]:
    """Return the loss and gradients of a model, and whether its attention has had masks."""
    model, batch = _batch(what)
    masks: set[bool] = set()
    attend = F.scaled_dot_product_attention

    def note(*args: Any, **kwargs: Any) -> Tensor:
        masks.add(kwargs.get("attn_mask") is not None)
        return attend(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        if config is not None:
            stack.enter_context(provide(config, device="cpu", timeout_s=60)).lay_out(model)
        else:
            F.scaled_dot_product_attention = note
            stack.callback(setattr, F, "scaled_dot_product_attention", attend)
        loss = model.loss(model(batch), batch)
        loss.backward()
        found = {name: one.grad for name, one in model.named_parameters()}
        whole = {n: one.full_tensor() if hasattr(one, "full_tensor") else one for n, one in found.items()}
    return {"loss": loss.detach()} | whole, masks


@pytest.mark.parametrize(
    "what", ["padded right", "padded left", "packed", "window", "both directions", "positions"]
)
def test_masks_and_positions_are_those_of_whole_sequences(four_ranks: StandingRanks, what: str) -> None:
    alone, masks = _gradients(None, what)
    assert masks == {what != "positions"}
    for found, _ in four_ranks.run(_gradients, {"dp_shard": 1, "cp": RING_4}, what):
        for name, value in found.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-5, atol=1e-6, msg=name)


class Block(nn.Module):
    """Attention whose settings are those of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv = kind, nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 2).permute(2, 0, 3, 1, 4)
        options: dict[str, Any] = {"is_causal": True}
        if self.kind == "dropout" and self.training:
            options["dropout_p"] = 0.25
        elif self.kind == "learned mask":
            options = {"attn_mask": self.qkv.bias.sum().expand(8, 8)}
        elif self.kind == "own mask":
            options = {"attn_mask": torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)}
        elif self.kind == "one batch":
            k, v = k[:1], v[:1]
        elif self.kind == "float64":
            q, k, v = q.double(), k.double(), v.double()
        mixed = F.scaled_dot_product_attention(q, k, v, **options)
        return x + mixed.transpose(1, 2).flatten(2).to(x.dtype)


class Model(nn.Module):
    """A stack of blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


REFUSED = {
    "length": "can share evenly. Pad or cut sequences to a multiple of 4",
    "dropout": "attention has dropout of the rate 0.25, which `cp` with the method 'ring' does not compute",
    "learned mask": "a mask of the shape (8, 8) that needs gradients, which `cp` with the method 'ring'",
    "own mask": "has a mask of the shape (4, 4), expected one for the 8 positions",
    "one batch": "attention has queries (2, 4, 4, 2), keys (1, 4, 4, 2) and values",
    "float64": "attention has float64 queries on cpu, and ring attention computes in float32",
}


def _refuse(kind: str) -> str:
    with provide({"dp_shard": 2, "cp": RING_2}, device="cpu", timeout_s=30) as parallelism:
        model = parallelism.lay_out(Model(kind))
        with pytest.raises(ModelError) as caught:
            model(torch.ones(2, 6 if kind == "length" else 8, 8))
    return str(caught.value)


def test_what_a_ring_does_not_compute_is_refused(four_ranks: StandingRanks) -> None:
    for kind, words in REFUSED.items():
        for message in four_ranks.run(_refuse, kind):
            assert words in message, kind


def _share_heads() -> str:
    with (
        provide({"dp_shard": 1, "cp": 4}, device="cpu", timeout_s=30) as parallelism,
        pytest.raises(ModelError) as caught,
    ):
        parallelism.lay_out(layouts.build("llama"))
    return str(caught.value)


def test_heads_that_ranks_cannot_share_are_refused_with_the_way_out(four_ranks: StandingRanks) -> None:
    for message in four_ranks.run(_share_heads):
        assert "has `num_key_value_heads` 2, which 4 ranks of `cp` cannot share evenly" in message
        assert "or set `method` to 'ring' in `parallelism_config['cp']`, which shares no heads" in message


def _keep_operators() -> str:
    fsdp = {"activation_checkpointing": True, "activation_checkpointing_save_ops": ["attention"]}
    with pytest.raises(ConfigError) as caught:
        provide({"dp_shard": 1, "cp": RING_4, "fsdp": fsdp}, device="cpu", timeout_s=30)
    return str(caught.value)


def test_operators_that_are_kept_in_checkpointed_blocks_are_refused(four_ranks: StandingRanks) -> None:
    for message in four_ranks.run(_keep_operators):
        assert (
            "`activation_checkpointing_save_ops` is ('attention',), and the method of `cp` is 'ring'"
            in message
        )
