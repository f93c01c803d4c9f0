"""The memory estimate is close to the memory that ranks use, and `hocket-launch plan` prints it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hocket.dist import FSDPConfig, provide
from hocket.dist.launch import command as launch
from hocket.dist.memory.activations import measure_activations
from hocket.dist.memory.estimate import estimate_memory, ladder
from hocket.dist.ranks.mesh import MeshShape, mesh_shape
from hocket.dist.ranks.world import World
from support.live_bytes import LiveBytes
from support.ranks import run_ranks
from support.standing_ranks import StandingRanks

WIDTH, LAYERS, ROWS = 768, 6, 512
MIB = 2**20
LAYOUTS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "checkpointing": {"activation_checkpointing": True},
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def _model(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(*(Block(width) for _ in range(LAYERS)))


def _peak(config: dict[str, Any]) -> int:
    """Return the growth of resident memory from before the model was made to the peak of training."""
    with provide(config, device="cpu", timeout_s=120) as parallelism:
        _train(parallelism, _model(8), torch.ones(4, 8))  # makes torch load and cache what it needs
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
    with provide(config, device="cpu", timeout_s=120) as parallelism:
        with torch.device("meta"):
            model = _model()
        _train(parallelism, model, torch.ones(ROWS, WIDTH))
        return _status("VmHWM") - before


def _train(parallelism: Any, model: nn.Module, batch: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    module = parallelism.lay_out(model, [optimizer])
    for _ in range(2):
        module(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _estimate(config: dict[str, Any], shape: MeshShape) -> int:
    made = FSDPConfig(**config)
    activations = measure_activations(
        _model(), torch.ones(ROWS, WIDTH), made, loss=lambda outputs, _: outputs.sum()
    )
    return estimate_memory(_model(), made, shape, activations=activations).total


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc/self/clear_refs")
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_estimate_is_near_what_two_ranks_use(name: str) -> None:
    """Allow 30%, because the resident set includes gloo's buffers and memory that the allocator keeps."""
    # Return large freed blocks to the system at once, so that the resident set has used memory only.
    env = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    estimated = _estimate(LAYOUTS[name], MeshShape(replicate=1, shard=2))
    for measured in run_ranks(_peak, 2, LAYOUTS[name], init="gloo", timeout_s=120, env=env):
        print(f"{name}: {measured / MIB:.0f} MiB resident, {measured / estimated:.2f} of the estimate")
        assert 0.7 < measured / estimated < 1.3, (
            f"{measured / MIB:.0f} MiB used, {estimated / MIB:.0f} estimated"
        )


NARROW = 128
LIVE: dict[str, tuple[dict[str, Any], int]] = {
    "FULL_SHARD": ({}, 64),
    "FULL_SHARD, many rows": ({}, 512),
    "FULL_SHARD, half as many": ({}, 256),
    "SHARD_GRAD_OP": ({"sharding_strategy": "SHARD_GRAD_OP"}, 64),
    "NO_SHARD": ({"sharding_strategy": "NO_SHARD"}, 64),
    "one group": ({"auto_wrap": False}, 64),
    "bf16": ({"amp_dtype": "bf16"}, 64),
    "bf16, PURE": ({"amp_dtype": "bf16", "mixed_precision": "PURE"}, 64),
    "host offload": ({"cpu_offload": True}, 64),
    "checkpointing, many rows": ({"activation_checkpointing": True}, 512),
    "checkpointing every second": (
        {"activation_checkpointing": True, "activation_checkpointing_every": 2},
        64,
    ),
    "two copies": ({"data_parallel_replicate_degree": 2}, 64),
}
"""Configurations, each with the number of rows of a batch."""
LEVERS = {
    # For each lever of `ladder`: the layout without it, the layout with it, and the ladder's name for it.
    "half the microbatch": ("FULL_SHARD, many rows", "FULL_SHARD, half as many", "microbatch_size"),
    "FULL_SHARD": ("SHARD_GRAD_OP", "FULL_SHARD", "'FULL_SHARD'"),
    "one copy": ("two copies", "FULL_SHARD", "one copy over all 4 ranks"),
    "checkpointing": ("FULL_SHARD, many rows", "checkpointing, many rows", "activation_checkpointing"),
}


def _square_mean(outputs: torch.Tensor, _batch: Any = None) -> torch.Tensor:
    return outputs.square().mean()


def _live_peaks() -> dict[str, int]:
    """Return the peak bytes of live tensors in two training steps, for each layout."""
    peaks = {}
    for name, (config, rows) in LIVE.items():
        with LiveBytes() as meter, provide(config, device="cpu", timeout_s=60) as parallelism:
            with torch.device("meta"):
                model = _model(NARROW)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            module = parallelism.lay_out(model, [optimizer])
            for _ in range(2):
                _square_mean(module(torch.ones(rows, NARROW))).backward()
                optimizer.step()
                optimizer.zero_grad()
        peaks[name] = meter.peak
    return peaks


def test_estimates_and_savings_are_close_to_the_peak_of_live_tensors(four_ranks: StandingRanks) -> None:
    """On a CPU, host offload saves nothing, because host and device memory are the same."""
    measured = four_ranks.run(_live_peaks, timeout_s=120)[0]
    world = World(world_size=4, local_world_size=4)
    ladders = {}
    for name, (values, rows) in LIVE.items():
        config = FSDPConfig(**values)
        shape = mesh_shape(config, world)
        activations = measure_activations(_model(NARROW), torch.ones(rows, NARROW), config, loss=_square_mean)
        found = estimate_memory(_model(NARROW), config, shape, activations=activations)
        ratio = measured[name] / (found.total + found.host)
        print(f"{name}: {measured[name] / 1024:.0f} KiB alive, {ratio:.2f} of the estimate")
        assert 0.7 < ratio < 1.05, name
        ladders[name] = dict(ladder(_model(NARROW), config, shape, activations=activations))
    for name, (without, with_it, words) in LEVERS.items():
        (estimated,) = (saved for lever, saved in ladders[without].items() if words in lever)
        saved = measured[without] - measured[with_it]
        print(f"{name}: saves {saved / 1024:.0f} KiB, {saved / estimated:.2f} of the estimate")
        assert 0.7 < saved / estimated < 1.3, name


def test_the_parts_of_an_estimate_are_exact() -> None:
    block = 2 * 4 * WIDTH * WIDTH
    found = estimate_memory(_model(), FSDPConfig(amp_dtype="bf16"), MeshShape(replicate=2, shard=4))
    assert found.parameters == found.gradients == LAYERS * block * 4 // 4
    assert found.optimizer == 2 * found.parameters
    assert found.gathered == 2 * block * 2 + block * (2 + 4)
    offloaded = estimate_memory(_model(), FSDPConfig(cpu_offload=True), MeshShape(replicate=1, shard=8))
    assert offloaded.total == offloaded.gathered


def test_activation_estimates_follow_the_checkpointing_and_offload_options() -> None:
    batch = torch.ones(ROWS, WIDTH)

    def count(**config: Any) -> int:
        return measure_activations(
            _model(), batch, FSDPConfig(**config), loss=lambda outputs, _: outputs.sum()
        )

    row = ROWS * WIDTH * 4
    # Each block saves its input, and the inner layer before and after gelu, both four times as wide.
    assert count() == LAYERS * 9 * row
    assert count(activation_checkpointing=True) == LAYERS * row + 9 * row
    assert count(activation_checkpointing=True, activation_checkpointing_every=2) < count()
    assert count(activation_cpu_offload=True) == 9 * row


def test_the_ladder_lists_the_cheapest_lever_first_and_skips_active_ones() -> None:
    config = FSDPConfig(sharding_strategy="HYBRID_SHARD", activation_checkpointing=True)
    shape = MeshShape(replicate=2, shard=2)
    names = [name for name, _ in ladder(_model(8), config, shape, activations=1000, microbatch_size=4)]
    assert names == [
        "`device_train_microbatch_size`=2",
        "one copy over all 4 ranks instead of 2",
        "`cpu_offload=True`",
        "`activation_cpu_offload=True`",
    ]
    saved = dict(ladder(_model(8), config, shape, activations=1000, microbatch_size=4))
    assert saved["one copy over all 4 ranks instead of 2"] > 0


BUILD = """
import torch
from torch import nn
def build():
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))), torch.ones(8, 1024)
def narrow():
    return build()[0], torch.ones(8, 512)
def three():
    return (*build(), 3)
def asks(width):
    return build()
def breaks():
    raise KeyError("width")
number = 3
"""


def test_plan_prints_the_memory_of_a_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.py"
    path.write_text(BUILD)
    arguments = ["plan", f"{path}:build", "--world_size", "8", "--precision", "amp_bf16"]
    json = '{"cpu_offload": true, "process_group": null}'
    assert launch.main([*arguments, "--fsdp-config", json]) == 0
    assert "of these in host memory" in capsys.readouterr().out
    assert launch.main([*arguments, "--memory", "1"]) == 0
    out = capsys.readouterr().out
    assert "4,198,400 parameters, 1 × 8 ranks" in out
    assert "fits in 1 GiB" in out
    total = float(out.split("total on the device")[1].split()[0])
    assert math.isclose(total, (4_198_400 * 4 * 4 / 8 + 1_049_600 * 10) / 2**30, rel_tol=0.1)
    for amount, shown in (("8GB", "7.45058"), ("8 GiB", "8"), ("8192mib", "8"), ("1e1", "10")):
        assert launch.main([*arguments, "--memory", amount]) == 0
        assert f"fits in {shown} GiB" in capsys.readouterr().out
    for amount in ("8G", "GB", "many"):
        with pytest.raises(SystemExit):
            launch.main([*arguments, "--memory", amount])
        assert "give a number of GiB, or one with MB, GB" in capsys.readouterr().err
    assert launch.main([*arguments, "--memory", "0.001"]) == 3
    assert "`activation_checkpointing=True`: saves about" in capsys.readouterr().out
    for wrong, message in (
        (["plan", "absent.py:build"], "cannot be imported"),
        (["plan", f"{path}:narrow"], "the forward pass failed on the meta device"),
        (["plan", f"{path}:three"], "returned 3 values, expected a model"),
        (["plan", f"{path}:asks"], "missing 1 required positional argument: 'width'"),
        (["plan", f"{path}:breaks"], "KeyError: 'width'"),
        (["plan", f"{path}:number"], "'int' object is not callable"),
        (["plan", f"{path}:build", "--fsdp-config", "{'shard': 1}"], "no key `shard`"),
        (
            [
                "plan",
                f"{path}:build",
                "--world_size",
                "8",
                "-n",
                "3",
                "--fsdp-config",
                "{'process_group': 'set3'}",
            ],
            "set3",
        ),
    ):
        assert launch.main(wrong) == 1
        assert message in capsys.readouterr().err
