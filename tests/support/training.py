"""Small models, data and callbacks that the tests of the loop share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hocket.trainer import Callback, ComposerModel, Event, Trainer


class Net(ComposerModel):
    """A classifier whose loss is the mean over the samples."""

    def __init__(self, *, dropout: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))

    def forward(self, batch):
        return self.layers(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


def data(num: int = 20) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(num, 5, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (num,), generator=generator))


def loader(num: int = 20, batch_size: int = 4, **options: Any) -> DataLoader:
    return DataLoader(data(num), batch_size=batch_size, **options)


def make(**arguments: Any) -> Trainer:
    model = arguments.pop("model", None) or Net()
    arguments.setdefault("optimizers", torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    arguments.setdefault("train_dataloader", loader())
    arguments.setdefault("seed", 3)
    return Trainer(model=model, progress_bar=False, device="cpu", **arguments)


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.state.model.state_dict().items()}


class Recorder(Callback):
    """Records every event with the number of its batch."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.batches: list[int] = []

    def run_event(self, event, state, logger):
        self.events.append(event)
        self.batches.append(state.timestamp.counts.batch)


class Watch(Callback):
    """Calls a function at the end of each batch."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self.function = function

    def batch_end(self, state, logger):
        self.function(state)


class FileStore:
    """A minimal checkpoint store of one process: `torch.save` to a temporary file, then a rename."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, state, *, step, name=None, per_rank=None, user=None, mode="sync"):
        name = name or f"step{step}"
        path = self.folder / name
        if path.exists():
            raise FileExistsError(f"`{path}` is there already")
        whole = {"state": _without_slots(state), "step": step, "per_rank": per_rank, "user": user}
        torch.save(whole, path.with_suffix(".partial"))
        os.replace(path.with_suffix(".partial"), path)
        return SimpleNamespace(name=name, wait=lambda timeout_s=None: None, done=lambda: True)

    def load(self, source, into, *, strict=True, include=None, ignore=None):
        path = Path(source) if "/" in str(source) else self.folder / source
        whole = torch.load(path, weights_only=False)
        state = _fill(into, whole["state"])
        return SimpleNamespace(
            name=path.name, step=whole["step"], state=state, user=whole["user"], per_rank=whole["per_rank"]
        )

    def list(self):
        paths = [path for path in self.folder.iterdir() if path.suffix != ".partial"]
        entries = [
            SimpleNamespace(
                name=path.name,
                uri=str(path),
                step=torch.load(path, weights_only=False)["step"],
                created=path.stat().st_mtime_ns,
                status="committed",
            )
            for path in paths
        ]
        return sorted(entries, key=lambda entry: (entry.step, entry.created))

    def delete(self, step):
        for entry in self.list():
            if entry.step == step:
                (self.folder / entry.name).unlink()


def _without_slots(node):
    if isinstance(node, dict):
        return {name: _without_slots(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_without_slots(value) for value in node]
    if hasattr(node, "slots_like"):
        return {}
    return node


def _fill(into, saved):
    if isinstance(into, torch.Tensor):
        with torch.no_grad():
            into.copy_(saved)
        return into
    if isinstance(into, dict) and any(
        isinstance(value, (torch.Tensor, dict, list)) for value in into.values()
    ):
        return (
            {name: _fill(value, saved[name]) for name, value in into.items()}
            if into.keys() <= saved.keys()
            else saved
        )
    if isinstance(into, list) and len(into) == len(saved):
        return [_fill(value, saved_value) for value, saved_value in zip(into, saved, strict=True)]
    return saved


def write_json(path: str, value: Any) -> None:
    Path(path).write_text(json.dumps(value))
