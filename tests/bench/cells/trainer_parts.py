"""Processor time of each part of a step in use, on all threads: `tests/bench/trainer.py --parts`.

The variants alternate in one process; each adds one part to the previous one. A figure is the processor time
of a whole `fit` of one epoch, so that it includes what the log queue's thread writes after the last step. The
time of the training thread is measured separately; the rest is that of the other threads.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cells.trainer import STEPS, Batches, bare, hocket


def _variants() -> dict[str, Callable[[], object]]:
    from hocket.trainer import Callback
    from hocket.trainer.callbacks import LRMonitor
    from hocket.trainer.loggers import FileLogger

    class Count(Callback):
        def __init__(self) -> None:
            self.batches = 0

        def batch_end(self, state: Any, logger: Any) -> None:
            self.batches += 1

    def file() -> FileLogger:
        return FileLogger(str(Path(tempfile.mkdtemp()) / "log.jsonl"))

    def counts() -> list[Callback]:
        return [Count() for _ in range(4)]

    return {
        "bare": bare(Batches()),
        "nothing in use": hocket(Batches()),
        "four callbacks": hocket(Batches(), callbacks=counts()),
        "progress bar": hocket(Batches(), progress_bar=True),
        "the loss to a file": hocket(Batches(), loggers=file()),
        "file, bar": hocket(Batches(), loggers=file(), progress_bar=True),
        "file, bar, `LRMonitor`": hocket(
            Batches(), loggers=file(), progress_bar=True, callbacks=[LRMonitor()]
        ),
        "file, bar, `LRMonitor`, four callbacks": hocket(
            Batches(), loggers=file(), progress_bar=True, callbacks=[LRMonitor(), *counts()]
        ),
    }


def main(rounds: int) -> None:
    """Print the time of each variant beyond the one with nothing in use."""
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        variants = _variants()
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
        for number in range(rounds + 1):
            for name, run in variants.items():
                thread_s, process_s = time.thread_time(), time.process_time()
                run()
                thread_s, process_s = time.thread_time() - thread_s, time.process_time() - process_s
                if number:  # the first round warms up
                    spent[name].append((thread_s * 1e6 / STEPS, (process_s - thread_s) * 1e6 / STEPS))
    base = spent["nothing in use"]
    print("| in use | training thread, µs a step over nothing in use | quartiles | other threads | both |")
    print("|---|---|---|---|---|")
    for name, figures in spent.items():
        over = [thread_us - base_us for (thread_us, _), (base_us, _) in zip(figures, base, strict=True)]
        others = [other for _, other in figures]
        low, _, high = statistics.quantiles(over)
        training, aside = statistics.median(over), statistics.median(others)
        print(f"| {name} | {training:.1f} | {low:.1f} – {high:.1f} | {aside:.1f} | {training + aside:.1f} |")
