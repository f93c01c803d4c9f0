"""SWA: the mean of the weights in its span, when the model gets it, and learning rates."""

from typing import Any

import pytest
import torch

from hocket.algos import SWA, AlgorithmConfigError
from hocket.trainer import Trainer
from hocket.trainer.callback import Callback
from support.methods import make_loader, make_model, train


class Seen(Callback):
    """Keeps the weights before each batch, and its learning rate."""

    def __init__(self) -> None:
        self.before: list[torch.Tensor] = []
        self.rates: list[float] = []

    def batch_start(self, state: Any, logger: Any) -> None:
        self.before.append(state.model.head.weight.detach().clone())

    def after_train_batch(self, state: Any, logger: Any) -> None:
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])


def _run(
    swa: SWA, steps: int = 10, epochs: int = 1
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    """Return the head's weights after each step and before the next one, and the learning rates."""
    model, seen = make_model("text"), Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepped: list[torch.Tensor] = []
    optimizer.register_step_post_hook(
        lambda *_: stepped.append(model.head.weight.detach().clone())  # type: ignore[operator, union-attr]
    )
    with Trainer(
        model=model,
        train_dataloader=make_loader("text", steps),
        optimizers=optimizer,
        algorithms=swa,
        callbacks=seen,
        max_duration=f"{steps * epochs}ba",
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    found = [*seen.before[1:], model.head.weight.detach()]  # type: ignore[operator, union-attr]
    return stepped, found, seen.rates


def test_the_model_gets_the_mean_of_the_span() -> None:
    stepped, found, _ = _run(SWA("0.3dur", "0.7dur", "2ba"))
    # Averaged after batches 3, 5 and 7; replaced after batch 7.
    torch.testing.assert_close(found[6], torch.stack([stepped[2], stepped[4], stepped[6]]).mean(0))
    for batch in range(10):
        assert torch.equal(stepped[batch], found[batch]) == (batch != 6)


def test_epochs_are_averaged_at_their_ends() -> None:
    stepped, found, _ = _run(SWA("0.0dur", "0.5dur", "1ep"), steps=4)
    # One epoch of four batches: the weights at its end are the only ones averaged.
    assert torch.equal(found[3], stepped[3])


def test_the_last_epoch_of_the_span_is_averaged_too() -> None:
    # Three epochs of two batches: the span ends with the last batch of the second one.
    stepped, found, _ = _run(SWA("0.3dur", "0.6dur", "1ep"), steps=2, epochs=3)
    torch.testing.assert_close(found[3], (stepped[1] + stepped[3]) / 2)
    for batch in range(6):
        assert torch.equal(stepped[batch], found[batch]) == (batch != 3)


def test_a_span_that_ends_within_an_epoch_ends_there() -> None:
    stepped, found, _ = _run(SWA("0.3dur", "0.8dur", "1ep"), steps=2, epochs=3)
    torch.testing.assert_close(found[4], (stepped[1] + stepped[3]) / 2)
    for batch in range(6):
        assert torch.equal(stepped[batch], found[batch]) == (batch != 4)


@pytest.mark.parametrize(
    ("strategy", "shares"), [("linear", [0.25, 0.5, 0.75]), ("cos", [0.1464, 0.5, 0.8536])]
)
def test_learning_rates_are_annealed(strategy: str, shares: list[float]) -> None:
    swa = SWA("0.2dur", "0.9dur", "1ba", True, strategy, anneal_steps=4, swa_lr=0.02)
    _, _, rates = _run(swa)
    assert rates[:2] == [0.1, 0.1]
    shares = [*shares, 1, 1, 1, 1, 1]  # the rate stays constant after the model got the mean
    assert rates[2:] == pytest.approx([0.1 + (0.02 - 0.1) * share for share in shares], abs=1e-5)


def test_a_span_to_the_end_of_training_warns_about_batch_norm() -> None:
    with pytest.warns(UserWarning, match="batch norm's statistics will not be those of the mean"):
        train([], kind="text", steps=2, algorithms=[SWA("0.5dur", "1.0dur", "1ba")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"swa_start": "3ba"}, "`swa_start` is `3ba`, expected both in `dur` or both in `ep`"),
        ({"swa_start": "1ep"}, "`swa_end` is `0.97dur`, expected both in"),
        ({"swa_end": "0.5dur"}, "expected a later end"),
        ({"swa_end": "1.5dur"}, "`swa_end` is `1.5dur`, expected 0 to 1"),
        ({"update_interval": "5tok"}, "`update_interval` is `5tok`, expected at least 1 in `ba` or `ep`"),
        ({"anneal_strategy": "step"}, "`anneal_strategy` is 'step'"),
        ({"anneal_steps": 0}, "`anneal_steps` is 0"),
        ({"swa_lr": 0.1}, "`swa_lr` has no effect without `schedule_swa_lr=True`"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(AlgorithmConfigError, match=message):
        SWA(**arguments)
