"""Copies in memory: a killed rank loses the steps since the last copy, and a damaged copy is not used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hocket.dist.launch.warm.starter import WarmProcess
from hocket.stream import MDSWriter
from support import launches
from support.sampling import cases

KILLED_AT = 17
"""The batch in which rank 1 ends; the last copy is of batch 15 then, and the last checkpoint of batch 10."""
JOB = """
import json, os, pathlib, signal, sys, time
import torch
from torch import nn
from hocket.algos import EMA
from hocket.stream import StreamingDataLoader, StreamingDataset
from hocket.trainer import Callback, ComposerModel, Trainer

out, given = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
folders = [pathlib.Path(one) for one in os.environ.get("HOCKET_MEMORY_FOLDERS", "").split(":") if one]


def copies():
    return sorted(str(path) for folder in folders for path in folder.glob("*/ba*"))


def wait_for_copy(batch):
    # The commit of a copy follows beside the training, and then the copy before is removed.
    for _ in range(200):
        found = [pathlib.Path(copy) for copy in copies()]
        if [copy.name for copy in found] == [f"ba{batch - batch % 3}"] and len(list(found[0].iterdir())) == 2:
            return
        time.sleep(0.05)
    raise TimeoutError(f"there is no copy of batch {batch - batch % 3}, but {found}")


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.nn.functional.dropout(x, 0.1)

    def loss(self, outputs, batch):
        return (outputs - batch["x"]).square().mean()


class Fault(Callback):
    def batch_start(self, state, logger):
        batch = state.timestamp.batch.value
        if rank == 0:
            with (out / f"steps-{attempt}").open("a") as file:
                print(batch, file=file)
        if rank != 1 or batch != given.get("kill_at") or attempt:
            return
        wait_for_copy(batch)
        if given.get("damages"):
            (folder,) = copies()
            for data in pathlib.Path(folder).glob("data/*"):
                content = bytearray(data.read_bytes())
                content[-3] ^= 1
                data.write_bytes(content)
        if given.get("waits"):
            (out / "waits").touch()
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)

    def fit_end(self, state, logger):
        if rank == 1 and given.get("kill_at") == "the end" and not attempt:
            wait_for_copy(24)
            os.kill(os.getpid(), signal.SIGKILL)

    def batch_end(self, state, logger):
        with (out / f"losses-{rank}").open("a") as file:
            print(state.timestamp.batch.value, float(state.loss).hex(), file=file)
        if rank == 0:
            if state.timestamp.batch.value == 24 and given.get("kill_at") == 17:
                wait_for_copy(23)
            (out / "copies").write_text(json.dumps(copies()))


(out / f"folders-{attempt}").write_text(json.dumps(list(map(str, folders))))
torch.manual_seed(0)
model = Model()
data = StreamingDataset(local=str(out / "data"), global_batch_size=4, shuffle=True)
with Trainer(
    model=model,
    train_dataloader=StreamingDataLoader(data),
    optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
    algorithms=EMA(half_life="5ba"),
    callbacks=Fault(),
    max_duration=given.get("duration", "24ba"),
    fsdp_config=given.get("fsdp", {}),
    save_folder=str(out / "checkpoints"),
    save_interval=given.get("save_interval", "10ba"),
    autoresume=True,
    checkpointing={"ephemeral": given.get("ephemeral", "3ba")},
    progress_bar=False,
    device="cpu",
    seed=7,
    dist_timeout=30,
) as trainer:
    trainer.fit()
    if rank == 0:
        (out / "left").write_text(json.dumps(copies()))
        (out / "names").write_text(json.dumps(trainer.saved_checkpoints))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with the job and its data; the launchers leave no folder for copies after the test."""
    with MDSWriter(columns={"x": "ndarray:float32:4"}, out=str(tmp_path / "data")) as writer:
        for number in range(64):
            writer.write({"x": np.random.default_rng(number).random(4, dtype=np.float32)})
    (tmp_path / "job.py").write_text(JOB)
    yield tmp_path
    assert not list(filter(Path.exists, memory_folders(tmp_path)))


def memory_folders(folder: Path) -> list[Path]:
    """Return the folders for copies of the last launcher."""
    return [Path(one) for one in json.loads((folder / "folders-0").read_text())]


def start(folder: Path, *options: str, **given: object) -> WarmProcess:
    """Start the job on two ranks."""
    options = options or ("--max-restarts", "1")
    for old in [*folder.glob("losses-*"), *folder.glob("steps-*")]:
        old.unlink()
    arguments = ["-n", "2", *options, "--log-dir", str(folder / "logs"), folder / "job.py", folder]
    return launches.fork_launcher(*arguments, json.dumps(given), env={}, log=folder / "log")


def run(folder: Path, *options: str, **given: object) -> str:
    """Run the job to its good end; return its output."""
    launcher = start(folder, *options, **given)
    try:
        code = launcher.wait(200)
    finally:
        if launcher.returncode is None:
            os.kill(launcher.pid, signal.SIGKILL)
            launcher.wait(20)
    log = (folder / "log").read_text()
    assert code == 0, log
    assert json.loads((folder / "left").read_text()) == []
    return log


@pytest.fixture
def asked_for() -> None:
    """Skip a test unless slow tests are asked for: one process shows the same in the trainer's own tests."""
    if not cases(full=1, sample=0):
        pytest.skip("in one process: `packages/trainer-core/tests/test_ephemeral.py`; on ranks: `-m slow`")


def losses(folder: Path) -> dict[tuple[int, int], set[str]]:
    """Return the losses by rank and batch; a batch that was trained again in other bits has two."""
    found: dict[tuple[int, int], set[str]] = {}
    for rank in (0, 1):
        for line in (folder / f"losses-{rank}").read_text().splitlines():
            batch, loss = line.split()
            found.setdefault((rank, int(batch)), set()).add(loss)
    return found


def first_batch(folder: Path, attempt: int) -> int:
    """Return the batch at which an attempt has begun."""
    return int((folder / f"steps-{attempt}").read_text().split()[0])


def reference(folder: Path, **given: object) -> dict[tuple[int, int], set[str]]:
    """Return the losses of a run that nothing happens to."""
    run(folder, **given)
    for name in ("checkpoints", "logs"):
        (folder / name).rename(folder / f"{name}-reference")
    found = losses(folder)
    assert len(found) == 48
    assert all(len(one) == 1 for one in found.values())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [{}, {"cpu_offload": True}, {"sharding_strategy": "NO_SHARD"}])
def test_a_killed_rank_goes_on_from_the_newest_copy_with_equal_losses(folder: Path, fsdp: dict) -> None:
    expected = reference(folder, fsdp=fsdp)
    log = run(folder, fsdp=fsdp, kill_at=KILLED_AT)
    assert first_batch(folder, 1) == 15, log
    assert "`ba15` is a copy in memory" in log
    assert losses(folder) == expected
    copies = json.loads((folder / "copies").read_text())
    assert [path.rpartition("/")[2] for path in copies] == ["ba21"], "the copy before is removed"
    assert copies[0].startswith("/dev/shm/hocket-memory-")
    assert json.loads((folder / "names").read_text()) == ["ep0-ba10", "ep1-ba20", "ep1-ba24"]


@pytest.mark.slow
@pytest.mark.usefixtures("asked_for")
def test_a_damaged_copy_is_refused_by_its_digests_and_the_checkpoint_taken(folder: Path) -> None:
    expected = reference(folder)
    log = run(folder, kill_at=KILLED_AT, damages=True)
    assert "the copy `ba15` in memory cannot be used, and is removed: " in log
    assert "digest" in log
    assert first_batch(folder, 1) == 10, log
    assert losses(folder) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("asked_for")
def test_a_damaged_copy_before_the_first_checkpoint_starts_the_run_anew(folder: Path) -> None:
    log = run(folder, "--max-restarts", "2", kill_at=KILLED_AT, damages=True, save_interval="100ba")
    assert "There is no checkpoint yet: start the run again" in log
    assert first_batch(folder, 2) == 0, log
    assert all(len(one) == 1 for one in losses(folder).values())


@pytest.mark.slow
@pytest.mark.usefixtures("asked_for")
def test_the_end_of_a_run_is_saved_from_the_copy_if_a_rank_dies_before(folder: Path) -> None:
    log = run(folder, kill_at="the end")
    assert "it is finished" in log
    assert json.loads((folder / "names").read_text()) == ["ep0-ba10", "ep1-ba20", "ep1-ba24"]
    assert not (folder / "steps-1").exists(), "no batch is trained again"


@pytest.mark.slow
def test_the_copies_of_a_killed_launcher_are_removed_by_the_next_one(folder: Path) -> None:
    launcher = start(folder, kill_at=KILLED_AT, waits=True)
    deadline = time.monotonic() + 200
    try:
        while not (folder / "waits").exists():
            assert time.monotonic() < deadline
            assert launcher.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
        left, _ = memory_folders(folder)
        assert left.parent == Path("/dev/shm")
        assert list(left.glob("*/ba15"))
    finally:
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait(20)
    ends = folder / "ends.py"
    ends.write_text("")
    options = ["-n", "1", "--max-restarts", "1", ends]
    assert launches.fork_launcher(*options, env={}, log=folder / "log").wait(100) == 0
    assert not left.exists()


@pytest.mark.slow
@pytest.mark.parametrize("has_room", [True, False])
def test_a_small_shared_memory(folder: Path, has_room: bool) -> None:
    """Containers have 64 MB unless they ask for more; here it is less, for a small model."""
    mount = "mount -t tmpfs -o size=100k tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, timeout=30).returncode:
        pytest.skip("this machine does not allow namespaces of mounts")
    temporary = "/dev/shm" if not has_room else str(folder)
    command = [sys.executable, "-m", "hocket.dist.launch", "-n", "2", "--max-restarts", "1"]
    command += ["--log-dir", str(folder / "logs"), str(folder / "job.py"), str(folder)]
    done = subprocess.run(
        [
            "unshare",
            "-m",
            "sh",
            "-c",
            f'{mount} && exec "$@"',
            "sh",
            *command,
            json.dumps({"kill_at": KILLED_AT}),
        ],
        env={**os.environ, "TMPDIR": temporary, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if has_room:
        assert done.returncode == 0, done.stderr
        assert done.stderr.count(f"they are kept in `{folder}`, which may be slower") == 1
        assert first_batch(folder, 1) == 15
        assert not list(folder.glob("hocket-memory-*"))
    else:
        assert done.returncode == 1
        assert "two copies of the state take 4.2 MB on this machine: `/dev/shm` has" in done.stderr
