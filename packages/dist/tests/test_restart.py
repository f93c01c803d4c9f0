"""Restarts by the launcher: after a rank fails, all ranks resume from the newest checkpoint."""

import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from hocket.dist.launch.warm.starter import WarmProcess
from support import launches

TRAIN = """
import json, os, pathlib, resource, signal, sys, time
import torch
from torch import nn
from hocket.trainer import Callback, ComposerModel, Trainer

out, attempt = pathlib.Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROW_BYTES = 2**32  # of addresses, so that what threads reserve of them is little beside a row


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.is_short = False

    def forward(self, batch):
        x = batch[0]
        if self.is_short:
            torch.empty(len(x) * ROW_BYTES, dtype=torch.uint8)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()


class Die(Callback):
    def batch_start(self, state, logger):
        with (out / f"steps-{attempt}-{rank}").open("a") as file:
            print(state.timestamp.batch.value, file=file)
        if rank == 1 and sys.argv[2] == "dies at odd batches" and state.timestamp.batch.value in (3, 5, 7):
            if attempt == "3" or state.timestamp.batch.value == 3 + 2 * int(attempt):
                os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and state.timestamp.batch.value == 4:
            if sys.argv[2] == "killed" and attempt == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            if sys.argv[2] == "out of memory":
                # From here on there is memory for one row, and not for two.
                in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (in_use + 3 * ROW_BYTES // 2, resource.RLIM_INFINITY))
                model.is_short = True
            if sys.argv[2] == "machine lost":
                time.sleep(200)  # until the test kills it
        if sys.argv[2] == "preempted" and not (out / "ended").exists():
            time.sleep(0.1 if state.timestamp.batch.value < 3 else 2)


class Loader:
    data_parallel = (rank, size)

    def __len__(self):
        return 8

    def __iter__(self):
        for step in range(8):
            generator = torch.Generator().manual_seed(step)
            rows = slice(rank * 4 // size, (rank + 1) * 4 // size)  # of global batches of 4
            yield [torch.randn(4, 4, generator=generator)[rows] for _ in range(2)]


model = Model()
with Trainer(
    model=model,
    train_dataloader=Loader(),
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
    max_duration="8ba",
    callbacks=Die(),
    fsdp_config={"activation_checkpointing": True},
    precision="amp_bf16",
    save_folder=str(out / "checkpoints"),
    save_interval="100ba" if sys.argv[2] == "preempted" else "2ba",
    autoresume=True,
    progress_bar=False,
    device="cpu",
    dist_timeout=30,
) as trainer:
    trainer.fit()
    weight = model.blocks[0].weight.full_tensor()
    if rank == 0:
        state = trainer.state
        end = [state.timestamp.batch.value, state.device_train_microbatch_size, size]
        (out / "end.json").write_text(json.dumps(end))
        (out / "status").write_text(pathlib.Path(os.environ["HOCKET_STATUS_FILE"]).read_text())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def _start(script: Path, failure: str, *place: str) -> tuple[WarmProcess, Path]:
    """Start a launcher; return it and the file of what it prints."""
    options = place or ("-n", "2", "--max-restarts", "1")
    log = script.parent / f"log-{len(list(script.parent.glob('log-*')))}"
    logs = ["--log-dir", str(script.parent / f"logs-of-{log.name}")]
    return launches.fork_launcher(*options, *logs, script, script.parent, failure, env={}, log=log), log


def _finish(launcher: WarmProcess, log: Path) -> str:
    """Wait for the launcher and return what it printed."""
    try:
        launcher.wait(240)
    finally:
        if launcher.returncode is None:
            os.kill(launcher.pid, signal.SIGKILL)
            launcher.wait(20)
    return log.read_text()


def _steps(folder: Path, *, attempt: int, rank: int) -> list[int]:
    path = folder / f"steps-{attempt}-{rank}"
    return [int(step) for step in path.read_text().split()] if path.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "microbatch"),
    [
        ("killed", None),
        pytest.param(
            "out of memory",
            1,
            marks=pytest.mark.skipif(sys.platform != "linux", reason="limits memory by RLIMIT_AS"),
        ),
    ],
)
def test_a_failure_costs_the_batches_since_the_last_checkpoint(
    script: Path, tmp_path: Path, failure: str, microbatch: int | None
) -> None:
    """After a failed allocation, all ranks resume with half the microbatch, here of 2 samples."""
    launcher, log = _start(script, failure)
    stderr = _finish(launcher, log)
    assert launcher.returncode == 0, stderr
    assert json.loads((tmp_path / "end.json").read_text()) == [8, microbatch, 2]
    assert _steps(tmp_path, attempt=0, rank=1) == [0, 1, 2, 3, 4]
    second = _steps(tmp_path, attempt=1, rank=1)
    assert second == [4, 5, 6, 7], "the second attempt does not start from the newest checkpoint"
    assert "ba8" in json.loads((tmp_path / "status").read_text())["checkpoint"]
    phases = ", ".join(rf"{name} \d+\.\d" for name in ("ended", "started", "joined", "loaded", "first step"))
    assert re.search(f"seconds since the launcher found a failed rank: {phases}\n", stderr), stderr
    if failure == "out of memory":
        assert "an earlier attempt of this job ran out of memory" in " ".join(stderr.split())


@pytest.mark.slow
def test_restarts_are_counted_from_the_last_newer_checkpoint_on(script: Path, tmp_path: Path) -> None:
    """Each of three attempts gets past a checkpoint before it dies; the fourth dies at the same batch."""
    launcher, log = _start(script, "dies at odd batches")
    stderr = _finish(launcher, log)
    assert launcher.returncode == 128 + signal.SIGKILL, stderr
    assert [_steps(tmp_path, attempt=attempt, rank=1) for attempt in range(5)] == [
        [0, 1, 2, 3],
        [2, 3, 4, 5],
        [4, 5, 6, 7],
        [6, 7],
        [],
    ]
    told = [line for line in stderr.splitlines() if "failed first, by SIGKILL" in line]
    assert ["all ranks start again, restart 1 of 1 since" in line for line in told] == [
        True,
        True,
        True,
        False,
    ], stderr
    assert re.search(r"no restart is left of 1 since the checkpoint ep\d+-ba6", told[-1])


@pytest.mark.slow
def test_a_job_resumes_from_its_checkpoint_with_the_remaining_ranks(script: Path, tmp_path: Path) -> None:
    """Start two launchers, as on two machines, and kill the second one with its rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # The first machine waits 3 intervals until the second one counts as lost, and then for a late return.
    conf = ["--rdzv-conf", "keep_alive_interval=2,last_call_timeout=2"]
    common = ["-n", "1", "--nnodes", "1:2", "--max-restarts", "2", "--master_addr", "127.0.0.1", *conf]
    places = [[*common, "--master_port", port, "--node_rank", str(node)] for node in range(2)]
    started = [_start(script, "machine lost", *place) for place in places]
    launchers = [launcher for launcher, _ in started]
    try:
        deadline = time.monotonic() + 120
        while len(_steps(tmp_path, attempt=0, rank=1)) < 5:  # the fifth step follows the second checkpoint
            assert time.monotonic() < deadline
            assert launchers[0].poll() is None
            time.sleep(0.05)
        lost = launchers[1].pid
        children = Path(f"/proc/{lost}/task/{lost}/children").read_text().split()
        for pid in (lost, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
    finally:
        stderr = _finish(*started[0])
        _finish(*started[1])
    assert launchers[0].returncode == 0, stderr
    assert json.loads((tmp_path / "end.json").read_text()) == [8, None, 1]
    steps = [step for attempt in range(3) for step in _steps(tmp_path, attempt=attempt, rank=0)]
    resumed_at = steps.index(7) - 3
    assert steps[resumed_at:] == [4, 5, 6, 7], f"{steps} does not end with the steps since the checkpoint"


@pytest.mark.slow
@pytest.mark.parametrize("is_to_all", [False, True])
def test_a_job_ended_by_a_signal_saves_and_resumes_there(
    script: Path, tmp_path: Path, is_to_all: bool
) -> None:
    """The signal is sent to the launcher, or to all processes at once, as `scancel` and a time limit do."""
    launcher, log = _start(script, "preempted")
    deadline = time.monotonic() + 120
    try:
        while len(_steps(tmp_path, attempt=0, rank=1)) < 4:
            assert time.monotonic() < deadline
            assert launcher.poll() is None
            time.sleep(0.05)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        for pid in (launcher.pid, *(map(int, children) if is_to_all else ())):
            os.kill(pid, signal.SIGTERM)
    finally:
        stderr = _finish(launcher, log)
    assert launcher.returncode == 128 + signal.SIGTERM, stderr
    first, second = (_steps(tmp_path, attempt=0, rank=rank) for rank in range(2))
    assert first == second, "the ranks ended after different batches"
    assert first[-1] < 7
    assert f"the last committed checkpoint is ep0-ba{len(first)}" in stderr
    (tmp_path / "ended").touch()
    for rank in range(2):
        (tmp_path / f"steps-0-{rank}").unlink()
    launcher, log = _start(script, "preempted")
    stderr = _finish(launcher, log)
    assert launcher.returncode == 0, stderr
    assert _steps(tmp_path, attempt=0, rank=0) == list(range(len(first), 8))
