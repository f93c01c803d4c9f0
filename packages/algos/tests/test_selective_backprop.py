"""Selective backprop: in which steps it runs, and which samples it keeps with which probability."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from hocket.algos import (
    AlgorithmConfigError,
    CutOut,
    IncompatibleError,
    SelectiveBackprop,
    select_using_loss,
    should_selective_backprop,
)
from hocket.trainer.callback import Callback
from support.methods import ImageData, LoaderOf, make_loader, make_model, train
from support.ranks import run_ranks


def test_the_method_runs_within_its_span_except_at_interruptions() -> None:
    chosen = [should_selective_backprop(0.6, batch, interrupt=3) for batch in range(6)]
    assert chosen == [True, True, False, True, True, False]
    assert should_selective_backprop(0.6, 0, interrupt=0)
    assert [should_selective_backprop(at, 0) for at in (0.49, 0.5, 0.89, 0.9)] == [False, True, True, False]


def test_samples_are_drawn_by_the_rank_of_their_loss() -> None:
    torch.manual_seed(0)
    size, keep, runs = 6, 0.34, 4000
    losses = torch.tensor([3.0, 1.0, 5.0, 0.0, 4.0, 2.0])
    rank = losses.argsort().argsort()
    count = torch.zeros(size)
    for _ in range(runs):
        kept, targets = select_using_loss(
            losses.view(size, 1),
            torch.arange(size),
            lambda x: x,
            lambda outputs, target, reduction: outputs[:, 0],
            keep=keep,
        )
        assert len(kept) == len(set(targets.tolist())) == 2
        assert torch.equal(kept[:, 0], losses[targets])
        count[targets] += 1
    shares = ((torch.arange(size) + 0.5) / size) ** (1 / keep - 1)
    shares = shares / shares.sum()
    # The probability of being one of two samples drawn without replacement.
    expected = shares + sum(
        shares[other] * shares / (1 - shares[other]) * (torch.arange(size) != other) for other in range(size)
    )
    torch.testing.assert_close(count / runs, expected[rank], atol=0.03, rtol=0)


def test_losses_of_positions_are_averaged_and_at_least_one_sample_is_kept() -> None:
    kept, _ = select_using_loss(
        torch.rand(3, 2), torch.zeros(3, 2), lambda x: x, nn.functional.mse_loss, keep=0.01
    )
    assert len(kept) == 1


def test_losses_are_computed_on_scaled_inputs_and_full_size_ones_are_returned() -> None:
    seen: list[Any] = []

    def model(images: torch.Tensor) -> torch.Tensor:
        seen.append(images.shape)
        return images.flatten(1)[:, :3]

    kept, _ = select_using_loss(
        torch.rand(4, 3, 8, 8),
        torch.zeros(4, dtype=torch.long),
        model,
        nn.functional.cross_entropy,
        scale_factor=0.5,
    )
    assert seen == [(4, 3, 4, 4)]
    assert kept.shape == (2, 3, 8, 8)
    with pytest.raises(IncompatibleError, match=r"`scale_factor` 0\.5 needs floating point inputs"):
        select_using_loss(torch.rand(4, 3), torch.zeros(4), model, nn.functional.mse_loss, scale_factor=0.5)


def test_training_steps_on_fewer_samples_of_the_loaders_batch() -> None:
    sizes: list[tuple[bool, int, float]] = []
    model = make_model("images")
    model.register_forward_pre_hook(
        lambda module, args: sizes.append(
            (module.training, len(args[0][0]), float((args[0][0] == 0).float().mean()))
        )
    )
    statistics = model.norm.running_mean.clone()  # type: ignore[operator, union-attr]
    loader = make_loader("images", 2)
    train(
        [],
        kind="images",
        steps=2,
        model=model,
        train_dataloader=loader,
        algorithms=[CutOut(length=1.0), SelectiveBackprop(0, 1, interrupt=2)],
    )
    # The pass that computes losses runs in evaluation mode, on images without holes.
    assert [(training, size) for training, size, _ in sizes] == [(False, 8), (True, 4), (True, 8)]
    assert sizes[0][2] < 0.05 < sizes[1][2]
    assert model.norm.num_batches_tracked == 2  # type: ignore[union-attr]
    assert not torch.equal(model.norm.running_mean, statistics)  # type: ignore[arg-type, union-attr]


def test_selection_runs_on_microbatches_and_keeps_the_modes_of_modules() -> None:
    sizes: list[int] = []
    model: Any = make_model("images")

    class Freeze(Callback):
        def fit_start(self, state: Any, logger: Any) -> None:
            model.norm.eval()

    def look(module: nn.Module, args: Any) -> None:
        if not module.training:
            sizes.append(len(args[0][0]))

    model.register_forward_pre_hook(look)
    mean = model.norm.running_mean.clone()
    arguments: dict[str, Any] = {"device_train_microbatch_size": 3, "callbacks_more": [Freeze()]}
    train([], kind="images", model=model, steps=2, algorithms=[SelectiveBackprop(0, 1)], **arguments)
    assert sizes == [3, 3, 2]  # the second batch is interrupted
    assert not model.norm.training
    assert torch.equal(model.norm.running_mean, mean)


def test_a_failed_selection_leaves_the_model_in_training_mode() -> None:
    def fail(outputs: Any, target: Any) -> torch.Tensor:
        raise RuntimeError("no loss")

    model = make_model("images")
    with pytest.raises(RuntimeError, match="no loss"):
        train([], kind="images", model=model, algorithms=[SelectiveBackprop(0, 1, loss_fn=fail)])
    assert all(module.training for module in model.modules())


class Dicts(nn.Module):
    """A model whose batches have further entries."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen: list[Any] = []

    def forward(self, batch: Any) -> torch.Tensor:
        self.seen += [batch] * self.training
        return self.layer(batch["x"])  # type: ignore[no-any-return]

    def loss(self, outputs: torch.Tensor, batch: Any, reduction: str = "mean") -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch["y"], reduction=reduction)


def test_all_entries_of_the_batch_are_selected_together() -> None:
    x = torch.randn(8, 4)
    rows = [{"x": x[index], "y": index % 3, "id": index, "name": str(index)} for index in range(8)]
    model, method = Dicts(), SelectiveBackprop(0, 1, input_key="x", target_key="y", interrupt=0)
    loader = DataLoader(rows, batch_size=8)  # type: ignore[arg-type, var-annotated]
    train([], kind="images", steps=1, model=model, train_dataloader=loader, algorithms=[method])
    (batch,) = model.seen
    assert len(batch["id"]) == 4
    assert torch.equal(batch["x"], x[batch["id"]])
    assert batch["name"] == [str(int(index)) for index in batch["id"]]


class Plain(nn.Module):
    """A model that can compute only a mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(768, 4)

    def forward(self, batch: Any) -> torch.Tensor:
        logits: torch.Tensor = self.layer(batch[0].flatten(1))
        return logits

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


def test_a_model_without_losses_per_sample_raises_when_the_trainer_is_built() -> None:
    with pytest.raises(IncompatibleError, match=r"`Plain.loss` has no argument `reduction`.*loss_fn="):
        train([], kind="images", model=Plain(), algorithms=[SelectiveBackprop()])
    given = SelectiveBackprop(
        0, 1, loss_fn=lambda outputs, target: nn.functional.cross_entropy(outputs, target, reduction="none")
    )
    _, losses = train([], kind="images", model=Plain(), algorithms=[given])
    assert len(losses) == 4


def test_a_loss_function_of_the_model_is_enough() -> None:
    class WithFunction(Plain):
        loss_fn = staticmethod(nn.functional.cross_entropy)

    assert len(train([], kind="images", model=WithFunction(), algorithms=[SelectiveBackprop(0, 1)])[1]) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": 0.9, "end": 0.5}, "expected a later end"),
        ({"keep": 0}, "`keep` is 0, expected a number above 0"),
        ({"scale_factor": 2}, "`scale_factor` is 2; expected a number from 0 to 1"),
        ({"interrupt": -1}, "`interrupt` is -1"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(AlgorithmConfigError, match=message):
        SelectiveBackprop(**arguments)
    with pytest.raises(AlgorithmConfigError, match="argument `reduction`"):
        select_using_loss(torch.zeros(2), torch.zeros(2), lambda x: x, lambda outputs, target: outputs)


def _train_on_rows(num_rows: list[int]) -> list[int]:
    """Train on batches of a different size on each rank, and return the sizes in evaluation mode."""
    rank, sizes = dist.get_rank(), list[int]()
    model = make_model("images")
    model.register_forward_pre_hook(
        lambda module, args: None if module.training else sizes.append(len(args[0][0]))
    )
    loader = LoaderOf(DataLoader(ImageData(num_rows[rank]), num_rows[rank]), (rank, len(num_rows)))
    arguments: dict[str, Any] = {"fsdp_config": {}, "device_train_microbatch_size": 3}
    method = SelectiveBackprop(0, 1, interrupt=0)
    train([], kind="images", model=model, steps=1, train_dataloader=loader, algorithms=[method], **arguments)
    return sizes


def test_ranks_with_batches_of_different_sizes_run_as_many_passes() -> None:
    assert run_ranks(_train_on_rows, 2, [8, 4], init="gloo") == [[3, 3, 2], [3, 1, 1]]
