"""Copies in memory in jobs of several hosts: a lost host costs the steps since the last copy.

Each host is a launcher in a network of its own, with folders for copies of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hocket.dist.drill.networks import Networks
from support.hosts import hosts
from support.sampling import cases

KILLED_AT = 11
"""The batch in which hosts or ranks end; the last copy is of batch 9 then, and the last checkpoint of 8."""
NUM_BATCHES = 16
JOB = """
import json, os, pathlib, signal, sys, time
import torch
from torch import nn
from hocket.ckpt.torch import CheckpointStore
from hocket.native._native import CKPT_MANIFEST_NAME as MANIFEST
from hocket.trainer import Callback, ComposerModel, Trainer

out, case = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
host, rank, size = os.environ["HOST"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folders = [pathlib.Path(one) for one in os.environ.get("HOCKET_MEMORY_FOLDERS", "").split(":") if one]
run = out / case["run"]
(run / f"folders-{host}").write_text(json.dumps(list(map(str, folders))))


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 6))

    def forward(self, batch):
        return self.layers(batch[0])

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()


class Loader:
    data_parallel = (rank, size)

    def __len__(self):
        return 16

    def __iter__(self):
        for step in range(16):
            generator = torch.Generator().manual_seed(step)
            rows = slice(rank * 6 // size, (rank + 1) * 6 // size)
            yield [torch.randn(6, 6, generator=generator)[rows] for _ in range(2)]


def wait_for_copy(batch):
    # The commit of a copy follows beside the training, and then the copy before is removed.
    for _ in range(400):
        found = [path for folder in folders for path in folder.glob("*/ba*")]
        is_new = [int(path.name[2:]) >= batch - batch % 3 for path in found]
        if is_new == [True] and (found[0] / MANIFEST).exists():
            return
        time.sleep(0.05)
    raise TimeoutError(f"there is no copy of batch {batch - batch % 3}, but {found}")


class Fault(Callback):
    trained = 0

    def batch_start(self, state, logger):
        batch = state.timestamp.batch.value
        if self.trained >= 3:
            wait_for_copy(batch)
        self.trained += 1
        with (run / f"copies-{host}").open("a") as file:
            found = [path for folder in folders for path in folder.glob("*/ba*")]
            parts = [f"{path.name}:{len(list(path.glob('data/*')))}" for path in found]
            print(size, batch, *parts, file=file)
        if batch == case.get("at") and host in case["ends"] and not (run / f"ended-{host}").exists():
            (run / f"ended-{host}").touch()
            if case.get("notice"):
                os.kill(int(os.environ["HOCKET_LAUNCH"]), signal.SIGTERM)
                return
            if case.get("whole host"):
                os.kill(int(os.environ["HOCKET_LAUNCH"]), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def batch_end(self, state, logger):
        with (run / f"losses-{host}").open("a") as file:
            print(size, state.timestamp.batch.value, float(state.loss).hex(), file=file)


if case.get("slow"):
    save = CheckpointStore.save

    def save_slowly(store, *arguments, **options):
        time.sleep(0 if "memory" in str(store.uri) else case["slow"])
        return save(store, *arguments, **options)

    CheckpointStore.save = save_slowly

model = Model()
with Trainer(
    model=model,
    train_dataloader=Loader(),
    max_duration=case.get("duration", "16ba"),
    optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
    callbacks=Fault(),
    fsdp_config={},
    save_folder=str(out / case["run"] / "checkpoints"),
    save_interval="8ba",
    autoresume=True,
    checkpointing={"ephemeral": "3ba"},
    progress_bar=False,
    device="cpu",
    dist_timeout=20,
) as trainer:
    trainer.fit()
"""
"""A script of 16 batches, with a copy every 3, in which hosts or ranks end."""


@pytest.fixture
def networks() -> Iterator[Networks]:
    if not cases(full=1, sample=0):
        pytest.skip("jobs of several hosts; without launchers: `packages/ckpt/tests/test_torch_hosts.py`")
    found = Networks(3)
    if reason := found.open():
        pytest.skip(reason)
    yield found
    found.close()


def train(
    tmp_path: Path, networks: Networks, run: str, nodes: str, count: int, *, lost: str = "", **case: object
) -> str:
    """Run a job on hosts, of which some are lost, to its good end; return host 0's output in one line."""
    (tmp_path / run).mkdir(exist_ok=True)
    # The first round begins at once when all hosts have come, however late one of them is.
    conf = "last_call_timeout=60"
    text = json.dumps({"run": run, "ends": "", **case})
    with hosts(tmp_path, text, nodes, count, conf=conf, networks=networks, script=JOB) as launchers:
        for host, launcher in enumerate(launchers):
            if str(host) not in lost:
                assert launcher.wait(150) == 0, (tmp_path / f"log-{host}").read_text()
    (tmp_path / "port").unlink()
    for path in (tmp_path / run).glob("folders-*"):
        for folder in map(Path, json.loads(path.read_text())):
            if path.name[-1] in lost:
                # A launcher that was killed has left it, and one of another test may be removing it.
                shutil.rmtree(folder, ignore_errors=True)
            assert not folder.exists(), "the folder outlives its launcher"
    return " ".join((tmp_path / "log-0").read_text().split())


def losses(tmp_path: Path, run: str) -> dict[tuple[int, int], set[str]]:
    """Return the losses by number of ranks and batch; equal on all ranks, they are one."""
    found: dict[tuple[int, int], set[str]] = {}
    for path in (tmp_path / run).glob("losses-*"):
        for line in path.read_text().splitlines():
            size, batch, loss = line.split()
            found.setdefault((int(size), int(batch)), set()).add(loss)
    return found


def copies(tmp_path: Path, run: str, host: int, size: int) -> dict[int, list[str]]:
    """Return the copies in a host's memory, with the number of data files, at the start of each batch."""
    rows = [line.split() for line in (tmp_path / run / f"copies-{host}").read_text().splitlines()]
    return {int(row[1]): row[2:] for row in rows if int(row[0]) == size}


@pytest.mark.slow
def test_a_lost_host_costs_the_steps_since_the_last_copy(tmp_path: Path, networks: Networks) -> None:
    train(tmp_path, networks, "reference", "3", 3, duration="9ba")
    train(tmp_path, networks, "reference", "2", 2)
    expected = losses(tmp_path, "reference")
    # Two hosts are enough for a round, and no fewer, so that none trains alone where the other is late.
    log = train(
        tmp_path, networks, "lost", "2:3", 3, at=KILLED_AT, ends="1", lost="1", **{"whole host": True}
    )
    assert "`ba9` is a copy in memory" in log
    found = losses(tmp_path, "lost")
    assert min(batch for size, batch in found if size == 2) == 10, "batches 10 and 11 are trained again"
    assert all(found[2, batch] == expected[2, batch] for batch in range(10, NUM_BATCHES + 1))
    assert all(found[3, batch] == expected[3, batch] for batch in range(1, 10))
    for host in (0, 1, 2):
        assert copies(tmp_path, "lost", host, 3)[KILLED_AT] == ["ba9:2"], (
            "the part of each, and a neighbour's"
        )
    assert copies(tmp_path, "lost", 2, 2)[NUM_BATCHES - 1] == ["ba15:2"]


@pytest.mark.slow
def test_a_notice_without_time_for_a_save_costs_the_machines_that_stay_nothing(
    tmp_path: Path, networks: Networks
) -> None:
    """The ranks have 3 s to end, and a checkpoint takes 4; a copy takes a moment."""
    log = train(
        tmp_path, networks, "noticed", "2:3", 3, at=KILLED_AT, ends="1", lost="1", notice=True, slow=4
    )
    told = re.search(r"batch (\d+) is not saved: .*?go on from the copy in memory of batch (\d+)", log)
    assert told is not None, log
    assert told[1] == told[2]
    assert f"`ba{told[1]}` is a copy in memory" in log
    alone = sorted(batch for size, batch in losses(tmp_path, "noticed") if size == 2)
    assert alone == list(range(int(told[1]) + 1, NUM_BATCHES + 1)), "no batch is trained again"


@pytest.mark.slow
def test_two_lost_neighbours_cost_the_steps_since_the_checkpoint(tmp_path: Path, networks: Networks) -> None:
    log = train(
        tmp_path, networks, "lost", "1:3", 3, at=KILLED_AT, ends="12", lost="12", **{"whole host": True}
    )
    assert "the hosts that are left do not have all parts of a copy" in log
    assert "is a copy in memory" not in log
    found = losses(tmp_path, "lost")
    alone = sorted(batch for size, batch in found if size == 1)
    assert alone == list(range(9, NUM_BATCHES + 1)), "it goes on from the checkpoint of batch 8"


@pytest.mark.slow
def test_a_killed_rank_goes_on_from_the_copy_with_equal_losses(tmp_path: Path, networks: Networks) -> None:
    train(tmp_path, networks, "undisturbed", "3", 3)
    log = train(tmp_path, networks, "killed", "3", 3, at=KILLED_AT, ends="2")
    assert "`ba9` is a copy in memory" in log
    expected = losses(tmp_path, "undisturbed")
    assert len(expected) == NUM_BATCHES
    assert all(len(one) == 3 for one in expected.values()), "each rank has rows of its own"
    assert losses(tmp_path, "killed") == expected
    assert os.listdir(tmp_path / "killed" / "checkpoints") == os.listdir(
        tmp_path / "undisturbed" / "checkpoints"
    )
