"""EMA: averages by the formula, their use in evaluation and prediction, and the power-function profile."""

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hocket.algos import EMA, SWA, AlgorithmConfigError, IncompatibleError, ScheduleFree, compute_ema
from hocket.algos.ema.ema import MOST_SIGMA_REL, power_exponent, power_smoothing
from hocket.algos.weight_average import WeightAverage
from hocket.trainer import Algorithm, Event, Logger, State, Trainer
from hocket.trainer.callback import Callback
from hocket.trainer.engine.passes import check_pairs
from hocket.trainer.errors import TrainerConfigError
from support.methods import make_loader, make_model, train


class Weights(Callback):
    """Keeps the head's weights after each batch, and those used in evaluation and prediction."""

    def __init__(self) -> None:
        self.trained: list[torch.Tensor] = []
        self.evaluated: list[torch.Tensor] = []

    def batch_end(self, state: Any, logger: Any) -> None:
        self.trained.append(state.model.head.weight.detach().clone())

    def eval_start(self, state: Any, logger: Any) -> None:
        self.evaluated.append(state.model.head.weight.detach().clone())

    def predict_batch_start(self, state: Any, logger: Any) -> None:
        self.evaluated.append(state.model.head.weight.detach().clone())


def _run(ema: EMA, steps: int = 5, **arguments: Any) -> tuple[torch.Tensor, Weights, nn.Module]:
    model, weights = make_model("images"), Weights()
    initial = model.head.weight.detach().clone()  # type: ignore[operator]
    with Trainer(
        model=model,
        train_dataloader=make_loader("images", steps),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=ema,
        callbacks=weights,
        max_duration=f"{steps}ba",
        device="cpu",
        progress_bar=False,
        **arguments,
    ) as trainer:
        trainer.fit()
        trainer.eval(make_loader("images", 1))
        trainer.predict(make_loader("images", 1))
    return initial, weights, model


def test_averages_follow_the_formula_and_are_used_in_evaluation_only() -> None:
    ema = EMA("2ba")
    average, weights, model = _run(ema)
    for trained in weights.trained:
        average = 2**-0.5 * average + (1 - 2**-0.5) * trained
    for evaluated in weights.evaluated:
        torch.testing.assert_close(evaluated, average)
    assert len(weights.evaluated) == 2
    assert torch.equal(model.head.weight, weights.trained[-1])  # type: ignore[arg-type]
    assert not torch.equal(weights.evaluated[0], weights.trained[-1])
    # One half-life after its update, a weight's share is halved.
    assert ema.smoothing is not None
    assert ema.smoothing**2 == pytest.approx(0.5)


@pytest.mark.parametrize("weights_only", [True, False])
def test_checkpoints_of_weights_only_have_the_averages(tmp_path: Path, weights_only: bool) -> None:
    model, ema = make_model("images"), EMA("2ba")
    with Trainer(
        model=model,
        train_dataloader=make_loader("images", 3),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=ema,
        max_duration="3ba",
        save_folder=str(tmp_path),
        save_weights_only=weights_only,
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    trained = model.head.weight.detach().clone()  # type: ignore[operator]
    average = ema.get_ema_model(make_model("images", seed=5)).head.weight  # type: ignore[union-attr]
    assert not torch.equal(trained, average)  # type: ignore[arg-type]
    again = make_model("images", seed=6)
    path = tmp_path / "latest"
    with Trainer(model=again, load_path=str(path), load_weights_only=True, device="cpu", progress_bar=False):
        expected = average if weights_only else trained
        assert torch.equal(again.head.weight, expected)  # type: ignore[arg-type]


def _resumed(ema: EMA, path: Path, **arguments: Any) -> Trainer:
    model = make_model("images", seed=6)
    return Trainer(
        model=model,
        train_dataloader=make_loader("images", 6, shuffle=False),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=ema,
        max_duration="6ba",
        load_path=str(path / "latest"),
        device="cpu",
        progress_bar=False,
        **arguments,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"load_weights_only": True},
        {"load_ignore_keys": ["algorithms/*"]},
        {"load_ignore_keys": ["algorithms/EMA/*"]},
        {"load_strict_model_weights": False},
        {"load_exclude_algorithms": ["EMA"]},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_a_new_average_starts_from_the_weights_that_were_loaded(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    trained, _ = train([], kind="images", save_folder=tmp_path)
    ema = EMA(None, 1.0)  # the average stays where it starts
    with _resumed(ema, tmp_path, **arguments) as trainer:
        trainer.fit()
    assert torch.equal(ema.averaged_weights()["head.weight"], trained["head.weight"])


def test_the_average_starts_from_weights_that_are_set_before_fit(tmp_path: Path) -> None:
    train([], kind="images", save_folder=tmp_path)
    ema = EMA(None, 1.0)
    with _resumed(ema, tmp_path, load_weights_only=True) as trainer:
        with torch.no_grad():
            trainer.state.model.head.weight.fill_(3.0)  # type: ignore[operator, union-attr]
        trainer.fit()
    assert (ema.averaged_weights()["head.weight"] == 3.0).all()


def test_a_loaded_average_without_an_update_is_kept(tmp_path: Path) -> None:
    initial = make_model("images").head.weight  # type: ignore[union-attr]
    ema, again = (EMA(None, 1.0, update_interval="5ba") for _ in range(2))
    train([], kind="images", algorithms=[ema], save_folder=tmp_path)
    with _resumed(again, tmp_path) as trainer:
        assert not again.averaged_weights()
        trainer.fit()
    assert torch.equal(again.averaged_weights()["head.weight"], initial)  # type: ignore[arg-type]


class Interrupts(Callback):
    """Interrupts every evaluation and prediction after its first batch."""

    def eval_batch_end(self, state: Any, logger: Any) -> None:
        raise KeyboardInterrupt

    def predict_batch_end(self, state: Any, logger: Any) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("method", ["eval", "predict"])
def test_the_model_has_its_own_weights_after_an_interrupted_evaluation(method: str) -> None:
    model, weights, ema = make_model("images"), Weights(), EMA("2ba")
    with Trainer(
        model=model,
        train_dataloader=make_loader("images", 3),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=ema,
        callbacks=[weights, Interrupts()],
        max_duration="3ba",
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
        with pytest.raises(KeyboardInterrupt):
            getattr(trainer, method)(make_loader("images", 1))
        assert not torch.equal(weights.evaluated[0], weights.trained[-1])
        assert torch.equal(model.head.weight, weights.trained[-1])  # type: ignore[arg-type]


def test_ema_start_and_update_interval_take_effect() -> None:
    _, weights, _ = _run(EMA(None, 0.5, ema_start="2ba", update_interval="2ba"), steps=6)
    average = weights.trained[1]
    for trained in weights.trained[3::2]:
        average = 0.5 * average + 0.5 * trained
    torch.testing.assert_close(weights.evaluated[0], average)


def test_before_ema_start_evaluation_uses_the_trained_weights() -> None:
    _, weights, _ = _run(EMA("1ba", ema_start="1.0dur"), steps=2)
    torch.testing.assert_close(weights.evaluated[0], weights.trained[-1])
    _, weights, _ = _run(EMA("1ep"), steps=2)
    assert not torch.equal(weights.evaluated[0], weights.trained[-1])


def test_the_power_function_has_the_configured_width() -> None:
    # The shares of past weights in the average after n updates, computed by the recursion.
    for sigma in (0.05, 0.1, 0.25):
        gamma, size = power_exponent(sigma), 4000
        shares = torch.zeros(size, dtype=torch.float64)
        for update in range(1, size + 1):
            smoothing = power_smoothing(update, gamma)
            shares *= smoothing
            shares[update - 1] += 1 - smoothing
        times = (torch.arange(size, dtype=torch.float64) + 0.5) / size
        mean = (shares * times).sum()
        width = float(((times - mean).square() * shares).sum().sqrt())
        assert float(shares.sum()) == pytest.approx(1)
        assert width == pytest.approx(sigma, rel=0.01)
    assert power_exponent(MOST_SIGMA_REL) == pytest.approx(0, abs=1e-6)
    assert math.isclose(MOST_SIGMA_REL, 12**-0.5)


def test_the_widest_power_function_is_the_mean() -> None:
    _, weights, _ = _run(EMA(None, sigma_rel=MOST_SIGMA_REL))
    torch.testing.assert_close(weights.evaluated[0], torch.stack(weights.trained).mean(0))


def test_the_trained_and_the_averaged_weights_can_be_swapped_after_training() -> None:
    ema = EMA("2ba")
    _, weights, model = _run(ema)
    other = make_model("images", seed=5)
    ema.get_ema_model(other)
    torch.testing.assert_close(other.head.weight, weights.evaluated[0])  # type: ignore[arg-type]
    assert ema.get_ema_model(model) is model
    torch.testing.assert_close(model.head.weight, weights.evaluated[0])  # type: ignore[arg-type]
    ema.get_training_model(model)
    assert torch.equal(model.head.weight, weights.trained[-1])  # type: ignore[arg-type]


def test_half_precision_is_averaged_in_fp32() -> None:
    model = nn.Linear(2, 2, bias=False).to(torch.bfloat16)
    average = WeightAverage(model, has_buffers=True)
    with torch.no_grad():
        model.weight.copy_(torch.ones(2, 2))
        average.copy_from_model()
        model.weight.mul_(2)
    for _ in range(3):
        average.update(1e-3)
    torch.testing.assert_close(average.tensors["weight"], torch.full((2, 2), 2 - 0.999**3))
    average.swap_in()
    assert model.weight.dtype == torch.bfloat16
    average.swap_out()
    assert (model.weight == 2).all()


def test_the_functional_form_averages_floats_and_copies_integers() -> None:
    model = nn.BatchNorm1d(3)
    averages = copy.deepcopy(model)
    model(torch.randn(8, 3) + 4)
    expected = 0.9 * averages.running_mean + 0.1 * model.running_mean  # type: ignore[operator]
    compute_ema(model, averages, smoothing=0.9)
    torch.testing.assert_close(averages.running_mean, expected)
    assert averages.num_batches_tracked == 1
    with pytest.raises(IncompatibleError, match=r"differ in .*expected a copy"):
        compute_ema(model, nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"smoothing": 0.9}, r"2 are given, expected one.*pass `half_life=None`"),
        ({"half_life": None}, "0 are given, expected one"),
        ({"half_life": "0.1dur"}, "`half_life` is `0.1dur`, expected at least 1 in batches"),
        ({"half_life": "0ba"}, "`half_life` is `0ba`"),
        (
            {"half_life": "10ba", "update_interval": "1ep"},
            "`half_life` is in `ba`",
        ),
        ({"ema_start": "-1ep"}, "`ema_start` is `-1ep`, expected a time of zero or more"),
        ({"ema_start": "-0.1dur"}, "`ema_start` is `-0.1dur`"),
        ({"half_life": None, "smoothing": 1.5}, "`smoothing` is 1.5; expected a number from 0 to 1"),
        ({"half_life": None, "sigma_rel": 0.5}, "`sigma_rel` is 0.5; expected a number from 0.001 to 0.288"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(AlgorithmConfigError, match=message):
        EMA(**arguments)


def test_methods_that_average_weights_are_refused_together() -> None:
    for other in (EMA("3ba"), SWA()):
        with pytest.raises(TrainerConfigError, match="each replaces the model's weights by its own average"):
            train([], kind="text", algorithms=[other, EMA("2ba")])


class OwnAverage(Algorithm):
    """A method of another package, which states no traits."""

    events = frozenset({Event.BATCH_END})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Do nothing: what matters is that there are averages."""

    def averaged_weights(self) -> Mapping[str, torch.Tensor]:
        return {"weight": torch.zeros(1)}


@pytest.mark.parametrize("other", [EMA, SWA, ScheduleFree, OwnAverage])
def test_a_method_that_gives_averages_without_saying_so_is_refused_too(other: type[Algorithm]) -> None:
    for pair in ([OwnAverage(), other()], [other(), OwnAverage()]):
        with pytest.raises(TrainerConfigError, match="own average"):
            check_pairs(pair)


def test_reading_averages_before_the_first_update_raises() -> None:
    with pytest.raises(IncompatibleError, match="`EMA` has no averages yet"):
        EMA().get_ema_model(nn.Linear(2, 2))


def test_a_checkpoint_of_another_model_raises() -> None:
    with pytest.raises(IncompatibleError, match=r"of another model, which has \['other'\]"):
        WeightAverage(nn.Linear(2, 2), has_buffers=True).load({"weight": torch.zeros(2, 2), "other": None})
