"""The trainer under the launcher: a rank fails once, and all ranks start again where the run was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """
import json, os, pathlib, signal, sys
import torch
from torch import nn
from hocket.trainer import Callback, ComposerModel, Trainer

out, attempt = pathlib.Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, batch):
        x = batch[0]
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()


class Die(Callback):
    def batch_start(self, state, logger):
        with (out / f"steps-{attempt}-{rank}").open("a") as file:
            print(state.timestamp.batch.value, file=file)
        if rank == 1 and state.timestamp.batch.value == 4:
            if sys.argv[2] == "killed" and attempt == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            if sys.argv[2] == "out of memory" and state.device_train_microbatch_size != 1:
                raise torch.OutOfMemoryError("raised by hand, since a CPU has no such limit")


class Loader:
    data_parallel = (rank, size)

    def __len__(self):
        return 8

    def __iter__(self):
        for step in range(8):
            generator = torch.Generator().manual_seed(10 * step + rank)
            yield [torch.randn(2, 4, generator=generator), torch.randn(2, 4, generator=generator)]


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
    save_interval="2ba",
    autoresume=True,
    progress_bar=False,
    device="cpu",
    dist_timeout=30,
) as trainer:
    trainer.fit()
    weight = model.blocks[0].weight.full_tensor()
    if rank == 0:
        state = trainer.state
        end = [state.timestamp.batch.value, state.device_train_microbatch_size]
        (out / "end.json").write_text(json.dumps(end))
        (out / "status").write_text(pathlib.Path(os.environ["HOCKET_STATUS_FILE"]).read_text())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("failure", "microbatch"), [("killed", None), ("out of memory", 1)])
def test_a_failure_costs_the_batches_since_the_last_checkpoint(
    tmp_path: Path, failure: str, microbatch: int | None
) -> None:
    """After an out-of-memory error all ranks go on with half the microbatch, here of 2 samples."""
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [
        sys.executable,
        "-m",
        "hocket.dist",
        "-n",
        "2",
        "--max-restarts",
        "1",
        str(path),
        str(tmp_path),
        failure,
    ]
    done = subprocess.run(
        command, env={**env, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "end.json").read_text()) == [8, microbatch]
    first, second = ((tmp_path / f"steps-{attempt}-1").read_text().split() for attempt in (0, 1))
    assert first == ["0", "1", "2", "3", "4"]
    assert second == ["4", "5", "6", "7"], "the second attempt does not start from the newest checkpoint"
    assert "ba8" in json.loads((tmp_path / "status").read_text())["checkpoint"]
