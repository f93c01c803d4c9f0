"""Clipping and smoothing in a training, on one process and on ranks, compared with a plain loop."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from hocket.algos import GradientClipping, IncompatibleError, LabelSmoothing, apply_gradient_clipping
from hocket.trainer.callback import Callback
from hocket.trainer.trainer import Trainer
from support.ranks import run_ranks

STEPS = 6
LAYOUTS = [{}, None]  # sharded, replicated
CLIPPINGS = [("norm", 0.1), ("value", 0.01), ("adaptive", 0.01)]


class Net(nn.Module):
    """A model of three equal blocks, so that sharding makes groups."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 3))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layers(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


class Watch(Callback):
    """Records each step's loss, and the targets that a metric would get after it."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.targets: list[torch.Tensor] = []

    def after_loss(self, state: Any, logger: Any) -> None:
        self.targets.append(state.batch[1].clone())

    def after_train_batch(self, state: Any, logger: Any) -> None:
        self.losses.append(float(state.loss))


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(0, 3, (8 * STEPS,), generator=generator)
    return TensorDataset(torch.randn(8 * STEPS, 6, generator=generator), targets)


def _share(rank: int, size: int) -> Subset[Any]:
    """Return this rank's slices of the batches of 8."""
    part = 8 // size
    return Subset(_data(), [8 * step + part * rank + index for step in range(STEPS) for index in range(part)])


def _by_hand(
    clipping: tuple[str, float] | None, smoothing: float
) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for x, target in DataLoader(_data(), batch_size=8):
        loss = nn.functional.cross_entropy(model((x, target)), target, label_smoothing=smoothing)
        loss.backward()
        if clipping:
            apply_gradient_clipping(model, clipping[0], clipping_threshold=clipping[1])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return dict(model.named_parameters()), losses


class LoaderOf:
    """A loader that states its data-parallel rank, as `hocket.stream`'s does."""

    def __init__(self, loader: DataLoader[Any], data_parallel: tuple[int, int]) -> None:
        self._loader, self.data_parallel = loader, data_parallel

    def __iter__(self) -> Any:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)


def _train(
    algorithms: list[Any],
    microbatch: int | None = None,
    *,
    data_parallel: tuple[int, int] = (0, 1),
    **arguments: Any,
) -> tuple[dict[str, torch.Tensor], Watch]:
    model, watch = Net(), Watch()
    rank, size = data_parallel
    loader = LoaderOf(DataLoader(_share(rank, size), batch_size=8 // size), data_parallel)
    with Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        max_duration="1ep",
        algorithms=algorithms,
        callbacks=[watch],
        device="cpu",
        progress_bar=False,
        device_train_microbatch_size=microbatch,
        **arguments,
    ) as trainer:
        trainer.fit()
        parameters = {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
            for name, value in model.named_parameters()
        }
    return parameters, watch


def _check(parameters: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(parameters) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(parameters[name], value.detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda clipping: clipping[0])
@pytest.mark.parametrize("microbatch", [None, 2])
def test_clipping_in_the_trainer_equals_clipping_in_a_plain_loop(
    clipping: tuple[str, float], microbatch: int | None
) -> None:
    expected, losses = _by_hand(clipping, 0.0)
    unclipped, _ = _by_hand(None, 0.0)
    assert any((expected[name] - unclipped[name]).abs().max() > 1e-3 for name in expected)
    parameters, watch = _train([GradientClipping(*clipping)], microbatch)
    _check(parameters, expected)
    assert watch.losses == pytest.approx(losses, abs=1e-6)


@pytest.mark.parametrize("microbatch", [None, 3])
def test_smoothing_in_the_trainer_equals_torchs_and_metrics_get_the_labels(
    microbatch: int | None,
) -> None:
    expected, losses = _by_hand(None, 0.2)
    parameters, watch = _train([LabelSmoothing(0.2)], microbatch)
    _check(parameters, expected)
    assert watch.losses == pytest.approx(losses, abs=1e-6)
    assert torch.equal(torch.cat(watch.targets), _data().tensors[1])


def test_outputs_that_are_no_logits_raise() -> None:
    class Pair(Net):
        def forward(self, batch: Any) -> Any:
            return {"logits": super().forward(batch)}

    model = Pair()
    with (
        Trainer(
            model=model,
            train_dataloader=DataLoader(_data(), batch_size=8),
            max_duration="1ba",
            algorithms=[LabelSmoothing()],
            device="cpu",
            progress_bar=False,
        ) as trainer,
        pytest.raises(IncompatibleError, match=r"needs logits as the model's outputs.* but they are a dict"),
    ):
        trainer.fit()


def _train_on_ranks() -> list[dict[str, torch.Tensor]]:
    data_parallel = dist.get_rank(), dist.get_world_size()
    return [
        _train(
            [LabelSmoothing(0.2), GradientClipping(*clipping)],
            2,
            data_parallel=data_parallel,
            fsdp_config=fsdp_config,
        )[0]
        for fsdp_config in LAYOUTS
        for clipping in CLIPPINGS
    ]


def test_clipping_and_smoothing_on_two_ranks_equal_one_process() -> None:
    expected = [_by_hand(clipping, 0.2)[0] for _ in LAYOUTS for clipping in CLIPPINGS]
    for results in run_ranks(_train_on_ranks, 2, init="gloo", timeout_s=120):
        for parameters, reference in zip(results, expected, strict=True):
            _check(parameters, reference)
