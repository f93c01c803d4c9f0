"""A job on Slurm's real controller and nodes, and one script under the real programs that start ranks."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hocket.stream import MDSWriter
from support import launches
from support.ranks import run_ranks
from support.slurm import KILL_WAIT_S, Slurm, slurm_cluster

JOB = """
import json, os, sys, time
from pathlib import Path

import torch
from hocket.trainer import Callback, ComposerModel, Trainer

out, pause_s = Path(sys.argv[1]), float(sys.argv[2])
saves = {} if sys.argv[3] == "none" else {"save_folder": str(out / "checkpoints"), "autoresume": True}
start = os.environ.get("SLURM_RESTART_COUNT", "0")


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, batch):
        return self.layer(batch)

    def loss(self, outputs, batch):
        return outputs.square().mean()


class Record(Callback):
    def batch_end(self, state, logger):
        with open(out / f"batches-{os.environ['RANK']}", "a") as file:
            told = [os.environ.get(name) for name in ("SLURM_JOB_END_TIME", "HOCKET_GRACE_S")]
            print(json.dumps([start, state.timestamp.batch.value, *told]), file=file)
        if start == "0":
            time.sleep(pause_s)


torch.manual_seed(0)
data = torch.utils.data.DataLoader(torch.arange(64.0).reshape(16, 4) / 64, batch_size=2)
with Trainer(
    model=Model(),
    train_dataloader=data,
    max_duration="30ba",
    save_interval="1000ba",
    run_name="job",
    **saves,
    seed=1,
    device="cpu",
    progress_bar=False,
    callbacks=[Record()],
    dist_timeout=60,
) as trainer:
    trainer.fit()
    (out / f"weights-{os.environ['RANK']}").write_text(json.dumps(trainer.state.model.layer.weight.tolist()))
"""


TORCHS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RANKS = """
import json, os
from pathlib import Path

import numpy as np
import torch
from hocket.stream import StreamingDataset
from hocket.stream.torch import StreamingDataLoader
from hocket.trainer import ComposerModel, Trainer


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, batch):
        return self.layer(batch["x"])

    def loss(self, outputs, batch):
        return outputs.square().mean()


def train(folder, fsdp_config):
    dataset = StreamingDataset(local=str(folder / "data"), global_batch_size=4)
    with Trainer(
        model=Model(),
        train_dataloader=StreamingDataLoader(dataset),
        max_duration="2ba",
        save_folder=str(folder / "checkpoints"),
        fsdp_config=fsdp_config,
        device="cpu",
        progress_bar=False,
        dist_timeout=60,
    ) as trainer:
        trainer.fit()
        places = trainer.state.parallelism.data_parallel, dataset.data_parallel
    return places, [os.environ.get(name) for name in ("RANK", "WORLD_SIZE")]


out = Path(sys.argv[1])
found = train(out, None), train(out / "sharded", {})
Path(out, f"found-{os.environ['RANK']}").write_text(json.dumps(found))
"""
"""A script that trains with replicas and with shards on a stream, and writes the places that it found."""


def write_data(folder: Path) -> None:
    with MDSWriter(columns={"x": "ndarray:float32:4"}, out=str(folder / "data")) as writer:
        for number in range(16):
            writer.write({"x": np.full(4, number, np.float32)})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def run_script(path: str, out: str) -> list[list[float]]:
    sys.argv = [path, out, "0", "saves"]
    runpy.run_path(path, run_name="__main__")
    return json.loads(next(Path(out).glob("weights-*")).read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "saves", "state"),
    [
        (["--signal=USR1"], "saves", "COMPLETED"),
        (["--signal=USR1"], "none", "FAILED"),
        ([], "saves", "CANCELLED"),
    ],
)
def test_slurm_queues_a_job_again_after_a_notice_on_which_it_saved(
    cluster: Slurm, tmp_path: Path, command: list[str], saves: str, state: str
) -> None:
    path, undisturbed, out = tmp_path / "job.py", tmp_path / "undisturbed", tmp_path / "out"
    path.write_text(JOB)
    for folder in (undisturbed, out):
        folder.mkdir()
    submission = ["--on", "slurm", "-n", "1", "--nnodes", "2", "--gpus", "0", "--cpus", "1"]
    options = f"--engine-options=--time=5 --output={tmp_path}/log --chdir={tmp_path}"
    submitted = cluster.run(*launches.command(*submission, options, path, out, "0.2", saves))
    number = submitted.split()[-1]
    deadline = time.monotonic() + 90
    while not (out / "batches-1").exists():
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.05)
    limit = time.mktime(time.strptime(cluster.job(number)["EndTime"], "%Y-%m-%dT%H:%M:%S"))
    cluster.run("scancel", *command, number)

    job = cluster.wait_for_end(number, timeout_s=120)
    log = (tmp_path / "log").read_text()
    assert job["JobState"] == state, log
    for rank in range(2):
        lines = [json.loads(line) for line in (out / f"batches-{rank}").read_text().splitlines()]
        assert {tuple(line[2:]) for line in lines if line[0] == "0"} == {(str(int(limit)), str(KILL_WAIT_S))}
        first = [line[1] for line in lines if line[0] == "0"]
        assert 0 < len(first) < 30
        second = range(len(first) + 1, 31) if state == "COMPLETED" else []
        assert [(line[0], line[1]) for line in lines] == [
            *(("0", batch) for batch in first),
            *(("1", batch) for batch in second),
        ]
    last = {"COMPLETED": {len(first), 30}, "CANCELLED": {len(first)}, "FAILED": set()}[state]
    assert {int(path.name.rpartition("-ba")[2]) for path in (out / "checkpoints").glob("ep*")} == last
    assert ("is not queued again" in log) == (state == "FAILED")
    if state == "COMPLETED":
        expected = run_ranks(run_script, 2, str(path), str(undisturbed), timeout_s=100)
        assert json.loads((out / "weights-0").read_text()) == expected[0]


def check_script_on_ranks(command: list[str], tmp_path: Path, env: dict[str, str]) -> None:
    for folder in (tmp_path, tmp_path / "sharded"):
        write_data(folder)
    path = tmp_path / "job.py"
    path.write_text(f"import sys\nsys.path[:0] = {sys.path!r}\n{RANKS}")
    program = shutil.which(command[0]) or str(Path(sys.executable).with_name(command[0]))
    if not Path(program).is_file():
        pytest.skip(f"no `{command[0]}`: `apt-get install openmpi-bin`, `uv sync --group accelerate`")
    own = {name: value for name, value in env.items() if name not in TORCHS}
    done = subprocess.run(
        [program, *command[1:], str(path), str(tmp_path)],
        env={**own, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    for rank in range(2):
        replicated, sharded = json.loads((tmp_path / f"found-{rank}").read_text())
        assert replicated == sharded == [[[rank, 2], [rank, 2]], [str(rank), "2"]]


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [["--nodes=1", "--ntasks=2", "--cpus-per-task=1"], ["--nodes=2"]], ids=str)
def test_a_script_trains_in_the_tasks_of_srun(cluster: Slurm, tmp_path: Path, tasks: list[str]) -> None:
    check_script_on_ranks(["srun", *tasks, sys.executable], tmp_path, dict(cluster.env))


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable],
        ["torchrun", "--nproc-per-node=2"],
        ["accelerate", "launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"],
    ],
    ids=lambda command: command[0],
)
def test_the_same_script_trains_under_other_launchers(tmp_path: Path, command: list[str]) -> None:
    check_script_on_ranks(command, tmp_path, dict(os.environ))
