"""The end of a rank by an error: exit code 1, whatever its collectives still do."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support import launches

SCRIPT = """
import atexit, os, sys
import torch
import torch.distributed as dist

atexit.register(print, "registered before", flush=True)
file = open(sys.argv[1], "w")
file.write("not closed")
from hocket.dist import provide

parallelism = provide({}, device="cpu", timeout_s=20)
atexit.register(print, "registered after", flush=True)
parallelism.reduce_async(torch.ones(1)).wait()
for _ in range(100):
    dist.all_reduce(torch.ones(20_000), async_op=True)
raise ValueError("a bad sample")
"""
"""A rank that raises an error while collectives are in progress, of which nobody waits for the end."""


@pytest.mark.slow
def test_a_rank_with_collectives_in_progress_ends_by_its_own_error(tmp_path: Path) -> None:
    path, port = tmp_path / "job.py", launches.free_port()
    path.write_text(SCRIPT)
    ranks = []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        env = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, str(path), str(tmp_path / f"file-{rank}")]
        ranks.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        for rank, process in enumerate(ranks):
            output, errors = process.communicate(timeout=120)
            assert process.returncode == 1, errors
            assert errors.count("ValueError: a bad sample") == 1, errors
            assert output.split("\n") == ["registered after", "registered before", ""]
            assert (tmp_path / f"file-{rank}").read_text() == "not closed"
    finally:
        for process in ranks:
            process.kill()
            process.wait(20)


FILES = """
import bz2, gzip, lzma, sys, zipfile
from hocket.dist.ranks.process_end import end_promptly_after_error

end_promptly_after_error()
below = open("0", "wb")
first, second, third = gzip.GzipFile(fileobj=below, mode="wb"), bz2.open("1", "wt"), lzma.open("2", "wt")
first.write(b"held"), second.write("held"), third.write("held")
archive = zipfile.ZipFile("3", "w")
archive.writestr("name", "held")
raise ValueError("a bad sample")
"""


def test_an_error_closes_compressed_files(tmp_path: Path) -> None:
    done = _run(FILES, tmp_path)
    assert (done.returncode, done.stderr.count("ValueError: a bad sample")) == (1, 1), done.stderr
    for number, decompress in enumerate((gzip.decompress, bz2.decompress, lzma.decompress)):
        assert decompress((tmp_path / f"{number}").read_bytes()) == b"held"
    with zipfile.ZipFile(tmp_path / "3") as archive:
        assert archive.read("name") == b"held"


CYCLE = """
import gzip
from hocket.dist.ranks.process_end import end_promptly_after_error

class Below:
    def __init__(self): self.file, self.held = open("0", "wb"), b""
    def write(self, data): self.held += data
    def flush(self): pass
    def __del__(self): self.file.write(self.held), self.file.close()

end_promptly_after_error()
below, first, second = open("1", "wb"), [], []
first.append(gzip.GzipFile(fileobj=Below(), mode="wb"))
second.append(gzip.GzipFile(fileobj=below, mode="wb"))
for cycle in (first, second):
    cycle.append(cycle)
    cycle[0].write(b"held")
raise ValueError("a bad sample")
"""


def test_an_error_closes_compressed_files_in_a_cycle_before_the_files_below_them(tmp_path: Path) -> None:
    done = _run(CYCLE, tmp_path)
    assert (done.returncode, done.stderr.count("ValueError: a bad sample")) == (1, 1), done.stderr
    assert [gzip.decompress((tmp_path / name).read_bytes()) for name in "01"] == [b"held", b"held"]


FINALIZERS = """
import atexit, sys
from hocket.dist.ranks.process_end import end_promptly_after_error

PREFIX = "finalized"

class Final:
    def __init__(self, name): self.name = name
    def __del__(self): print(PREFIX, self.name, len(sys.modules) > 0)

def fail():
    local = Final("local")
    raise ValueError("a bad sample")

end_promptly_after_error()
atexit.register(print, "at exit")
kept, held = Final("global"), [Final("in a list")]
held.append(held)
fail()
"""


def test_an_error_runs_the_finalizers_of_the_main_program_and_of_its_frames(tmp_path: Path) -> None:
    done = _run(FINALIZERS, tmp_path)
    # From Python 3.13 on, the traceback shows the lines of the script, which name the error too.
    assert (done.returncode, re.findall(r"^\w*Error", done.stderr, re.M)) == (1, ["ValueError"]), done.stderr
    first, *others = done.stdout.splitlines()
    assert first == "at exit"
    assert sorted(others) == [f"finalized {name} True" for name in ("global", "in a list", "local")]


PRINTED = """
import sys
from hocket.dist.ranks.process_end import end_promptly_after_error

class Final:
    def __del__(self): print("finalized")

end_promptly_after_error()
kept = Final()
try:
    raise ValueError("a bad sample")
except ValueError:
    sys.excepthook(*sys.exc_info())
"""


def test_an_error_that_is_only_printed_ends_nothing(tmp_path: Path) -> None:
    done = _run(PRINTED, tmp_path)
    assert (done.returncode, done.stdout) == (0, "finalized\n")
    assert done.stderr.count("ValueError: a bad sample") == 1


def _run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
