"""`notebook_launcher`: ranks run functions that are defined in a cell and not in a file."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from hocket.dist import ConfigError, RankFailedError, notebook_launcher
from support import launches

pytest.importorskip("cloudpickle", reason="needs cloudpickle")
CELL = """
import torch
from torch.utils.data import DataLoader, TensorDataset

from hocket.trainer import Trainer

inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


def train(duration):
    import os

    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    with Trainer(
        model=model, loss_fn=torch.nn.functional.mse_loss, train_dataloader=loader, max_duration=duration,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1), progress_bar=False,
    ) as trainer:
        trainer.fit()
        return int(os.environ["RANK"]), trainer.state.timestamp.sample.value, model.weight.detach()


def fail():
    raise ValueError("no such data")
"""


@pytest.fixture
def cell():
    variables = {"__name__": "__main__"}
    exec(CELL, variables)
    return variables


def test_a_function_of_a_cell_trains_on_two_ranks(cell):
    (first, samples, weight), (second, _, other) = notebook_launcher(cell["train"], ("1ep",), num_processes=2)
    assert (first, second, samples) == (0, 1, 64)
    assert weight.equal(other)


def test_a_failure_raises_with_the_ranks_traceback(cell):
    with pytest.raises(RankFailedError, match=r"ValueError: no such data[\s\S]*rank 0 .*failed first"):
        notebook_launcher(cell["fail"], num_processes=1)


KERNEL = """
import os, sys, time
from hocket.dist import notebook_launcher

def wait(path):
    with open(path, "w") as file:
        print(os.getpid(), file=file)
    time.sleep(60)

notebook_launcher(wait, (sys.argv[1],), num_processes=1)
"""


@pytest.mark.slow
def test_the_ranks_end_with_a_kernel_that_is_killed(tmp_path):
    path = tmp_path / "pid"
    kernel = subprocess.Popen([sys.executable, "-c", KERNEL, path], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, "the rank did not start"
        time.sleep(0.05)
    pid = int(path.read_text())
    kernel.kill()
    kernel.wait(10)
    deadline = time.monotonic() + 10
    while launches.is_alive(pid):
        assert time.monotonic() < deadline, "the rank outlived the kernel"
        time.sleep(0.05)


def test_invalid_calls_raise(cell, monkeypatch):
    with pytest.raises(ConfigError, match="`num_processes` is 0"):
        notebook_launcher(cell["fail"], num_processes=0)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="rank of a job already"):
        notebook_launcher(cell["fail"], num_processes=1)
