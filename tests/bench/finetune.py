"""The effects of LoRA, QLoRA, quantization-aware training and float8 on a fine-tuning.

A small GPT is trained once on the source of Python's library, then fine-tuned on the text of Python's
reference manual (`pydoc_data.topics`): all weights plainly, and with each method. The table has, for each
setting, the held-out loss over seeds, the trained parameters, the bytes of weights and of optimizer state,
and the processor time of a step. Two settings quantize the weights to 4 bits at the end, before the loss is
measured: with quantization-aware training (`QAT`) and without (`quantized after`). Float8 is emulated, with
the rounding of the real kernels but not their speed. LoRA and QLoRA have five times the learning rate of the
others. Run it with `uv run python tests/bench/finetune.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hocket import algos
from hocket.recipes.gpt import GPT, GPTConfig
from hocket.recipes.language import windows
from hocket.trainer import Callback, Trainer
from hocket.trainer.optim import CosineAnnealingWithWarmupScheduler

LENGTH, BATCH = 64, 16
CONFIG = GPTConfig(context=LENGTH, width=128, num_layers=3, num_heads=4)
RATE = 5e-4
SCHEME: dict[str, Any] = {"scheme": "int4", "group_size": 128}

# The methods of each setting, and the factor of the learning rate.
SETTINGS: dict[str, tuple[Callable[[], list[Any]], float]] = {
    "all weights": (list, 1),
    "LoRA": (lambda: [algos.LoRA(8)], 5),
    "QLoRA": (lambda: [algos.QLoRA(8)], 5),
    "QAT": (lambda: [algos.QAT(**SCHEME)], 1),
    "Float8 (tensorwise)": (lambda: [algos.Float8("tensorwise", emulate=True)], 1),
    "Float8 (rowwise)": (lambda: [algos.Float8("rowwise", emulate=True)], 1),
}


class Clock(Callback):
    """Records the processor time at the start of each batch."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def batch_start(self, state: Any, logger: Any) -> None:
        """Record the time."""
        self.starts.append(time.thread_time())


def manual() -> tuple[Tensor, Tensor]:
    """Return windows of the manual's text for training and evaluation, `(N, LENGTH + 1) uint8`."""
    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
    all_windows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    is_held_out = torch.arange(len(all_windows)) % 10 == 0
    return all_windows[~is_held_out], all_windows[is_held_out][:512]


def loss_of(model: nn.Module, held_out: Tensor) -> float:
    """Return the held-out loss in nats a byte."""
    model.eval()
    with torch.no_grad():
        total = [
            model.loss(model(batch), batch) for batch in ({"tokens": rows} for rows in held_out.split(128))
        ]  # type: ignore[operator]
    model.train()
    return float(torch.stack(total).mean())


def fit(
    model: nn.Module, train: Tensor, steps: int, rate: float, seed: int, methods: list[Any]
) -> dict[str, float]:
    """Train, and return the model, its sizes, and the median processor time of a step."""
    torch.manual_seed(seed)
    loader = DataLoader(
        train,  # type: ignore[arg-type]
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        collate_fn=lambda rows: {"tokens": torch.stack(rows)},
    )
    optimizer, clock = torch.optim.AdamW(model.parameters(), lr=rate), Clock()
    with (
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
        Trainer(
            model=model,
            train_dataloader=loader,
            optimizers=optimizer,
            schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="0.1dur", alpha_f=0.1),
            algorithms=methods,
            callbacks=[clock],
            max_duration=f"{steps}ba",
            device="cpu",
            seed=seed,
            progress_bar=False,
        ) as trainer,
    ):
        trainer.fit()
    state = [
        value for slots in optimizer.state.values() for value in slots.values() if isinstance(value, Tensor)
    ]
    taken = [after - before for before, after in itertools.pairwise(clock.starts)]
    return {
        "trained": sum(one.numel() for one in model.parameters() if one.requires_grad),
        "weights": _bytes([*model.parameters(), *model.buffers()]),
        "state": _bytes(state),
        "ms": 1e3 * statistics.median(taken[2:]),
    }


def _bytes(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def measure(steps: int, first_steps: int, seeds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each seed and setting."""
    torch.manual_seed(0)
    base, (train, held_out) = GPT(CONFIG), manual()
    fit(base, windows(LENGTH + 1)[0], first_steps, 3e-3, 0, [algos.GradientClipping("norm", 1.0)])
    before = loss_of(base, held_out)
    for seed, (name, (make, factor)) in itertools.product(range(seeds), SETTINGS.items()):
        model = copy.deepcopy(base)
        row = fit(model, train, steps, factor * RATE, seed, make())
        if name == "QAT":
            algos.convert_qat(model, **SCHEME)
        yield {"setting": name, "seed": seed, "before": before, "loss": loss_of(model, held_out), **row}
        if name == "all weights":
            algos.apply_qat(model, **SCHEME)
            algos.convert_qat(model, **SCHEME)
            yield {
                "setting": "quantized after",
                "seed": seed,
                "before": before,
                **row,
                "loss": loss_of(model, held_out),
            }


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table in Markdown: medians, and ranges over seeds."""
    print(f"held-out loss before: {rows[0]['before']:.4f} nats a byte\n")
    print("| setting | loss after | trained | weights, KiB | optimizer state, KiB | CPU ms a step |")
    print("|---|---|---|---|---|---|")
    for name in dict.fromkeys(row["setting"] for row in rows):
        seed_rows = [row for row in rows if row["setting"] == name]
        losses, times = [row["loss"] for row in seed_rows], [row["ms"] for row in seed_rows]
        cells = [
            f"{statistics.median(losses):.4f} ({min(losses):.4f}–{max(losses):.4f})",
            f"{seed_rows[0]['trained']:,}",
            f"{seed_rows[0]['weights'] / 1024:.0f}",
            f"{seed_rows[0]['state'] / 1024:.0f}",
            f"{statistics.median(times):.1f} ({min(times):.1f}–{max(times):.1f})",
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of fine-tuning")
    parser.add_argument("--first-steps", type=int, default=400, help="of the training before it")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for row in measure(options.steps, options.first_steps, options.seeds):
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    show(rows)


if __name__ == "__main__":
    main()
