"""A rank that the kernel ends for want of memory, as in a container: the job goes on with equal losses."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import launches
from support.memory_limit import memory_limit
from support.sampling import cases

LIMIT_BYTES = 1 << 30
JOB = """
import os, pathlib, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hocket.trainer import Callback, ComposerModel, Trainer

out, case = pathlib.Path(sys.argv[1]), sys.argv[2]
pathlib.Path(sys.argv[3]).write_text(str(os.getpid()))
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))

    def forward(self, batch):
        return self.layers(batch[0])

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()


class Leak(Callback):
    def batch_end(self, state, logger):
        batch = state.timestamp.batch.value
        with (out / f"{case}-losses-{rank}").open("a") as file:
            print(batch, float(state.loss).hex(), file=file)
        kept = []
        while case == "leaks" and rank == 1 and batch == 8 and not attempt:
            kept.append(bytearray(os.urandom(1 << 20)) * 64)


torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 6), torch.randn(96, 6))
with Trainer(
    model=Model(),
    train_dataloader=DataLoader(data, batch_size=4),
    max_duration="12ba",
    callbacks=Leak(),
    fsdp_config={},
    save_folder=str(out / f"{case}-checkpoints"),
    save_interval="5ba",
    autoresume=True,
    progress_bar=False,
    device="cpu",
    seed=7,
    dist_timeout=20,
) as trainer:
    trainer.fit()
"""
"""A script of 12 batches; in the case `leaks`, rank 1 takes memory without end after 8."""


def losses(tmp_path: Path, case: str, rank: int) -> list[tuple[int, str]]:
    """Return the batches that a rank has trained, with their losses."""
    lines = (tmp_path / f"{case}-losses-{rank}").read_text().splitlines()
    return [(int(line.split()[0]), line.split()[1]) for line in lines]


@pytest.fixture
def members() -> Iterator[Path]:
    """The file by which processes join a control group with a limit."""
    with contextlib.ExitStack() as made:
        try:
            found = made.enter_context(memory_limit(LIMIT_BYTES))
        except OSError as error:
            pytest.skip(f"no control group with a limit of memory: {error}")
        yield found


@pytest.mark.slow
def test_a_rank_beyond_the_limit_of_its_container_is_started_again(tmp_path: Path, members: Path) -> None:
    """The ranks are in one control group, where the kernel ends the process with most memory."""
    if not cases(full=1, sample=0):
        pytest.skip("two jobs in a control group; the drills have an allocation that fails: `-m slow`")
    script = tmp_path / "job.py"
    script.write_text(JOB)
    for case in ("undisturbed", "leaks"):
        log = tmp_path / f"log-{case}"
        options = ["-n", "2", "--max-restarts", "1", "--log-dir", str(tmp_path / f"logs-{case}")]
        launcher = launches.fork_launcher(*options, script, tmp_path, case, members, env={}, log=log)
        try:
            assert launcher.wait(120) == 0, log.read_text()
        finally:
            if launcher.poll() is None:
                os.kill(launcher.pid, 9)
                launcher.wait(20)
    told = (tmp_path / "log-leaks").read_text()
    assert re.search(r"rank 1 \(pid \d+\) failed first, by SIGKILL", told), told
    assert "The kernel also sends SIGKILL when memory is short" in told
    expected = losses(tmp_path, "undisturbed", 0)
    found = losses(tmp_path, "leaks", 0)
    assert [batch for batch, _ in expected] == list(range(1, 13))
    again = [batch for batch, _ in found]
    assert again[-7:] == list(range(6, 13)), "it goes on from the checkpoint of batch 5"
    assert set(found) == set(expected)
