"""A default device of torch, such as `meta` for building models, does not reach the trainer's own tensors."""

from __future__ import annotations

import torch

from hocket.trainer.data.data_spec import DataSpec
from support.ranks import run_ranks
from support.training import Net, loader, make, parameters


def _train(device: str | None) -> list[float]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # A list, because torch's `DataLoader` draws its seed on the default device.
    batches = DataSpec(list(loader()), is_replicated=True)
    torch.set_default_device(device)
    try:
        with make(model=model, optimizers=optimizer, train_dataloader=batches, max_duration="3ba") as trainer:
            trainer.fit()
    finally:
        torch.set_default_device(None)
    return [float(value.double().sum()) for value in parameters(trainer).values()]


def test_two_ranks_train_while_the_default_device_is_meta() -> None:
    expected = run_ranks(_train, 2, None)
    assert run_ranks(_train, 2, "meta") == expected
