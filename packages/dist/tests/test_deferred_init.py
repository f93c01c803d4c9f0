"""Models built on the meta device have equal initial weights in every layout and on any number of ranks."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hocket.dist import ModelError, WeightsError, provide
from hocket.trainer import DataSpec, Trainer
from support.standing_ranks import StandingRanks

LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "one group": {"auto_wrap": False},
    "replicated": {"sharding_strategy": "NO_SHARD"},
    "host offload": {"cpu_offload": True},
    "checkpointed": {"activation_checkpointing": True},
    "ignored": {"ignored_modules": ["blocks.0"]},
}


class Block(nn.Module):
    """A block with a buffer that only its initialiser fills."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("scale", torch.empty(5))

    def reset_parameters(self) -> None:
        self.scale.fill_(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.linear(x) * self.scale)


class Tied(nn.Module):
    """A model whose embedding and head share a weight of 7 rows, which no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(_whole(model).items()):
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _digests(layouts: dict[str, dict[str, Any]]) -> dict[str, str]:
    found = {}
    for name, config in layouts.items():
        with provide(config, device="cpu", timeout_s=60) as parallelism:
            torch.manual_seed(5 + parallelism.data_parallel[0])  # rank 0's seed must be used
            with torch.device("meta"):
                model = Tied()
            optimizer = torch.optim.AdamW(model.parameters())
            parallelism.lay_out(model, [optimizer])
            assert model.head.weight is model.embed.weight
            assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
            found[name] = _digest(model)
            tokens = torch.arange(6) % 7
            nn.functional.cross_entropy(model(tokens), tokens).backward()
            optimizer.step()
            assert model.head.weight is model.embed.weight
    return found


def test_initial_weights_are_equal_in_every_layout_and_on_any_number_of_ranks(
    one_rank: None, two_ranks: StandingRanks, four_ranks: StandingRanks
) -> None:
    alone = _digests(LAYOUTS)
    assert len(set(alone.values())) == 1
    for ranks in (two_ranks, four_ranks):
        for found in ranks.run(_digests, LAYOUTS):
            assert found == alone
    with torch.device("meta"):
        model = Tied()
    torch.manual_seed(6)
    with provide({}, device="cpu") as parallelism:
        parallelism.lay_out(model)
        assert _digest(model) != alone["sharded"], "the seed has no effect"


def test_each_module_runs_its_own_initialiser(one_rank: None) -> None:
    with torch.device("meta"):
        model = Tied()
    with provide({}, device="cpu") as parallelism:
        parallelism.lay_out(model)
    values = _whole(model)
    assert torch.equal(values["blocks.1.scale"], torch.full((5,), 2.0))
    assert torch.equal(values["blocks.1.norm.running_var"], torch.ones(5))
    assert values["blocks.1.norm.num_batches_tracked"].item() == 0
    assert values["embed.weight"].std() > 0.5, "an embedding is drawn from N(0, 1)"
    assert values["head.bias"].abs().max() <= 5**-0.5
    assert not torch.equal(values["blocks.0.linear.weight"], values["blocks.1.linear.weight"])


@pytest.mark.parametrize("where", ["config", "model", "transformers"])
def test_an_init_function_gets_each_module_unsharded(one_rank: None, where: str) -> None:
    seen = []

    def init(module: nn.Module) -> None:
        for name, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            seen.append((type(module).__name__, name, tuple(value.shape), value.device.type))
            value.data.fill_(3)

    with torch.device("meta"):
        model = Tied()
    if where == "model":
        model.param_init_fn = init
    elif where == "transformers":
        model._init_weights = init
    config = {"param_init_fn": init} if where == "config" else {}
    with provide(config, device="cpu") as parallelism:
        parallelism.lay_out(model)
    assert ("Embedding", "weight", (7, 5), "cpu") in seen
    assert all((value == 3).all() for value in _whole(model).values())


class Silent(nn.Module):
    def __init__(self, *, has_reset: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("table", torch.arange(3))
        if has_reset:
            self.reset_parameters = lambda: None


@pytest.mark.parametrize(
    ("has_reset", "message"),
    [
        (True, "`weight` was built on the meta device and its initialiser left it"),
        (False, "has no initialiser"),
    ],
)
def test_a_tensor_left_uninitialised_raises_with_its_name(
    one_rank: None, has_reset: bool, message: str
) -> None:
    with torch.device("meta"):
        model = Silent(has_reset=has_reset)
    with provide({}, device="cpu") as parallelism, pytest.raises(ModelError, match=message):
        parallelism.lay_out(model)


def test_a_layer_with_two_parents_is_initialised_once(one_rank: None) -> None:
    with torch.device("meta"):
        layer = nn.Linear(5, 5)
        model = nn.Sequential(nn.Sequential(layer), nn.Sequential(layer))
    with provide({"auto_wrap": False}, device="cpu") as parallelism:
        parallelism.lay_out(model)
    assert model[0][0].weight is model[1][0].weight
    assert 0 < _whole(model)["0.0.weight"].abs().max() <= 5**-0.5


def test_a_replicated_model_on_the_meta_device_raises() -> None:
    with torch.device("meta"):
        model = Tied()
    with provide(None, device="cpu") as parallelism, pytest.raises(ModelError, match=r"`embed\.weight`"):
        parallelism.lay_out(model)


def _build_on_rank_0(is_everywhere_else_meta: bool) -> dict[str, torch.Tensor]:
    with provide({}, device="cpu", timeout_s=60) as parallelism:
        rank = parallelism.data_parallel[0]
        torch.manual_seed(1)
        with torch.device("cpu" if (rank == 0) == is_everywhere_else_meta else "meta"):
            model = Tied()
        parallelism.lay_out(model, [torch.optim.SGD(model.parameters())])
        assert model.head.weight is model.embed.weight
        return _whole(model)


def test_weights_of_rank_0_fill_shards_of_models_on_the_meta_device(two_ranks: StandingRanks) -> None:
    torch.manual_seed(1)
    expected = _whole(Tied())
    for found in two_ranks.run(_build_on_rank_0, True):
        for name, value in expected.items():
            if not name.endswith("scale"):  # `scale` is uninitialised memory
                assert torch.equal(found[name], value), name


class Sharing(nn.Module):
    """Modules that share a parameter, a buffer and a module; the model itself names the parameter first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.register_buffer("table", torch.arange(3.0))
        for block in self.blocks:
            block.norm = self.norm
            block.register_buffer("table", self.table)
        self.weight = self.blocks[1].weight


def _share() -> tuple[bool, list[torch.Tensor]]:
    with torch.device("cpu" if os.environ["RANK"] == "0" else "meta"):
        torch.manual_seed(3)
        model = Sharing()
    with provide({"auto_wrap": False}, device="cpu", timeout_s=60) as parallelism:
        parallelism.lay_out(model)
        first, second = model.blocks
        is_shared = (
            model.weight is second.weight
            and first.norm is model.norm is second.norm
            and first.table is model.table is second.table
        )
        return is_shared, [*_whole(model).values()]


def test_shared_tensors_are_sent_once_and_stay_shared(two_ranks: StandingRanks) -> None:
    torch.manual_seed(3)
    expected = [*_whole(Sharing()).values()]
    for is_shared, found in two_ranks.run(_share):
        assert is_shared
        assert all(map(torch.equal, found, expected))


def _try_to_build_elsewhere() -> str:
    with pytest.raises(ModelError) as caught:
        _build_on_rank_0(False)
    return str(caught.value)


def test_weights_on_other_ranks_than_rank_0_only_raise(two_ranks: StandingRanks) -> None:
    for message in two_ranks.run(_try_to_build_elsewhere):
        assert "parameters on the meta device, by rank" in message


def _save(folder: Path, model: nn.Module, *, files: int) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}
    folder.mkdir(exist_ok=True)
    if files == 1:
        safetensors.save_file(state, folder / "model.safetensors")
        return
    weight_map = {}
    for index in range(files):
        part = dict(list(state.items())[index::files])
        name = f"model-{index}.safetensors"
        safetensors.save_file(part, folder / name)
        weight_map.update(dict.fromkeys(part, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _load(folder: str, layouts: dict[str, dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    found = []
    for config in layouts.values():
        with provide({**config, "initial_weights": folder}, device="cpu", timeout_s=60) as parallelism:
            with torch.device("meta"):
                model = Tied()
            parallelism.lay_out(model)
            found.append(_whole(model))
    return found


@pytest.mark.parametrize("files", [1, 3])
def test_a_folder_of_safetensors_is_read_into_shards(
    two_ranks: StandingRanks, tmp_path: Path, files: int
) -> None:
    torch.manual_seed(4)
    model = Tied()
    for block in model.blocks:
        block.reset_parameters()
    _save(tmp_path, model, files=files)
    expected = _whole(model)
    for results in two_ranks.run(_load, str(tmp_path), LAYOUTS):
        for found in results:
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), name


def test_a_folder_of_another_model_raises(one_rank: None, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    with pytest.raises(WeightsError, match="has no safetensors files"):
        _load(str(tmp_path), {"": {}})
    safetensors.save_file({"embed.weight": torch.ones(3, 5)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"has shape \(3, 5\), expected \(7, 5\)"):
        _load(str(tmp_path), {"": {}})
    safetensors.save_file({"embed.weight": torch.ones(7, 5)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"has no values for .* the first `blocks\.0"):
        _load(str(tmp_path), {"": {}})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "absent"}}))
    with pytest.raises(WeightsError, match="names 1 files that are absent"):
        _load(str(tmp_path), {"": {}})


def _load_a_checkpoint(folder: str) -> list[bool]:
    """Save a trained model, and load it into one that was built on the meta device."""
    common: dict[str, Any] = {
        "fsdp_config": {},
        "max_duration": "2ba",
        "progress_bar": False,
        "device": "cpu",
    }
    data = [[torch.ones(2, 5), torch.zeros(2, dtype=torch.int64)] for _ in range(2)]
    found = []
    for options in ({"save_folder": folder}, {"load_path": f"{folder}/ep0-ba2", "load_weights_only": True}):
        with torch.device("meta" if "load_path" in options else "cpu"):
            model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
        with Trainer(
            model=model,
            loss_fn=nn.functional.cross_entropy,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            train_dataloader=DataSpec(data, is_replicated=True),
            loop={"auto_shard": False},
            **common,
            **options,
        ) as trainer:
            if "save_folder" in options:
                trainer.fit()
            found.append(_whole(trainer.state.model))
    saved, loaded = found
    return [torch.equal(saved[name], value) for name, value in loaded.items()]


def test_a_checkpoint_is_loaded_into_a_model_on_the_meta_device(
    two_ranks: StandingRanks, tmp_path: Path
) -> None:
    for same in two_ranks.run(_load_a_checkpoint, str(tmp_path / "checkpoints")):
        assert same == [True] * 6
