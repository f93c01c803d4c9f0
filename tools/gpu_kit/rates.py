"""Rates of training: Hocket's, and those of a plain loop beside it."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import DataLoader

from hocket.trainer import Callback, Trainer

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40": 181e12, "4090": 165e12}
"""Dense bf16 operations a second of a device, by a part of its name."""


class StepClock(Callback):
    """A clock of the steps after the first few, which does not wait for the device in between."""

    def __init__(self, *, skip: int) -> None:
        self.skip, self.start, self.end, self.steps = skip, 0.0, 0.0, 0

    def batch_end(self, state: Any, logger: Any) -> None:
        """Count a step; the clock starts after those that are left out."""
        self.steps += 1
        if self.steps == self.skip:
            self.start = self.now()

    def fit_end(self, state: Any, logger: Any) -> None:
        """Stop the clock."""
        self.end = self.now()

    def now(self) -> float:
        """Return the time at which the device has done all that it was given."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def seconds_per_step(self) -> float:
        """Return the mean time of a step."""
        return (self.end - self.start) / (self.steps - self.skip)


def gpt(device: str, size: str) -> Any:
    """Return a GPT on a device; on the CPU a small one, whatever the size."""
    from hocket.recipes.gpt import GPT, GPTConfig

    sizes = {"small": (1024, 512, 6), "300M": (1024, 1024, 24), "1B": (1024, 2048, 20)}
    context, width, num_layers = (64, 64, 2) if device == "cpu" else sizes[size]
    config = GPTConfig(context=context, width=width, num_layers=num_layers, num_heads=max(width // 128, 1))
    return GPT(config).to(device)


def run_hocket(model: Any, batches: Any, device: str, steps: int, skip: int, **options: Any) -> float:
    """Train by Hocket in bf16; return the steps a second after the first few."""
    clock = StepClock(skip=skip)
    with Trainer(
        model=model,
        train_dataloader=batches,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device != "cpu"),
        max_duration=f"{steps}ba",
        callbacks=clock,
        precision="amp_bf16",
        progress_bar=False,
        device="cpu" if device == "cpu" else "gpu",
        **options,
    ) as trainer:
        trainer.fit()
    return 1 / clock.seconds_per_step()


def run_by_hand(model: Any, batches: Any, device: str, steps: int, skip: int) -> float:
    """Train by a plain loop in bf16; return the steps a second after the first few."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device != "cpu")
    clock, done = StepClock(skip=skip), 0
    while done < steps:
        for rows in batches:
            batch = {name: value.to(device, non_blocking=True) for name, value in rows.items()}
            with torch.autocast(device, torch.bfloat16):
                loss = model.loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            clock.batch_end(None, None)
            done += 1
            if done == steps:
                break
    clock.fit_end(None, None)
    return 1 / clock.seconds_per_step()


def utilisation(device: str, size: str, batch: int) -> dict[str, Any]:
    """Measure the model FLOPs utilisation of Hocket and of the loop by hand, in turn: twice on a GPU."""
    steps, skip, rounds = (8, 3, 1) if device == "cpu" else (30, 8, 2)
    model = gpt(device, size)
    length = model.config.context
    rows = [{"tokens": torch.randint(0, 256, (length + 1,), dtype=torch.uint8)} for _ in range(batch * 10)]
    # One step of each warms up the device and its libraries.
    batches = DataLoader(rows, batch_size=batch)
    rates: dict[str, list[float]] = {"hocket": [], "by_hand": []}
    for _ in range(rounds):
        for name, function in (("by_hand", run_by_hand), ("hocket", run_hocket)):
            rates[name].append(function(model, batches, device, steps, skip))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    flops = 6 * num_parameters + 12 * model.config.num_layers * model.config.width * length
    name = torch.cuda.get_device_name() if device != "cpu" else "cpu"
    peak = next((value for part_of_name, value in PEAK_FLOPS.items() if part_of_name in name), None)
    figures: dict[str, Any] = {"parameters": num_parameters, "tokens_a_batch": batch * length, "device": name}
    for system, found in rates.items():
        tokens = [rate * batch * length for rate in found]
        figures[f"{system}_tokens_per_s"] = tokens
        figures[f"{system}_mfu"] = [value * flops / peak for value in tokens] if peak else None
    figures["hocket_to_by_hand"] = sum(rates["hocket"]) / sum(rates["by_hand"])
    if device != "cpu":
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return figures
