"""A rank that is late, gone, diverged or started differently is named by the others within the deadline."""

import json
import os
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import nn

from hocket.dist import PreflightError, provide
from support.ranks import run_ranks

TIMEOUT_S = 8.0


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def _notes(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def _hang(kind: str, folder: str) -> tuple[str, float] | None:
    """Keep rank 1 out of a collective; return the other ranks' error, and the seconds until it was raised."""
    done = Path(folder, "done")
    # Start together: the deadline is for collectives, and not for importing torch on a busy machine.
    Path(folder, f"started-{os.environ['RANK']}").touch()
    while len(list(Path(folder).glob("started-*"))) < 2:
        time.sleep(0.05)
    started = time.monotonic()
    try:
        with provide({}, device="cpu", timeout_s=TIMEOUT_S) as parallelism:
            rank = parallelism.data_parallel[0]
            module = parallelism.lay_out(_model())
            module(torch.ones(2, 4)).sum().backward()
            started = time.monotonic()
            if rank == 1 and kind.startswith("late"):
                deadline = time.monotonic() + 60
                while not done.exists() and time.monotonic() < deadline:
                    time.sleep(0.1)
                return None
            if kind == "late for a sum":
                parallelism.reduce_async(torch.ones(3)).wait()
            elif kind == "late for gradients":
                module(torch.ones(2, 4)).sum().backward()
            elif kind == "another branch":
                if rank == 1:
                    torch.distributed.barrier()
                else:
                    module(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        return _notes(error), time.monotonic() - started
    finally:
        if kind.startswith("late") and int(os.environ["RANK"]) == 0:
            done.touch()
    return None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["late for gradients", "late for a sum", "another branch"])
def test_late_and_diverged_ranks_are_named_within_the_deadline(kind: str, tmp_path: Path) -> None:
    results = run_ranks(_hang, 2, kind, str(tmp_path), timeout_s=90)
    if kind == "another branch":
        messages = [result[0] for result in results if result is not None]
        assert any("the ranks are in different collectives" in message for message in messages), messages
        return
    first, second = results
    assert second is None
    assert first is not None
    message, seconds = first
    assert "late: rank 1 did not answer" in message
    assert "rank 0: gloo:" in message, "the flight recorder's last collective is missing"
    assert seconds < TIMEOUT_S + 45  # torch's own deadline is half an hour


def _start_differently(kind: str, folder: str) -> str:
    rank = int(os.environ["RANK"])
    if kind == "script":
        script = Path(folder, f"train{rank}.py")
        script.write_text(f"# rank {rank}\n")
        sys.argv = [str(script)]
    elif kind == "version":
        installed = Path(folder, f"site-{rank}", "hocket_dist-9.9.dist-info")
        if rank == 1:
            installed.mkdir(parents=True)
            (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: hocket-dist\nVersion: 9.9\n")
            sys.path.insert(0, str(installed.parent))
    else:
        os.environ["HOCKET_PREFLIGHT_PATHS"] = json.dumps(
            [folder, "s3://bucket/data", f"{folder}/only-{rank}"]
        )
        Path(folder, "only-0").touch()
    with pytest.raises(PreflightError) as caught:
        provide({}, device="cpu", timeout_s=30)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["script", "version", "data"])
def test_ranks_that_were_started_differently_are_refused_alike(kind: str, tmp_path: Path) -> None:
    first, second = run_ranks(_start_differently, 2, kind, str(tmp_path), timeout_s=60)
    assert first == second
    assert "rank 1 on" in first
    if kind == "script":
        assert "runs the script `train1.py" in first
    elif kind == "version":
        assert f"has hocket-dist 9.9, rank 0 has {version('hocket-dist')}" in first
    else:
        assert f"does not see {tmp_path}/only-1" in first
        assert "s3://" not in first


def _run_out_of_memory() -> str:
    try:
        with provide({"sharding_strategy": "SHARD_GRAD_OP"}, device="cpu", timeout_s=30) as parallelism:
            parallelism.lay_out(_model())
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    except torch.OutOfMemoryError as error:
        return _notes(error)


def test_an_out_of_memory_error_lists_the_remedies_in_order(one_rank: None) -> None:
    """The test raises torch's own error, because a CPU has no memory limit."""
    message = _run_out_of_memory()
    levers = [
        line.strip() for line in message.splitlines() if line.strip()[:2] in ("1.", "2.", "3.", "4.", "5.")
    ]
    for lever, words in zip(
        levers,
        (
            "device_train_microbatch_size",
            "FULL_SHARD",
            "activation_checkpointing",
            "`cpu_offload",
            "activation_cpu",
        ),
        strict=True,
    ):
        assert words in lever
        assert "saves about" in lever


HOLDER = "import sys; held = bytearray(b'x' * 2**29); print('holds', flush=True); sys.stdin.read()"


def test_an_out_of_memory_error_names_other_processes_on_the_device(one_rank: None) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "holds\n"
            message = _run_out_of_memory()
        finally:
            holder.kill()
    (line,) = (line for line in message.splitlines() if line.startswith("Other processes that hold memory"))
    found = re.findall(r"\(pid (\d+)\) ([\d.]+) (KiB|MiB|GiB)", line)
    sizes = {
        int(pid): float(size) * {"KiB": 2**-10, "MiB": 1, "GiB": 2**10}[unit] for pid, size, unit in found
    }
    assert os.getpid() not in sizes
    # The five largest processes are named: `holder` is among them, or all five are larger.
    assert 512 <= sizes.get(holder.pid, 512) < 600
    assert holder.pid in sizes or (len(sizes) == 5 and min(sizes.values()) >= 512), line
