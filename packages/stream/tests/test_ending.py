"""Stopping a reader ends its threads and downloads at once and leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import inspect
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.stream import MDSWriter, StreamingDataset

SHARD = 128 << 10
"""Size limit for shards of one sample."""
COUNT = 32


def reading_threads() -> list[str]:
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        try:
            names.append(path.read_text().strip())
        except OSError:  # the thread has ended
            continue
    return [name for name in names if name.startswith(("hocket-plan", "hocket-fetch", "hocket-batch"))]


def reading_threads_at_the_end() -> list[str]:
    """Return the reading threads, after up to 20 s in which the kernel removes the joined ones."""
    deadline = time.monotonic() + 20
    while reading_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return reading_threads()


READ = f"""
import signal, sys, time
from pathlib import Path
from hocket.stream import StreamingDataset

{inspect.getsource(reading_threads)}
{inspect.getsource(reading_threads_at_the_end)}
signal.signal(signal.SIGINT, signal.default_int_handler)
dataset = StreamingDataset(remote=sys.argv[1], local=sys.argv[2], batch_size=1)
batches = dataset.batches()
try:
    print("begun", next(batches)["id"], flush=True)
    for batch in batches:
        pass
except KeyboardInterrupt:
    print(reading_threads_at_the_end())
"""


@pytest.fixture
def server(s3d_faults: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start a server that sends ten shards of a data set at once and each other one in a minute."""
    server = s3d_faults()
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    with MDSWriter(columns={"id": "int", "x": "bytes"}, out=server.uri("data"), size_limit=SHARD) as writer:
        for number in range(COUNT):
            writer.write({"id": number, "x": bytes(SHARD - 300)})
    keys = ("*shard.0001*", "*shard.0002*", "*shard.0003*")
    server.set_faults(*(f"kind=bandwidth,bytes_per_s={SHARD // 60},op=GetObject,key={key}" for key in keys))
    return server


def test_ctrl_c_ends_a_wait_for_a_shard_and_joins_the_threads(server: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", READ, server.uri("data"), str(tmp_path / "cache")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "begun [0]\n"
            time.sleep(0.2)
            reader.send_signal(signal.SIGINT)
            # Waiting for the shard would take a minute.
            said, _ = reader.communicate(timeout=40)
        finally:
            reader.kill()
    assert (reader.returncode, said) == (0, "[]\n")
    assert sorted(path.name for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")) == []


def test_an_iterator_that_is_garbage_collected_stops_its_downloads(server: Any, tmp_path: Path) -> None:
    dataset = StreamingDataset(remote=server.uri("data"), local=tmp_path / "cache", batch_size=1)
    batches = dataset.batches()
    assert next(batches)["id"].tolist() == [0]
    assert reading_threads() != []
    del batches
    gc.collect()
    assert reading_threads_at_the_end() == []
    server.await_idle()
    asked = server.stats()["requests"]["GetObject"]
    assert asked < COUNT
    time.sleep(0.5)
    assert server.stats()["requests"]["GetObject"] == asked
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]


def test_an_iterator_of_samples_ends_with_its_last_reference(server: Any, tmp_path: Path) -> None:
    dataset = StreamingDataset(remote=server.uri("data"), local=tmp_path / "cache", batch_size=1)
    gc.disable()
    try:
        samples = iter(dataset)
        assert next(samples)["id"] == 0
        assert reading_threads() != []
        del samples
        assert reading_threads_at_the_end() == []
    finally:
        gc.enable()


def test_a_data_set_that_is_garbage_collected_closes_its_files(server: Any, tmp_path: Path) -> None:
    server.set_faults()
    dataset = StreamingDataset(remote=server.uri("data"), local=tmp_path / "cache", batch_size=1)
    iterator = iter(dataset)
    next(iterator)
    assert held(tmp_path / "cache")
    del dataset, iterator
    gc.collect()
    assert held(tmp_path / "cache") == []


def held(folder: Path) -> list[str]:
    """Return the memory maps and open files of this process below a folder."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    files = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            files.append(str(path.readlink()))
    return maps + [name for name in files if name.startswith(str(folder))]
