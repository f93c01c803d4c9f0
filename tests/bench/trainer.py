"""What a step of a trainer costs beyond the user's own work: Hocket and its peers beside a bare loop.

Every cell is a process of its own that trains the same small model on the CPU over the same batches in a
list. The cells take turns, round after round, so that a change of the machine's speed meets all of them. The
figure is processor time a step, from the first batch to the last, and its excess over the bare loop of the
same round.

    uv run python tests/bench/trainer.py

A peer that is not installed is left out and named; `uv pip install lightning accelerate` adds three.
Composer 0.32 needs an older torch, so it runs in an environment of its own: name its interpreter with
`--composer PYTHON`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS = 400
TIMEOUT_S = 180.0
"""For a cell to start, or to make a round; a cell that takes longer is ended and named."""


class Net(nn.Module):
    """A multi-layer perceptron of 64 inputs, wide enough that a bare step takes some 300 µs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)
        )

    def forward(self, batch: Any) -> torch.Tensor:
        """Logits, `(B, 8)` float."""
        return self.layers(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        """The mean cross entropy."""
        return nn.functional.cross_entropy(outputs, batch[1])


class Batches(torch.utils.data.IterableDataset):
    """Yields the same batches, and notes the processor time from the first until the iterator is given up."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batches = [
            [torch.randn(16, 64, generator=generator), torch.randint(0, 8, (16,), generator=generator)]
            for _ in range(STEPS)
        ]
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        start = time.process_time()
        try:
            yield from self.batches
        finally:  # Lightning counts the batches and never asks for the end
            self.seconds = time.process_time() - start


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every cell."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


def bare(data: Batches) -> Callable[[], object]:
    """A loop as one writes it without a trainer."""
    model = Net()
    optimizer = sgd(model)

    def run() -> None:
        for batch in data:
            loss = model.loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def hocket(data: Batches, **arguments: Any) -> Callable[[], object]:
    """Hocket's trainer, every feature available and none in use."""
    from hocket.trainer import Trainer

    model = Net()
    arguments.setdefault("progress_bar", False)
    trainer = Trainer(model=model, train_dataloader=data, optimizers=sgd(model), device="cpu", **arguments)
    return lambda: trainer.fit("1ep")


def hocket_in_use(data: Batches) -> Callable[[], object]:
    """Hocket's trainer with a progress bar, loss and learning rate to a file, and five callbacks."""
    from hocket.trainer import Callback
    from hocket.trainer.callbacks import LRMonitor
    from hocket.trainer.loggers import FileLogger

    class Count(Callback):
        def __init__(self) -> None:
            self.batches = 0

        def batch_end(self, state: Any, logger: Any) -> None:
            self.batches += 1

    file = FileLogger(str(Path(tempfile.mkdtemp()) / "log.jsonl"))
    callbacks = [LRMonitor(), *(Count() for _ in range(4))]
    return hocket(data, progress_bar=True, loggers=file, callbacks=callbacks)


def fabric(data: Batches) -> Callable[[], object]:
    """Lightning Fabric, as its documentation converts a loop."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = Net()
    module, optimizer = fabric.setup(model, sgd(model))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=None))

    def run() -> None:
        for batch in loader:
            loss = model.loss(module(batch), batch)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def accelerate(data: Batches) -> Callable[[], object]:
    """Hugging Face Accelerate, as its documentation converts a loop."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Net()
    module, optimizer, loader = accelerator.prepare(
        model, sgd(model), torch.utils.data.DataLoader(data, batch_size=None)
    )

    def run() -> None:
        for batch in loader:
            with accelerator.accumulate(module):
                loss = model.loss(module(batch), batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    return run


def lightning(data: Batches) -> Callable[[], object]:
    """Lightning's Trainer, without logger, checkpoints and progress bar."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net.loss(self.net(batch), batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    module = Module()
    loader = torch.utils.data.DataLoader(data, batch_size=None)

    def run() -> None:
        L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, loader)

    return run


def hf_trainer(data: Batches) -> Callable[[], object]:
    """Hugging Face's Trainer, without logs, checkpoints and progress bar."""
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net.loss(self.net([x]), [x, labels])}

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return [{"x": x, "labels": labels} for x, labels in data.batches]

    model = Model()
    optimizer = sgd(model)

    def run() -> None:
        arguments = TrainingArguments(
            output_dir=tempfile.gettempdir(),
            max_steps=STEPS,
            use_cpu=True,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Own(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None))
        start = time.process_time()
        trainer.train()
        data.seconds = time.process_time() - start

    return run


def composer(data: Batches) -> Callable[[], object]:
    """MosaicML Composer's Trainer."""
    from composer import Trainer
    from composer.models import ComposerModel

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, batch: Any) -> torch.Tensor:
            return self.net(batch)

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return self.net.loss(outputs, batch)

    model = Model()
    trainer = Trainer(
        model=model, train_dataloader=data, optimizers=sgd(model), device="cpu", progress_bar=False
    )
    return lambda: trainer.fit(duration="1ep")


CELLS: dict[str, Callable[[Batches], Callable[[], object]]] = {
    "bare": bare,
    "hocket": hocket,
    "hocket-in-use": hocket_in_use,
    "fabric": fabric,
    "accelerate": accelerate,
    "lightning": lightning,
    "hf-trainer": hf_trainer,
    "composer": composer,
}


def serve(name: str) -> None:
    """Run one round of a cell for each line of the standard input, and print its seconds a step."""
    torch.set_num_threads(1)
    answers = sys.stdout
    data = Batches()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            run = CELLS[name](data)
        except ImportError as error:
            print(json.dumps({"missing": str(error)}), file=answers, flush=True)
            return
        print(json.dumps({"ready": name}), file=answers, flush=True)
        for _ in sys.stdin:
            run()
            print(json.dumps({"seconds": data.seconds / STEPS}), file=answers, flush=True)


def _read(process: subprocess.Popen[str]) -> str:
    """Return a cell's next line; nothing if it ends, or takes longer than `TIMEOUT_S`, which ends it."""
    assert process.stdout is not None
    timer = threading.Timer(TIMEOUT_S, process.kill)
    timer.start()
    try:
        return process.stdout.readline()
    finally:
        timer.cancel()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cell", choices=CELLS, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--cells",
        default="bare,hocket,hocket-in-use,fabric,accelerate,lightning,hf-trainer",
        help=f"of {list(CELLS)}",
    )
    parser.add_argument("--composer", help="a Python interpreter with mosaicml 0.32")
    options = parser.parse_args()
    if options.cell:
        serve(options.cell)
        return
    cells: dict[str, subprocess.Popen[str]] = {}
    for name in options.cells.split(","):
        python = options.composer if name == "composer" else sys.executable
        if python is None:
            print("composer: not measured; name its interpreter with `--composer`")
            continue
        process = subprocess.Popen(
            [python, __file__, "--cell", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        answer = json.loads(_read(process) or '{"missing": "the process ended, or did not answer"}')
        if "missing" in answer:
            print(f"{name}: not measured ({answer['missing']})")
            process.wait()
        else:
            cells[name] = process
    figures: dict[str, list[float]] = {name: [] for name in cells}
    silent: list[str] = []
    for number in range(options.rounds + 1):
        for name, process in cells.items():
            assert process.stdin is not None
            process.stdin.write("run\n")
            process.stdin.flush()
            if not (answer := _read(process)):
                print(f"{name}: left out from round {number} on (it ended, or did not answer)")
                silent.append(name)
                continue
            if number:  # the first round warms up
                figures[name].append(json.loads(answer)["seconds"] * 1e6)
        for name in silent:
            cells.pop(name).kill()
            figures.pop(name)
        silent.clear()
    for process in cells.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    base = figures["bare"]
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"torch {torch.__version__}, {options.rounds} rounds of {STEPS} steps; load {load}")
    print("| cell | µs of processor a step, median | over bare, median | least | quartiles |")
    print("|---|---|---|---|---|")
    for name, values in figures.items():
        over = [value - alone for value, alone in zip(values, base, strict=True)]
        low, _, high = statistics.quantiles(over)
        print(
            f"| {name} | {statistics.median(values):.1f} | {statistics.median(over):.1f} | {min(over):.1f} "
            f"| {low:.1f} – {high:.1f} |"
        )


if __name__ == "__main__":
    main()
