"""A model that arrives laid out is taken as it is, and trains, clips and resumes as one process does."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from hocket.dist import ModelError, provide
from hocket.trainer import Trainer
from hocket.trainer.callbacks import GradNormMonitor, ReplicaCheck
from hocket.trainer.loggers import InMemoryLogger
from support import layouts
from support.standing_ranks import StandingRanks

KINDS = {"fully_shard": 4, "HSDP": 4, "tensor parallel and fully_shard": 2, "tensor parallel": 1}
"""How a user lays the model out, and the number of ranks that have data of their own."""
PLAN = {"blocks.*.mlp_in": ColwiseParallel(), "blocks.*.mlp_out": RowwiseParallel()}


def _lay_out(model: nn.Module, kind: str) -> None:
    if kind == "fully_shard":
        mesh = init_device_mesh("cpu", (4,))
    elif kind == "HSDP":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    elif kind == "tensor parallel":
        parallelize_module(model, init_device_mesh("cpu", (4,)), PLAN)
        return
    else:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        parallelize_module(model, both["model"], PLAN)
        mesh = both["data"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _train(kind: str | None, num_ranks: int, folder: str) -> tuple[layouts.Numbers, bool]:
    """Train three batches, resume after the second; return the numbers, and whether the end is the same."""
    runs = []
    for load_path in (None, f"{folder}/ep0-ba2"):
        model, memory = layouts.build("gpt"), InMemoryLogger()
        initial = layouts.whole(model)
        if kind is not None:
            _lay_out(model, kind)
        trainer = Trainer(
            model=model,
            train_dataloader=DataLoader(
                layouts.samples("gpt", 3), batch_size=layouts.GLOBAL_BATCH // num_ranks
            ),
            optimizers=torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4),
            max_duration="3ba",
            loggers=[memory],
            callbacks=[GradNormMonitor(), ReplicaCheck("1ba")],
            gradient_clipping=0.5,
            device_train_microbatch_size=2,
            save_folder=folder if load_path is None else None,
            save_interval="2ba",
            load_path=load_path,
            progress_bar=False,
            device="cpu",
            seed=7,
        )
        with contextlib.closing(trainer):
            assert trainer.state.parallelism.data_parallel[1] == num_ranks
            trainer.fit()
            runs.append(layouts.numbers(trainer, memory, initial))
    first, resumed = runs
    return first, all(torch.equal(first.trained[name], resumed.trained[name]) for name in first.trained)


@pytest.mark.slow(one_run_in=4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_laid_out_model_trains_as_one_process(four_ranks: StandingRanks, tmp_path: Path, kind: str) -> None:
    _check(four_ranks, tmp_path, kind)


def _check(ranks: StandingRanks, folder: Path, kind: str) -> None:
    alone, _ = _train(None, 1, str(folder / "alone"))
    for found, is_resumed_exactly in ranks.run(_train, kind, KINDS[kind], str(folder / "saved")):
        assert max(found.largest_differences(alone).values()) <= 1e-5, found.description
        assert is_resumed_exactly


def _refused() -> list[str]:
    messages = []
    for build in (_cut_over_half, _whole_beside_shards):
        model = build()
        with pytest.raises(ModelError) as caught, provide(None, device="cpu", timeout_s=30, model=model):
            pass
        messages.append(str(caught.value))
    return messages


def _cut_over_half() -> nn.Module:
    mesh: Any = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    return parallelize_module(layouts.build("gpt"), mesh["model"], PLAN)


def _whole_beside_shards() -> nn.Module:
    model = layouts.build("gpt")
    return fully_shard(model, mesh=init_device_mesh("cpu", (4,)), ignored_params={model.head.weight})


def test_a_layout_whose_data_ranks_cannot_be_found_is_refused(four_ranks: StandingRanks) -> None:
    for cut, whole in four_ranks.run(_refused):
        assert "`blocks.0.mlp_in.weight` is cut over 2 of 4 ranks, and nothing reduces gradients" in cut
        assert "`head.weight` is whole, unlike other parameters of FSDPGPT" in whole
