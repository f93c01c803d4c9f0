"""Every method on two ranks, replicated (DDP) and sharded (FSDP2), with save and resume."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hocket.algos import GradientClipping, LayerFreezing
from support.methods import CASES, common_kind, make_model, train
from support.ranks import run_ranks

pytest.importorskip("torchvision", reason="needs torchvision")
pytest.importorskip("schedulefree", reason="needs schedulefree")
pytest.importorskip("peft", reason="needs peft")
pytest.importorskip("torchao", reason="needs torchao")
pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
LAYOUTS: dict[str, Any] = {"ddp": None, "fsdp2": {}}
NAMES = sorted(CASES)
# Methods without batch norm's per-rank statistics and without per-rank random draws.
SAME_AS_ONE_RANK = {"EMA", "GradientClipping", "SAM", "SWA", "ScheduleFree", "SeqLengthWarmup"}


def _train(name: str, layout: str, **options: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    kind = "text" if name in SAME_AS_ONE_RANK else common_kind([name])
    arguments = {} if ranks[1] == 1 else {"fsdp_config": LAYOUTS[layout]}
    if (name, layout) == ("LowPrecisionGroupNorm", "fsdp2"):
        # On a CPU the model's batch norm does not support bf16 weights with fp32 statistics.
        arguments["precision"] = "fp32"
    return train([name], kind=kind, ranks=ranks, shuffle=False, **arguments, **options)


def _on_ranks(names: list[str], folder: str) -> dict[tuple[str, str], Any]:
    results: dict[tuple[str, str], Any] = {}
    for name in names:
        for layout in LAYOUTS:
            place = Path(folder, name, layout)
            whole = _train(name, layout, save_folder=place, save_interval="2ba")
            resumed = _train(name, layout, save_folder=place / "again", load_path=place / "ep0-ba2")
            results[name, layout] = (whole, resumed)
    return results


def _mean_losses(ranks: list[Any], key: tuple[str, str]) -> list[float]:
    """Return the mean of the ranks' losses; all ranks have the same weight."""
    (_, first), _ = ranks[0][key]
    (_, second), _ = ranks[1][key]
    return [(one + other) / 2 for one, other in zip(first, second, strict=True)]


def _check(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(_on_ranks, 2, names, folder, init="gloo", timeout_s=280)
    for key, ((trained, losses), (resumed, rest)) in ranks[0].items():
        assert rest == losses[2:], key
        (others, _), _ = ranks[1][key]
        for name, value in trained.items():
            assert torch.equal(resumed[name], value), (key, name)
            if "running" not in name:  # batch norm's statistics differ between ranks
                assert torch.equal(others[name], value), (key, name)
        if key[0] in SAME_AS_ONE_RANK:
            alone, alone_losses = _train(*key)
            if key[0] == "ScheduleFree":
                # Adam normalizes the gradient of the keys' bias, which is zero except for rounding.
                assert _mean_losses(ranks, key) == pytest.approx(alone_losses, rel=2e-2)
                continue
            for name, value in alone.items():
                torch.testing.assert_close(trained[name], value, atol=2e-5, rtol=1e-3, msg=f"{key} {name}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [NAMES[start : start + 3] for start in range(0, len(NAMES), 3)], ids="-".join
)
def test_every_method_runs_on_two_ranks_and_resumes_there(names: list[str]) -> None:
    _check(names)


def test_methods_that_hold_weights_or_change_the_step_run_on_two_ranks() -> None:
    _check(["EMA", "SAM"])


def _frozen_and_clipped(**layout: Any) -> dict[str, torch.Tensor]:
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    methods = [LayerFreezing(0.0, 0.9), GradientClipping("norm", 0.05)]
    trained, _ = train(
        ["LayerFreezing"], kind="text", ranks=ranks, shuffle=False, algorithms=methods, **layout
    )  # fmt: skip
    return trained


def _frozen_and_clipped_shards() -> dict[str, torch.Tensor]:
    return _frozen_and_clipped(fsdp_config={})


def test_gradients_of_frozen_shards_take_no_part_in_clipping() -> None:
    alone = _frozen_and_clipped()
    sharded, _ = run_ranks(_frozen_and_clipped_shards, 2, init="gloo", timeout_s=120)
    for name, value in alone.items():
        torch.testing.assert_close(sharded[name], value, atol=2e-5, rtol=1e-3, msg=name)


def _draws(name: str) -> list[Any]:
    seen: list[Any] = []
    model = make_model("images")
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0][0].sum().item()))
    ranks = (dist.get_rank(), dist.get_world_size())
    loader = [(torch.linspace(0, 1, 8 * 768).view(8, 3, 16, 16), torch.zeros(8, dtype=torch.long))]
    train([name], kind="images", steps=1, ranks=ranks, model=model, train_dataloader=Share(loader, ranks))
    return seen


class Share:
    """The same batches on every rank."""

    def __init__(self, batches: list[Any], data_parallel: tuple[int, int]) -> None:
        self.batches, self.data_parallel = batches, data_parallel

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def test_each_rank_makes_its_own_random_draws() -> None:
    first, second = run_ranks(_draws, 2, "CutOut", init="gloo", timeout_s=60)
    assert first != second
