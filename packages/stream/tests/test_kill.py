"""Processes killed at any moment: a restart skips and repeats no sample, and needs no cleanup."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hocket.stream import StreamingDataLoader, StreamingDataset
from hocket.stream.verify import verify
from support.sampling import cases, plan

COUNT = 250
OPTIONS: dict[str, Any] = {"global_batch_size": 12, "shuffle": True, "shuffle_block_size": 32}
EPOCHS = 2

RANK = """
import json, os, sys, time
from pathlib import Path
from hocket.stream import StreamingDataset

remote, cache, out, rank, world_size, options = sys.argv[1:]
out, rank, world_size = Path(out), int(rank), int(world_size)
dataset = StreamingDataset(
    remote=remote, local=cache, rank=rank, world_size=world_size, fetch_threads=2, **json.loads(options)
)
if (out / "state.json").exists():
    dataset.load_state_dict(json.loads((out / "state.json").read_text()))
while dataset.cursor.epoch < 2:
    for batch in dataset.batches():
        ids = batch["id"][: dataset.batch_share()[0]].tolist()
        told = {"ids": ids, "state": dataset.state_dict()}
        with (out / f"rank{rank}.log").open("a") as log:
            log.write(json.dumps(told) + "\\n")
        time.sleep(0.005)
"""


@pytest.fixture
def remote(
    s3d_faults: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[..., str],
    tmp_path: Path,
) -> str:
    """Write 250 samples in shards that are sent slowly, so that a kill interrupts a download."""
    server = s3d_faults()
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    uri: str = server.uri("data")
    write(COUNT, out=uri, size_limit=1000)
    server.set_faults("kind=latency,ms=15,op=GetObject", bandwidth=40_000)
    return uri


def with_own_shared_memory(folder: Path) -> list[str]:
    """Return a command prefix that mounts `folder` as `/dev/shm`; empty if not permitted."""
    folder.mkdir()
    command = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', str(folder)]
    if shutil.which(command[0]) is None:
        return []
    tried = subprocess.run([*command, "true"], capture_output=True, timeout=30, check=False)
    return command if tried.returncode == 0 else []


class Job:
    """Runs ranks as processes and collects their global batches."""

    def __init__(self, remote: str, tmp_path: Path, before: list[str]) -> None:
        self.cache, self._out, self._temporary = (tmp_path / name for name in ("cache", "out", "tmp"))
        for folder in (self._out, self._temporary):
            folder.mkdir()
        self._remote, self._before = remote, before
        self.batches: list[list[int]] = []

    def run(self, world_size: int, stop: Callable[[list[subprocess.Popen[str]]], None] | None) -> list[int]:
        """Start all ranks, call `stop`, wait, and return the exit codes."""
        with ExitStack() as stack:
            ranks = []
            for rank in range(world_size):
                told = [self._remote, self.cache, self._out, rank, world_size, json.dumps(OPTIONS)]
                command = [*self._before, sys.executable, "-c", RANK, *map(str, told)]
                ranks.append(
                    stack.enter_context(
                        subprocess.Popen(
                            command,
                            stderr=subprocess.PIPE,
                            text=True,
                            env=os.environ | {"TMPDIR": str(self._temporary)},
                        )
                    )
                )
                stack.callback(ranks[-1].kill)
            if stop is not None:
                stop(ranks)
            for process in ranks:
                _, said = process.communicate(timeout=90)
                assert process.returncode in (0, -signal.SIGKILL), said
        self._take(world_size)
        return [process.returncode for process in ranks]

    def _take(self, world_size: int) -> None:
        """Keep the batches up to the last step that all ranks made, as a job's checkpoint does."""
        logs = []
        for rank in range(world_size):
            path = self._out / f"rank{rank}.log"
            lines = path.read_text().split("\n")[:-1] if path.exists() else []
            logs.append([json.loads(line) for line in lines])
            path.unlink(missing_ok=True)
        for step in zip(*logs, strict=False):
            self.batches.append([number for part in step for number in part["ids"]])
            assert all(part["state"] == step[0]["state"] for part in step)
            (self._out / "state.json").write_text(json.dumps(step[0]["state"]))


@pytest.mark.slow
@pytest.mark.parametrize("victims", ["one", "all"])
def test_ranks_killed_at_random_resume_at_the_last_common_step(
    remote: str, tmp_path: Path, victims: str
) -> None:
    draw = random.Random(plan().seed)

    def stop(ranks: list[subprocess.Popen[str]]) -> None:
        time.sleep(draw.uniform(0.2, 1.5))
        dead = [draw.choice(ranks)] if victims == "one" else ranks
        for process in dead:
            process.send_signal(signal.SIGKILL)
        time.sleep(draw.uniform(0, 0.2))
        for process in ranks:  # a launcher ends the others
            process.send_signal(signal.SIGKILL)

    job = Job(remote, tmp_path, with_own_shared_memory(tmp_path / "shm"))
    for _ in range(cases(full=12, sample=3)):
        job.run(draw.choice([1, 2, 3]), stop)
    assert set(job.run(2, None)) == {0}
    whole = StreamingDataset(remote=remote, local=tmp_path / "index", rank=0, world_size=1, **OPTIONS)
    expected = [
        whole.sample_ids(number, epoch=epoch)
        for epoch in range(EPOCHS)
        for number in range(whole.num_batches)
    ]
    assert job.batches == expected
    assert sorted(number for batch in expected for number in batch) == sorted(list(range(COUNT)) * EPOCHS)
    assert verify(str(job.cache)).bad == []
    assert not list(job.cache.glob(".*")), "a restart must not leave a killed download's files"
    assert [list((tmp_path / name).iterdir()) for name in ("tmp", "shm")] == [[], []]


def lose_a_worker(remote: str, cache: Path, checkpoint: Path, seed: int) -> None:
    draw = random.Random(seed)
    loader = StreamingDataLoader(
        StreamingDataset(remote=remote, local=cache, fetch_threads=2, **OPTIONS),
        num_workers=2,
        prefetch_factor=2,
        timeout_s=60,
    )
    iterator = iter(loader)
    done: tuple[list[list[int]], dict[str, Any]] = ([], loader.state_dict())

    def step() -> None:
        nonlocal done
        ids = next(iterator)["id"].tolist()
        # One assignment: torch's signal handler for a dead worker may raise between two statements.
        done = (done[0] + [ids], loader.state_dict())

    # Few steps, so that each worker still has batches to make.
    for _ in range(draw.randint(1, 12)):
        step()
    workers = sorted(process.pid or 0 for process in multiprocessing.active_children())
    assert len(workers) == 2

    def lose() -> None:
        time.sleep(draw.uniform(0, 0.1))
        os.kill(draw.choice(workers), signal.SIGKILL)
        while True:
            step()

    # Torch raises that the worker is dead, or that the connection that passed its batch is broken.
    with pytest.raises((RuntimeError, OSError)):
        lose()
    checkpoint.write_text(json.dumps(done))
    # Skip the exit handlers, in which torch may raise again that the worker is dead.
    os._exit(0)


def in_process(target: Callable[..., None], *arguments: object) -> None:
    job = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    job.start()
    job.join(120)
    assert job.exitcode == 0
    job.close()


def go_on(remote: str, cache: Path, checkpoint: Path) -> None:
    seen, state = json.loads(checkpoint.read_text())
    dataset = StreamingDataset(remote=remote, local=cache, **OPTIONS)
    expected = [dataset.sample_ids(number) for number in range(dataset.num_batches)]
    loader = StreamingDataLoader(dataset, num_workers=2, timeout_s=60)
    loader.load_state_dict(state)
    assert 1 <= len(seen) < len(expected)
    assert seen + [batch["id"].tolist() for batch in loader] == expected


def test_a_killed_worker_ends_the_iteration_and_a_new_one_resumes(remote: str, tmp_path: Path) -> None:
    # In separate processes, because torch may leave a temporary file open when it raises for the worker.
    cache, checkpoint = tmp_path / "cache", tmp_path / "checkpoint.json"
    in_process(lose_a_worker, remote, cache, checkpoint, plan().seed)
    in_process(go_on, remote, cache, checkpoint)
    assert verify(str(cache)).bad == []
