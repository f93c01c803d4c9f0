"""The cells of `tests/bench/trainer.py`: the same small model trained by a bare loop, Hocket and its peers.

A process serves one cell: `python trainer.py NAME` makes a round for each line of its standard input.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS = 400


class Net(nn.Module):
    """A multi-layer perceptron of 64 inputs, wide enough that a bare step takes some 300 µs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)
        )

    def forward(self, batch: Any) -> torch.Tensor:
        """Return logits, `(B, 8)` float."""
        return self.layers(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        """Return the mean cross entropy."""
        return nn.functional.cross_entropy(outputs, batch[1])


class Batches(torch.utils.data.IterableDataset):
    """Yields the same batches, and records the time from the first batch to the end of the iterator."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batches = [
            [torch.randn(16, 64, generator=generator), torch.randint(0, 8, (16,), generator=generator)]
            for _ in range(STEPS)
        ]
        self.seconds = 0.0
        self.wall_s = 0.0
        self.aside_s = 0.0
        """Processor seconds of all threads but the training thread when the iterator ended."""

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        start, start_wall = time.process_time(), time.perf_counter()
        try:
            yield from self.batches
        finally:  # Lightning counts the batches and does not exhaust the iterator
            self.seconds, self.wall_s = time.process_time() - start, time.perf_counter() - start_wall
            self.aside_s = aside_s()


def aside_s() -> float:
    """Return the processor time of the process's other threads."""
    return time.process_time() - time.thread_time()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer, the same in every cell."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


def bare(data: Batches) -> Callable[[], object]:
    """Return a plain loop without a trainer."""
    model = Net()
    optimizer = sgd(model)

    def run() -> None:
        for batch in data:
            loss = model.loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def duties(data: Batches) -> Callable[[], object]:
    """Return a loop written by hand with the duties of Hocket's step that every run has, and no option.

    The loop fetches ahead, compares the rows of inputs and labels, reads the clock, keeps the 14 counts of a
    timestamp, checks the loss for NaN before the update, and checks for the end of training and for a stop.
    Its time is the least that these duties take in Python on a machine.
    """
    model = Net()
    optimizer = sgd(model)
    signal: dict[str, Any] = {"stop": None, "counts": (0,) * 14, "loss": None}

    def run() -> None:
        batches = iter(data)
        batch, clock_s, end = next(batches), time.perf_counter(), signal["counts"][2] + STEPS
        rows = batch[0].shape[0]
        while batch is not None and signal["stop"] is None:
            loss = model.loss(model(batch), batch)
            loss.backward()
            loss = loss.detach()
            now_s = time.perf_counter()
            counts, seconds = signal["counts"], now_s - clock_s
            clock_s = now_s
            counts = (
                counts[0], counts[1], counts[2] + 1, counts[3] + rows, counts[4], counts[5], counts[6],
                counts[7] + 1, counts[8] + rows, counts[9], counts[10] + seconds, counts[11] + seconds,
                counts[12] + seconds, seconds,
            )  # fmt: skip
            batch = next(batches, None) if counts[2] < end else None
            if batch is not None:
                rows = batch[0].shape[0]
                if rows != batch[1].shape[0] or not rows:
                    raise ValueError("inputs and labels have other numbers of rows")
            value = loss.tolist()
            if value - value != 0.0:
                raise ValueError("the loss is not finite")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            signal["loss"], signal["counts"] = loss, counts

    return run


def hocket(data: Batches, **arguments: Any) -> Callable[[], object]:
    """Return a run of Hocket's trainer with no optional feature in use."""
    from hocket.trainer import Trainer

    model = Net()
    arguments.setdefault("progress_bar", False)
    trainer = Trainer(model=model, train_dataloader=data, optimizers=sgd(model), device="cpu", **arguments)

    def run() -> None:
        trainer.fit("1ep")
        # Entries that the log's thread writes after the last step belong to the steps, too.
        data.seconds += aside_s() - data.aside_s

    return run


def hocket_in_use(data: Batches) -> Callable[[], object]:
    """Return a run of Hocket's trainer with a progress bar, two logged values and five callbacks."""
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
    """Return a loop with Lightning Fabric, converted as in its documentation."""
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
    """Return a loop with Hugging Face Accelerate, converted as in its documentation."""
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
    """Return a run of Lightning's Trainer without logger, checkpoints and progress bar."""
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
    """Return a run of Hugging Face's Trainer without logs, checkpoints and progress bar."""
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


def ddp(data: Batches, *, agreement: str | None = None) -> Callable[[], object]:
    """Return a loop with torch's `DistributedDataParallel`, on several ranks.

    Args:
        data: The batches.
        agreement: How the ranks also sum eight numbers a step, the least that ranks with unequal data must
            communicate: `"overlapped"` starts the sum after the backward pass, on a group of its own, as
            Hocket does, and waits for it at the start of the next step; `"shared"` does so on the gradients'
            group; `"gathered"` gathers the numbers instead; `"waited"` waits for the sum at once. None for no
            communication.
    """
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    model = Net()
    module = nn.parallel.DistributedDataParallel(model)
    optimizer = sgd(model)
    group = None if agreement in (None, "shared") else torch.distributed.new_group(backend="gloo")

    def begin() -> Any:
        numbers = torch.ones(8, dtype=torch.float64)
        if agreement == "gathered":
            gathered = [torch.empty_like(numbers) for _ in range(torch.distributed.get_world_size())]
            return torch.distributed.all_gather(gathered, numbers, group=group, async_op=True)
        return torch.distributed.all_reduce(numbers, group=group, async_op=True)

    def run() -> None:
        work: Any = None
        for batch in data:
            if work is not None:
                work.wait()
            loss = model.loss(module(batch), batch)
            loss.backward()
            if agreement is not None:
                work = begin()
                if agreement == "waited":
                    work.wait()
                    work = None
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def hocket_ranks(data: Batches) -> Callable[[], object]:
    """Return a run of Hocket's trainer on several ranks, with no optional feature in use."""
    return hocket(data, loop={"auto_shard": False})


def composer(data: Batches) -> Callable[[], object]:
    """Return a run of MosaicML Composer's Trainer."""
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
    data.batch_size = 16  # Composer reads the batch size from its loader
    trainer = Trainer(
        model=model, train_dataloader=data, optimizers=sgd(model), device="cpu", progress_bar=False
    )
    return lambda: trainer.fit(duration="1ep")


CELLS: dict[str, Callable[[Batches], Callable[[], object]]] = {
    "bare": bare,
    "duties": duties,
    "hocket": hocket,
    "hocket-in-use": hocket_in_use,
    "fabric": fabric,
    "accelerate": accelerate,
    "lightning": lightning,
    "hf-trainer": hf_trainer,
    "composer": composer,
    "composer-bare": bare,
    "ddp": ddp,
    "ddp-waited": partial(ddp, agreement="waited"),
    "ddp-agreed": partial(ddp, agreement="overlapped"),
    "ddp-shared": partial(ddp, agreement="shared"),
    "ddp-gathered": partial(ddp, agreement="gathered"),
    "hocket-ranks": hocket_ranks,
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
            figures = {"seconds": data.seconds / STEPS, "wall_s": data.wall_s / STEPS}
            print(json.dumps(figures), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
