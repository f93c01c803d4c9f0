"""One script under programs that start a process for each rank: the trainer, layouts and streaming agree."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from hocket.dist import provide
from hocket.stream import MDSWriter, StreamingDataset
from hocket.stream.torch import StreamingDataLoader
from hocket.trainer import ComposerModel, Trainer
from support.ranks import run_ranks

SOURCES = (
    "packages/dist/src/hocket/dist/ranks/job_place.py",
    "packages/trainer-core/src/hocket/trainer/process/job_place.py",
    "packages/stream/src/hocket/stream/settings/job_place.py",
)
TORCHS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STARTERS = {
    "Open MPI": {
        "OMPI_COMM_WORLD_RANK": "{rank}",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_RANK": "{rank}",
        "PMIX_NAMESPACE": "prterun-{job}@1",
        # `mpirun` has started a daemon by `srun`.
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
    },
    "MPICH": {"PMI_RANK": "{rank}", "PMI_SIZE": "2", "MPI_LOCALRANKID": "{rank}", "MPI_LOCALNRANKS": "2"},
    "Slurm": {
        "SLURM_JOB_ID": "{job}",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_PROCID": "{rank}",
        "SLURM_LOCALID": "{rank}",
        "SLURM_NODEID": "0",
    },
    "Flux": {
        "FLUX_JOB_ID": "{job}",
        "FLUX_TASK_RANK": "{rank}",
        "FLUX_JOB_SIZE": "2",
        "FLUX_JOB_NNODES": "1",
        "FLUX_TASK_LOCAL_ID": "{rank}",
    },
}


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, batch):
        return self.layer(batch["x"])

    def loss(self, outputs, batch):
        return outputs.square().mean()


def start_as(variables: dict[str, str]) -> None:
    """Replace torch's variables by those of another starter."""
    rank, job = os.environ["RANK"], os.environ["MASTER_PORT"]
    kept = 4 if "PMI_RANK" in variables else 6  # MPICH names no job, and its ranks have one parent
    for name in TORCHS[:kept]:
        del os.environ[name]
    os.environ.update({name: value.format(rank=rank, job=job) for name, value in variables.items()})


def train(folder: Path, fsdp_config: dict | None):
    dataset = StreamingDataset(local=str(folder / "data"), global_batch_size=4)
    with Trainer(
        model=Model(),
        train_dataloader=StreamingDataLoader(dataset),
        max_duration="2ba",
        save_folder=str(folder / "checkpoints"),
        fsdp_config=fsdp_config,
        device="cpu",
        progress_bar=False,
        dist_timeout=30,
    ) as trainer:
        trainer.fit()
        places = trainer.state.parallelism.data_parallel, dataset.data_parallel
    return places, [os.environ.get(name) for name in TORCHS[:4]]


def train_as(variables: dict[str, str], folder: Path):
    start_as(variables)
    return train(folder, None), train(folder / "sharded", {})


def write_data(folder: Path) -> None:
    with MDSWriter(columns={"x": "ndarray:float32:4"}, out=str(folder / "data")) as writer:
        for number in range(16):
            writer.write({"x": np.full(4, number, np.float32)})


@pytest.mark.parametrize(
    "starter", [pytest.param(name, marks=[] if name == "MPICH" else pytest.mark.slow) for name in STARTERS]
)
def test_ranks_of_another_starter_train_together(starter: str, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "sharded"):
        write_data(folder)
    results = run_ranks(train_as, 2, STARTERS[starter], tmp_path, timeout_s=100)
    for rank, (replicated, sharded) in enumerate(results):
        assert replicated == sharded == (((rank, 2), (rank, 2)), [str(rank), "2", str(rank), "2"])


def train_in_group(folder: Path):
    rank = int(os.environ["RANK"])
    for name in TORCHS:
        del os.environ[name]
    os.environ["LOCAL_WORLD_SIZE"] = "words of another program"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meet'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=90),
    )
    timeouts = [timeout_of_group()]
    with provide({"sharding_strategy": "FULL_SHARD"}, device="cpu", timeout_s=40) as parallelism:
        sharded = parallelism.data_parallel
        timeouts.append(timeout_of_group())
    timeouts.append(timeout_of_group())
    return sharded, StreamingDataset(local=str(folder / "data"), global_batch_size=4).data_parallel, timeouts


def timeout_of_group() -> float:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return float(backend.options._timeout.total_seconds())


def test_a_group_without_variables_is_the_truth_for_layouts_and_streaming(tmp_path: Path) -> None:
    write_data(tmp_path)
    for rank, found in enumerate(run_ranks(train_in_group, 2, tmp_path, timeout_s=100)):
        assert found == ((rank, 2), (rank, 2), [90, 40, 90])


def test_all_packages_read_the_environment_by_the_same_code() -> None:
    root = Path(__file__).parents[2]
    assert len({(root / source).read_bytes() for source in SOURCES}) == 1
