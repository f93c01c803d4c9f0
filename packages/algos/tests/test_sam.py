"""SAM: the gradient at the ascended point, compared with a computation by hand, and a step's side effects."""

from typing import Any

import pytest
import torch
from torch import nn

from hocket.algos import SAM, AlgorithmConfigError, IncompatibleError, MixUp
from hocket.trainer import Trainer
from hocket.trainer.callback import Callback
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.loggers import InMemoryLogger
from support.methods import make_loader, make_model, train


def _by_hand(rho: float, interval: int, steps: int = 4) -> tuple[dict[str, torch.Tensor], list[float]]:
    model: Any = make_model("text")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step, batch in enumerate(make_loader("text", steps, shuffle=False)):
        loss = model.loss(model(batch), batch)
        loss.backward()
        losses.append(loss.item())
        if (step + 1) % interval == 0:
            own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += rho * parameter.grad / norm
            optimizer.zero_grad()
            model.loss(model(batch), batch).backward()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(own[name])
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters()), losses


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("microbatch", [None, 3])
def test_a_step_uses_the_gradient_at_the_ascended_point(interval: int, microbatch: int | None) -> None:
    expected, losses = _by_hand(0.5, interval)
    logger = InMemoryLogger()
    trained, found = train(
        [],
        kind="text",
        algorithms=[SAM(0.5, interval=interval)],
        train_dataloader=make_loader("text", 4, shuffle=False),
        device_train_microbatch_size=microbatch,
        loggers=logger,
    )
    for name, value in expected.items():
        torch.testing.assert_close(trained[name], value.detach(), atol=2e-6, rtol=1e-4)
    # The loss in the state and in the log is that of the weights, and not of the ascended point.
    assert found == pytest.approx(losses, rel=1e-5)
    assert [value for _, value in logger.data["loss/train/total"]] == pytest.approx(losses, rel=1e-5)


def test_rho_0_is_plain_training() -> None:
    plain, _ = train([], kind="text")
    flat, _ = train([], kind="text", algorithms=[SAM(0.0)])
    for name, value in plain.items():
        torch.testing.assert_close(flat[name], value, atol=1e-7, rtol=1e-6)


class Passes(Callback):
    """Keeps the inputs of both passes, and counts the events."""

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []
        self.events: list[str] = []

    def after_forward(self, state: Any, logger: Any) -> None:
        self.inputs.append(state.batch[0].clone())

    def after_train_batch(self, state: Any, logger: Any) -> None:
        self.events.append("after_train_batch")


def test_both_passes_have_equal_draws_and_update_statistics_once() -> None:
    model, passes = make_model("images"), Passes()
    with Trainer(
        model=model,
        train_dataloader=make_loader("images", 3),
        algorithms=[MixUp(0.8), SAM(0.5)],
        callbacks=passes,
        max_duration="3ba",
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    assert len(passes.inputs) == 6
    for first, second in zip(passes.inputs[::2], passes.inputs[1::2], strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(passes.inputs[0], passes.inputs[2])
    assert passes.events == ["after_train_batch"] * 3
    assert model.norm.num_batches_tracked == 3  # type: ignore[union-attr]
    assert model.norm.track_running_stats  # type: ignore[union-attr]


def test_instance_norm_updates_its_statistics_once() -> None:
    means = []
    for algorithms in ([], [SAM(0.5)]):
        model = make_model("images")
        model.norm = nn.InstanceNorm2d(8, track_running_stats=True)
        train([], kind="images", steps=1, model=model, algorithms=algorithms)
        means.append(model.norm.running_mean)
    assert torch.equal(*means)  # type: ignore[arg-type]
    assert not torch.equal(means[0], torch.zeros(8))  # type: ignore[arg-type]


@pytest.mark.parametrize("microbatch", [None, 3])
def test_logged_parts_of_the_loss_are_those_at_the_weights(microbatch: int | None) -> None:
    model: Any = make_model("text")
    loss = model.loss
    model.loss = lambda outputs, batch: {"main": loss(outputs, batch), "norm": model.head.weight.norm() * 0.1}
    norm, logger = float(model.head.weight.detach().norm()) * 0.1, InMemoryLogger()
    train(
        [],
        kind="text",
        steps=1,
        model=model,
        algorithms=[SAM(5.0)],
        loggers=logger,
        device_train_microbatch_size=microbatch,
    )
    values = {name: float(logger.data[f"loss/train/{name}"][0][1]) for name in ("total", "main", "norm")}
    assert values["norm"] == pytest.approx(norm, rel=1e-5)
    assert values["total"] == pytest.approx(values["main"] + values["norm"], rel=1e-5)


def test_weights_are_restored_when_the_second_pass_fails() -> None:
    model: Any = make_model("text")
    before = model.head.weight.detach().clone()
    calls = []

    def fail(module: Any, args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the second pass failed")

    model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="the second pass failed"):
        train([], kind="text", model=model, algorithms=[SAM(0.5)])
    assert torch.equal(model.head.weight, before)


def test_misuse_is_named() -> None:
    with pytest.raises(AlgorithmConfigError, match="`rho` is -1; expected a number from 0 on"):
        SAM(-1)
    with pytest.raises(AlgorithmConfigError, match="`interval` is 0"):
        SAM(interval=0)
    with pytest.raises(TrainerConfigError, match="each doubles the passes"):
        train([], kind="text", algorithms=[SAM(), SAM()])
    model = make_model("text")
    with pytest.raises(IncompatibleError, match="`LBFGS` evaluates the loss several times"):
        Trainer(
            model=model,
            optimizers=torch.optim.LBFGS(model.parameters()),
            algorithms=SAM(),
            device="cpu",
            progress_bar=False,
        )
