"""A weight that is tied over the first and the last stage stays one weight, as on one process.

Tolerance: losses, gradients' norms and the clipped update in float32 within a relative 1e-5.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hocket.ckpt
from hocket.dist import OptimizerError
from hocket.trainer import Trainer
from hocket.trainer.optim import Muon
from support import layouts
from support.stage_checkpoints import Layout, Once, check_pair, joined, train_part
from support.stages import NEEDS_TORCH, check_equal, check_numbers, train_alone, train_layout
from support.standing_ranks import StandingRanks

pytestmark = NEEDS_TORCH

LAYOUTS: dict[str, Layout] = {
    "pp 4": ({"pp": 4}, 1),
    "pp 2 × dp_shard 2": ({"pp": 2, "dp_shard": 2}, 2),
    "pp 2 × dp_replicate 2": ({"pp": 2, "dp_replicate": 2}, 2),
    "pp 2 × tp 2": ({"pp": 2, "tp": 2}, 1),
    "pp 2 × tp 2, sequences": ({"pp": 2, "tp": {"degree": 2, "sequence_parallel": True}}, 1),
    "pp 2 × tp 2, loss": ({"pp": 2, "tp": {"degree": 2, "loss_parallel": True}}, 1),
    "pp 2 × cp 2": ({"pp": 2, "cp": 2}, 1),
    "interleaved": ({"pp": {"degree": 2, "schedule": "Interleaved1F1B"}, "dp_shard": 2}, 2),
    "interleaved, later weights": (
        {"pp": {"degree": 2, "schedule": "InterleavedZeroBubble"}, "dp_replicate": 2},
        2,
    ),
    "both on a rank": ({"pp": {"degree": 2, "schedule": "ZBVZeroBubble"}, "dp_replicate": 2}, 2),
}
"""Layouts of four ranks."""
CASES = [
    *(("tied llama", name) for name in LAYOUTS),
    *(("tied gpt", name) for name in ("pp 4", "pp 2 × tp 2, sequences", "interleaved, later weights")),
    *(("tied gpt with bias", name) for name in ("pp 2 × tp 2, loss", "both on a rank")),
    *(("gpt2", name) for name in ("pp 2 × tp 2", "pp 2 × cp 2", "interleaved")),
]
"""Every layout for one model. Others differ by the names of the weight, a bias beside it, and their plans."""


def _check(ranks: StandingRanks, kind: str, name: str, steps: int) -> None:
    config, num_ranks = LAYOUTS[name]
    size = 2 // num_ranks
    found = ranks.run(train_layout, kind, config, num_ranks, steps, size)
    assert max(found[0].norms) > 0.5, "clipping is active"
    copies = 1 if name == "pp 4" else 2
    num_tied = 0 if name == "both on a rank" else 1
    alone = train_alone(kind, steps, size)
    check_numbers(found, alone, f"{kind} | {name}", copies=copies, num_tied=num_tied)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gpt2", "pp 2 × dp_shard 2"),
        ("tied gpt with bias", "pp 2 × tp 2"),
    ],
)
def test_a_tied_weight_trains_as_on_one_process(four_ranks: StandingRanks, kind: str, name: str) -> None:
    _check(four_ranks, kind, name, 3)


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_tied_weight_trains_long_as_on_one_process(four_ranks: StandingRanks, kind: str, name: str) -> None:
    _check(four_ranks, kind, name, layouts.num_steps(kind))


def _resume(kind: str, name: str, folder: str) -> list[Any]:
    """Train four batches, and again from the checkpoint after two. Collective."""
    layout = LAYOUTS[name]
    whole = train_part(kind, layout, f"{folder}/whole", None, 4)
    return [whole, train_part(kind, layout, f"{folder}/again", f"{folder}/whole/ba2", 4)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("tied llama", "pp 4"),
        *(
            pytest.param(kind, name, marks=pytest.mark.slow(one_run_in=4))
            for kind, name in (
                ("tied llama", "pp 2 × dp_shard 2"),
                ("tied llama", "pp 2 × dp_replicate 2"),
                ("tied llama", "pp 2 × tp 2"),
                ("tied llama", "both on a rank"),
                ("tied gpt with bias", "pp 2 × tp 2"),
                ("gpt2", "pp 2 × dp_shard 2"),
            )
        ),
    ],
)
def test_a_tied_weight_resumes_and_is_saved_once(
    four_ranks: StandingRanks, tmp_path: Path, kind: str, name: str
) -> None:
    found = four_ranks.run(_resume, kind, name, str(tmp_path))
    check_equal(*(joined([one[part].end for one in found]) for part in (1, 0)))
    train_part(kind, None, f"{tmp_path}/alone", None, 2)
    saved, expected = (hocket.ckpt.open(f"{tmp_path}/{name}/ba2") for name in ("whole", "alone"))
    aliases, expected_aliases = (
        {key: record.same_as for key, record in one.contents.tensors.items()} for one in (saved, expected)
    )
    assert aliases == expected_aliases
    assert sum(one is not None for one in aliases.values()) == 1


PAIRS = [
    ("pp 4", "pp 2 × dp_shard 2"),
    ("pp 2 × dp_shard 2", "both on a rank"),
    ("pp 2 × dp_replicate 2", "pp 2 × tp 2"),
    ("pp 2 × tp 2", "pp 4"),
    ("both on a rank", "interleaved"),
    ("dp_shard 4", "pp 4"),
    ("pp 4", "dp_shard 4"),
]


@pytest.mark.parametrize(
    ("kind", "pair"),
    [
        ("gpt2", PAIRS[0]),
        *(pytest.param("tied llama", pair, marks=pytest.mark.slow(one_run_in=4)) for pair in PAIRS),
        pytest.param("tied gpt with bias", PAIRS[3], marks=pytest.mark.slow(one_run_in=4)),
        pytest.param("gpt2", PAIRS[2], marks=pytest.mark.slow(one_run_in=4)),
    ],
)
def test_a_checkpoint_of_tied_weights_resumes_under_another_layout(
    four_ranks: StandingRanks, once: Once, tmp_path: Path, kind: str, pair: tuple[str, str]
) -> None:
    layout_of = LAYOUTS | {"dp_shard 4": ({"dp_shard": 4}, 4)}
    check_pair(four_ranks, once, tmp_path, kind, *(layout_of[name] for name in pair))


def _trainer(kind: str, config: Any, optimizer: Any = None, **options: Any) -> Trainer:
    model = layouts.build(kind, 5)
    return Trainer(
        model=model,
        train_dataloader=DataLoader(layouts.samples(kind, 4), batch_size=layouts.GLOBAL_BATCH),
        optimizers=(optimizer or torch.optim.AdamW)(model.parameters()),
        max_duration="4ba",
        device_train_microbatch_size=2,
        parallelism_config=config,
        progress_bar=False,
        device="cpu",
        seed=7,
        **options,
    )


def _load(path: str) -> dict[str, Tensor]:
    """Return this rank's parameters after a load of weights. Collective."""
    with contextlib.closing(
        _trainer("tied llama", {"pp": 4}, load_path=path, load_weights_only=True)
    ) as trainer:
        return layouts.whole(trainer.state.model)


def test_a_file_without_the_head_fills_both_stages(four_ranks: StandingRanks, tmp_path: Path) -> None:
    model = layouts.build("tied llama", 5)
    with torch.no_grad():
        for one in model.parameters():
            one.add_(1)
    state = {name: one for name, one in model.state_dict().items() if not name.endswith("lm_head.weight")}
    assert len(state) == len(list(model.parameters()))
    torch.save(state, tmp_path / "saved.pt")
    found = four_ranks.run(_load, str(tmp_path / "saved.pt"))
    check_equal(joined(found), {name: one.detach() for name, one in model.named_parameters()})
    assert [any("embed_tokens" in name for name in one) for one in found] == [True, False, False, True]


class ByAll(torch.optim.SGD):
    """An optimizer whose steps depend on the gradients of all of its parameters together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found = [one for group in self.param_groups for one in group["params"]]
        norm = torch.stack([one.grad.norm() for one in found]).norm()
        for one in found:
            one.sub_(one.grad / norm, alpha=0.1)


def _train_by_all() -> str:
    with contextlib.closing(_trainer("tied gpt", {"pp": 4}, ByAll)) as trainer:
        with pytest.raises(OptimizerError) as caught:
            trainer.fit()
        return str(caught.value)


def test_an_optimizer_that_unties_is_refused_on_every_rank(four_ranks: StandingRanks) -> None:
    messages = set(four_ranks.run(_train_by_all))
    assert len(messages) == 1
    assert (
        "`byte_embedding.weight` and `head.weight` are one tied weight on two stages of `pp`, which `ByAll` "
        "updated in different ways in the 1 updates so far" in messages.pop()
    )


def _adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def _muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return optimizers of which one multiplies whole matrices, that of the tied weight, too."""
    matrices = [one for one in model.parameters() if one.ndim == 2]
    others = [one for one in model.parameters() if one.ndim != 2]
    return [Muon(matrices, lr=1e-2, ns_dtype="float32"), torch.optim.SGD(others, lr=0.1)]


def _train_by(make: Any, config: Any, num_ranks: int) -> layouts.Numbers:
    return layouts.train("tied gpt", config, num_ranks, steps=6, layers=5, callbacks=[], make_optimizers=make)


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize(
    ("axis", "make"),
    # Torch's Adafactor fails on the DTensors of `tp`: an operation in place that changes their placement.
    [("dp_replicate", _adafactor), ("dp_replicate", _sgd), ("tp", _sgd)],
)
def test_optimizers_keep_a_weight_tied(four_ranks: StandingRanks, axis: str, make: Any) -> None:
    num_ranks = 1 if axis == "tp" else 2
    found = four_ranks.run(_train_by, make, {"pp": 2, axis: 2}, num_ranks)
    check_numbers(found, _train_by(make, None, 1), f"{make.__name__} | {axis}", copies=2, num_tied=1)


@pytest.mark.parametrize("config", [{"pp": 2}, {"pp": 2, "fsdp": {}}])
def test_muon_keeps_a_weight_tied(two_ranks: StandingRanks, config: dict[str, Any]) -> None:
    found = two_ranks.run(_train_by, _muon, config, 1)
    check_numbers(found, _train_by(_muon, None, 1), f"_muon | {config}", num_tied=1)
