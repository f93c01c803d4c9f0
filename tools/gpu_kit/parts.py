"""The parts of the GPU kit: `python parts.py NAME` runs one and prints its figures as a line of JSON.

With `--device cpu` a part runs the same code on the CPU at a small size, which shows that the part itself
works. A part that cannot run here ends with 77 after a line that says what is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SKIPPED = 77
OWN = ("", "hocket", "rates", "support", "torch")
"""What must be there: if a module of these is missing, the part has failed."""
Figures = dict[str, Any]
PARTS: dict[str, Callable[[str], Figures]] = {}


class SkippedError(Exception):
    """Something that the part needs is missing."""


def part(function: Callable[[str], Figures]) -> Callable[[str], Figures]:
    """Add a function to the parts, under its name."""
    PARTS[function.__name__] = function
    return function


def need_cuda(device: str) -> None:
    """Skip a part that has no meaning without CUDA."""
    if device == "cpu":
        raise SkippedError("needs a CUDA device")


def need_library(name: str) -> None:
    """Skip a part if a library is not installed."""
    if importlib.util.find_spec(name) is None:
        raise SkippedError(f"needs `{name}`, which is not installed")


def run_command(command: list[str], timeout_s: float, cwd: Path | None = None) -> str:
    """Run a command and return its output.

    Raises:
        AssertionError: It failed, or was not done in time; the message has the end of its output.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        try:
            done = subprocess.run(
                command, cwd=cwd, stdout=out, stderr=subprocess.STDOUT, timeout=timeout_s, check=False
            )
            why = "" if done.returncode == 0 else f"ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            why = f"was not done after {timeout_s:.0f} s"
        out.seek(0)
        said = out.read()
    assert not why, f"{command[1:4]} {why}\n{said[-6000:]}"
    return said


def train(device: str, *, steps: int = 6, **options: Any) -> list[float]:
    """Train a small GPT on fixed batches; return the losses."""
    import torch
    from torch.utils.data import DataLoader

    from hocket.recipes.gpt import GPT, GPTConfig
    from hocket.trainer import Trainer
    from hocket.trainer.loggers import InMemoryLogger

    torch.manual_seed(1)
    model = options.pop("model", None) or GPT(GPTConfig(context=64, width=128, num_layers=2, num_heads=4))
    rows = [{"tokens": torch.randint(0, 256, (65,), dtype=torch.uint8)} for _ in range(8 * steps)]
    memory = InMemoryLogger()
    with Trainer(
        model=model,
        train_dataloader=DataLoader(rows, batch_size=8),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        max_duration=f"{steps}ba",
        loggers=memory,
        progress_bar=False,
        seed=1,
        device="cpu" if device == "cpu" else "gpu",
        **options,
    ) as trainer:
        trainer.fit()
    losses = [float(value) for _, value in memory.data["loss/train/total"]]
    assert all(0 < loss < 10 for loss in losses), f"the losses are not those of a model that learns: {losses}"
    return losses


def compare(losses: list[float], plain: list[float], tolerance: float) -> Figures:
    """Return the losses of two runs and their largest difference, which must not exceed the tolerance."""
    difference = max(abs(one - other) for one, other in zip(losses, plain, strict=True))
    assert difference <= tolerance, f"the losses differ by {difference}: {losses} and {plain}"
    return {"losses": losses, "largest_difference": difference}


@part
def imports(_device: str) -> Figures:
    """Import every package, and write and read through the extension."""
    import hocket.algos
    import hocket.ckpt.torch
    import hocket.compat
    import hocket.dist
    import hocket.native
    import hocket.recipes
    import hocket.stream.torch
    import hocket.trainer

    store = hocket.native.Store("memory://kit")
    store.put("key", b"value")
    assert store.get("key") == b"value"
    return {"trainer": hocket.trainer.__name__}


@part
def environment(_device: str) -> Figures:
    """Describe the machine, as `hocket env` does."""
    from hocket.recipes.environment import describe

    return describe()


@part
def one_step(device: str) -> Figures:
    """Train in fp32, and compare with the CPU."""
    return compare(train(device, precision="fp32"), train("cpu", precision="fp32"), 2e-3)


@part
def bf16(device: str) -> Figures:
    """Train in bf16, and compare with fp32."""
    return compare(train(device, precision="amp_bf16"), train(device, precision="fp32"), 0.05)


@part
def fp16(device: str) -> Figures:
    """Train in fp16 with a scaled loss, and compare with fp32."""
    need_cuda(device)
    return compare(train(device, precision="amp_fp16"), train(device, precision="fp32"), 0.05)


@part
def nccl(device: str) -> Figures:
    """Shard over one rank, which starts NCCL, save, and resume."""
    command = [sys.executable, "-m", "hocket.dist", "-n", "1", __file__, "sharded_rank", "--device", device]
    # Less than the part's own limit, so that the output of a rank that hangs is shown.
    said = run_command(command, 65)
    figures: Figures = json.loads(next(line for line in reversed(said.splitlines()) if line[:1] == "{"))
    return figures


def sharded_rank(device: str) -> Figures:
    """Run the rank that `nccl` starts."""
    from torch import distributed

    from hocket.trainer import Callback

    backends = []

    class Backend(Callback):
        """Notes the backend."""

        def fit_start(self, state: Any, logger: Any) -> None:
            backends.append(distributed.get_backend() if distributed.is_initialized() else "none")

    with tempfile.TemporaryDirectory() as folder:
        given = {"fsdp_config": {}, "save_folder": folder, "save_interval": "3ba", "precision": "fp32"}
        losses = train(device, callbacks=Backend(), **given)
        # The second half again, from the checkpoint in the middle.
        resumed = train(device, load_path=f"{folder}/ep0-ba3", fsdp_config={}, precision="fp32")
        compare(resumed, losses[-len(resumed) :], 1e-4)
        committed = len(list(Path(folder).rglob("checkpoint.json.zst")))
    assert committed >= 2, "expected two checkpoints"
    assert device == "cpu" or "nccl" in backends[0], backends
    return {"backend": backends[0], "losses": losses, "checkpoints": committed}


@part
def staging(device: str) -> Figures:
    """Save asynchronously through pinned memory while the state changes, load, and compare every bit."""
    import torch

    from hocket.ckpt.torch import CheckpointStore

    state = {"weights": torch.randn(64, 1024, 256 if device == "cpu" else 4096, device=device)}
    before = {name: value.clone() for name, value in state.items()}
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(folder)
        stalls = []
        for step in range(3):
            start = time.perf_counter()
            handle = store.save(state, step=step, mode="async")
            stalls.append(time.perf_counter() - start)
            for value in state.values():
                value.add_(1)
            handle.wait()
        for value in state.values():
            value.zero_()
        store.load("step-1", state)
        store.close()
        for name, value in state.items():
            torch.testing.assert_close(value, before[name] + 1, rtol=0, atol=0)
    num_bytes = sum(value.nbytes for value in state.values())
    return {"bytes": num_bytes, "stall_s": stalls}


@part
def fp8(device: str) -> Figures:
    """Train with torchao's float8 layers, and compare with bf16."""
    need_cuda(device)
    need_library("torchao")
    import torch

    from hocket.algos import Float8

    if torch.cuda.get_device_capability() < (8, 9):
        raise SkippedError("needs a GPU with float8")
    plain = train(device, precision="amp_bf16")
    return compare(train(device, precision="amp_bf16", algorithms=[Float8()]), plain, 0.3)


@part
def fp8_transformer_engine(device: str) -> Figures:
    """Train with `precision="amp_fp8"`."""
    need_cuda(device)
    need_library("transformer_engine")
    return {"losses": train(device, precision="amp_fp8")}


@part
def compiled(device: str) -> Figures:
    """Train a compiled model, and compare with the plain one."""
    # A rehearsal traces the model and its gradients, and leaves the compilation by a C compiler out.
    backend = "inductor" if device != "cpu" else "aot_eager"
    if backend == "inductor" and shutil.which("gcc") is None and shutil.which("cc") is None:
        raise SkippedError("needs a C compiler")
    start = time.perf_counter()
    losses = train(device, precision="fp32", compile_config={"backend": backend})
    seconds = time.perf_counter() - start
    figures = {"seconds": seconds, "backend": backend}
    return figures | compare(losses, train(device, precision="fp32"), 5e-3)


@part
def cuda_graphs(device: str) -> Figures:
    """Train by CUDA graphs in both ways, compare with the plain step, and measure a step of each."""
    need_cuda(device)
    from rates import StepClock

    from hocket.trainer.step.graphed_step import CudaGraphStep

    ways = {
        "plain": {},
        "compiled": {"compile_config": {}},
        "reduce_overhead": {"compile_config": {"mode": "reduce-overhead"}},
        "graphed_step": {"train_step": CudaGraphStep},
    }
    figures: Figures = {}
    losses: dict[str, list[float]] = {}
    for name, options in ways.items():
        clock = StepClock(skip=20)
        try:
            losses[name] = train(device, steps=80, precision="fp32", callbacks=clock, **options)
            figures[f"{name}_ms"] = 1000 * clock.seconds_per_step()
            figures[f"{name}_difference"] = compare(losses[name], losses["plain"], 5e-2)["largest_difference"]
        except Exception as error:  # noqa: BLE001 - the other ways are still measured
            figures[f"{name}_error"] = f"{type(error).__name__}: {error}"[:400]
    assert not any(name.endswith("_error") for name in figures), figures
    return figures


@part
def qlora(device: str) -> Figures:
    """Train adapters beside weights in 4 bits."""
    need_cuda(device)
    need_library("bitsandbytes")
    need_library("peft")
    from hocket.algos import QLoRA

    return {"losses": train(device, steps=12, precision="amp_bf16", algorithms=[QLoRA(r=8)])}


@part
def loader(device: str) -> Figures:
    """Read a data set by workers while the device trains; compare with batches in memory."""
    import numpy as np
    import torch
    from rates import gpt, run_hocket
    from torch.utils.data import DataLoader

    from hocket.stream import MDSWriter, StreamingDataLoader, StreamingDataset

    length, steps, batch, skip = (1024, 200, 8, 40) if device != "cpu" else (64, 12, 4, 4)
    with tempfile.TemporaryDirectory() as folder:
        numbers = np.random.default_rng(1).integers(0, 256, (batch * 50, length + 1), np.uint8)
        with MDSWriter(columns={"tokens": f"ndarray:uint8:{length + 1}"}, out=folder) as writer:
            for row in numbers:
                writer.write({"tokens": row})
        rows = [{"tokens": torch.from_numpy(row)} for row in numbers]
        figures = {}
        for name in ("in_memory", "streamed"):
            dataset = StreamingDataset(local=folder, batch_size=batch, shuffle=True)
            made = (
                StreamingDataLoader(dataset, num_workers=2, pin_memory=True)
                if name == "streamed"
                else DataLoader(rows, batch_size=batch)
            )
            figures[f"{name}_s"] = 1 / run_hocket(gpt(device, "small"), made, device, steps, skip)
    figures["slowdown"] = figures["streamed_s"] / figures["in_memory_s"]
    return figures


@part
def save_stall(device: str) -> Figures:
    """Measure how long an asynchronous save of a model and its AdamW state stops the training."""
    import torch
    from rates import gpt

    from hocket.ckpt.torch import CheckpointStore

    model = gpt(device, "300M")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    num_bytes = sum(p.nbytes for p in model.parameters()) * 3
    if shutil.disk_usage(tempfile.gettempdir()).free < 3 * num_bytes:
        raise SkippedError(f"needs {3 * num_bytes / 1e9:.0f} GB in {tempfile.gettempdir()}")
    stalls, wholes = [], []
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(folder)
        for step in range(3):
            start = time.perf_counter()
            handle = store.save(state, step=step, mode="async")
            stalls.append(time.perf_counter() - start)
            handle.wait()
            wholes.append(time.perf_counter() - start)
            shutil.rmtree(next(Path(folder).iterdir()), ignore_errors=True)
        store.close()
    return {"gigabytes": num_bytes / 1e9, "stall_s": stalls, "whole_s": wholes}


@part
def mfu_300m(device: str) -> Figures:
    """Measure a GPT of 300M parameters against the same loop by hand."""
    from rates import utilisation

    return utilisation(device, "300M", 16 if device != "cpu" else 2)


@part
def mfu_1b(device: str) -> Figures:
    """Measure a GPT of 1B parameters against the same loop by hand."""
    if device != "cpu":
        import torch

        if torch.cuda.get_device_properties(0).total_memory < 38 * 2**30:
            raise SkippedError("needs a GPU with 40 GiB")
    from rates import utilisation

    return utilisation(device, "1B", 8 if device != "cpu" else 2)


@part
def gpu_tests(device: str) -> Figures:
    """Run the tests that are marked `gpu`."""
    need_cuda(device)
    for name in ("pytest", "pytest_timeout", "hypothesis", "numpy"):
        need_library(name)
    repository = Path(__file__).with_name("repository")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "packages"]
    return {"summary": run_command(command, 140, repository).strip().splitlines()[-1]}


def main() -> int:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[*PARTS, "sharded_rank"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    function = {**PARTS, "sharded_rank": sharded_rank}[arguments.name]
    try:
        if arguments.name != "environment":
            # Hocket's packages need it, and the kit may have no room for it.
            need_library("numpy")
        if arguments.device == "cpu":
            import torch

            # The models are tiny: on a busy machine a second thread only waits for the first.
            torch.set_num_threads(1)
        figures = function(arguments.device)
    except SkippedError as missing:
        print(missing)
        return SKIPPED
    except ModuleNotFoundError as error:
        library = (error.name or "").split(".")[0]
        if library in OWN or importlib.util.find_spec(library) is not None:
            raise
        print(f"needs `{library}`, which is not installed")
        return SKIPPED
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
