"""Learning rates of the layer against a plain loop that steps a `LambdaLR` as Composer does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import hocket.compat.composer as composer
from hocket.compat.composer import optim
from hocket.compat.composer.models import ComposerClassifier
from hocket.trainer import Time, Timestamp

LENGTH, EPOCHS = 4, 3


class Rates(composer.Callback):
    """A callback that records the rate of each update, and the losses."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.losses: list[float] = []

    def after_train_batch(self, state: composer.State, logger: composer.Logger) -> None:
        self.seen.append(state.optimizers[0].param_groups[0]["lr"])
        self.losses.append(float(state.loss))


def make_data() -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(4 * LENGTH, 2, generator=generator), torch.arange(4 * LENGTH) % 3)
    return list(DataLoader(data, batch_size=4))


def make_model() -> ComposerClassifier:
    torch.manual_seed(5)
    return ComposerClassifier(nn.Linear(2, 3), num_classes=3)


def in_composer(make_schedulers: Any, *, every_batch: bool) -> tuple[list[float], list[float]]:
    """Return the rates and losses of a loop that makes and steps schedulers where Composer does."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    state: Any = SimpleNamespace(
        timestamp=Timestamp(), max_duration=Time(EPOCHS, "ep"), dataloader_len=LENGTH
    )
    schedulers = [
        one if isinstance(one, ExponentialLR) else LambdaLR(optimizer, lambda _, one=one: one(state, 1.0))  # type: ignore[misc]
        for one in make_schedulers(optimizer)
    ]
    rates, losses = [], []
    for epoch in range(EPOCHS):
        for index, batch in enumerate(make_data()):
            rates.append(optimizer.param_groups[0]["lr"])
            loss = model.loss(model(batch), batch)
            losses.append(float(loss.detach()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if every_batch:
                for scheduler in schedulers:
                    scheduler.step()
            state.timestamp = Timestamp(
                epoch=epoch, batch=epoch * LENGTH + index + 1, batch_in_epoch=index + 1
            )
        if not every_batch:
            for scheduler in schedulers:
                scheduler.step()
        state.timestamp = Timestamp(epoch=epoch + 1, batch=(epoch + 1) * LENGTH)
    return rates, losses


def in_layer(make_schedulers: Any, **arguments: Any) -> Rates:
    model, rates = make_model(), Rates()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with composer.Trainer(
        model=model,
        train_dataloader=make_data(),
        optimizers=optimizer,
        schedulers=make_schedulers(optimizer),
        callbacks=[rates],
        **({"max_duration": f"{EPOCHS}ep", "device": "cpu", "progress_bar": False} | arguments),
    ) as trainer:
        trainer.fit()
    return rates


SCHEDULERS: dict[str, Any] = {
    "one": lambda _: [optim.CosineAnnealingWithWarmupScheduler(t_warmup="3ba")],
    "two": lambda _: [optim.StepScheduler("1ep", 0.5), optim.LinearScheduler(t_max="7ba")],
    "torch_first": lambda optimizer: [ExponentialLR(optimizer, 0.9), optim.MultiStepScheduler("5ba")],
    "torch_last": lambda optimizer: [optim.LinearScheduler(), ExponentialLR(optimizer, 0.9)],
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("every_batch", [None, True, False])
def test_rates_and_losses_are_those_of_composers_loop(kind: str, every_batch: bool | None) -> None:
    is_by_batch = not kind.startswith("torch") if every_batch is None else every_batch
    rates, losses = in_composer(SCHEDULERS[kind], every_batch=is_by_batch)
    found = in_layer(SCHEDULERS[kind], step_schedulers_every_batch=every_batch)
    assert found.seen == pytest.approx(rates, rel=1e-12)
    assert found.losses == pytest.approx(losses, rel=1e-5)


def test_the_summary_names_the_schedule_that_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    in_layer(SCHEDULERS["one"])
    row = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("schedule"))
    assert row.split() == ["schedule", "CosineAnnealingWithWarmupScheduler"]


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_resumed_run_has_the_rates_of_an_uninterrupted_one(kind: str, tmp_path: Path) -> None:
    whole = in_layer(
        SCHEDULERS[kind],
        save_folder=str(tmp_path),
        save_interval="3ba",
        save_filename="ba{batch}",
        step_schedulers_every_batch=True,
    )
    resumed = in_layer(SCHEDULERS[kind], load_path=str(tmp_path / "ba6"), step_schedulers_every_batch=True)
    assert resumed.seen == whole.seen[6:]
    assert resumed.losses == whole.losses[6:]
