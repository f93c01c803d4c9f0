"""Averages beside a running model: their tensors, their place in evaluation, and checkpoints saved there."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from hocket import ckpt
from hocket.algos import EMA, SWA, ScheduleFree
from hocket.algos.weight_average import WeightAverage
from hocket.trainer import Evaluator, Trainer
from hocket.trainer.callback import Callback
from support.methods import make_loader, make_model


class At(Callback):
    """Calls a function with the trainer at the first occurrence of an event, and keeps the head's weights."""

    def __init__(self, event: str, function: Any) -> None:
        self.event, self.function = event, function
        self.trainer: Any = None
        self.trained: dict[int, torch.Tensor] = {}
        self.evaluated: dict[str, list[torch.Tensor]] = {}

    def run_event(self, event: Any, state: Any, logger: Any) -> None:
        weight = state.model.head.weight.detach().clone()
        if event.value == "batch_end":
            self.trained[state.counts.batch] = weight
        if event.value == "eval_batch_end":
            self.evaluated.setdefault(state.dataloader_label, []).append(weight)
        if event.value == self.event and self.function is not None:
            function, self.function = self.function, None
            function(self.trainer)


def _optimizer(algorithm: Any, model: nn.Module) -> torch.optim.Optimizer:
    if not isinstance(algorithm, ScheduleFree):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedulefree = pytest.importorskip("schedulefree", reason="needs schedulefree")
    optimizer: torch.optim.Optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05)
    return optimizer


def _fit(algorithm: Any, callback: At, more: Any = (), **arguments: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Train for two epochs with dropout, and with two shuffled evaluations after each epoch."""
    model = make_model("images")
    loaders = {label: make_loader("images", 2) for label in ("first", "second")}
    with Trainer(
        model=model,
        train_dataloader=make_loader("images", 3),
        eval_dataloader=[Evaluator(label=label, dataloader=one) for label, one in loaders.items()],
        optimizers=_optimizer(algorithm, model),
        algorithms=algorithm,
        callbacks=[callback, *more],
        max_duration="2ep",
        seed=3,
        device="cpu",
        progress_bar=False,
        **arguments,
    ) as trainer:
        callback.trainer = trainer
        trainer.fit()
    return model, algorithm.state_dict().get("average", {})


EVENTS = ["eval_before_all", "eval_start", "eval_batch_end", "eval_end", "eval_after_all"]


@pytest.mark.parametrize("method", [lambda: EMA("2ba"), ScheduleFree], ids=["EMA", "ScheduleFree"])
@pytest.mark.parametrize("event", EVENTS)
def test_a_checkpoint_saved_within_an_evaluation_continues_the_training(
    tmp_path: Path, event: str, method: Any
) -> None:
    at = At(event, lambda trainer: trainer.save_checkpoint(f"{tmp_path}/saved"))
    whole, average = _fit(method(), at)
    resumed, resumed_average = _fit(method(), At("", None), load_path=f"{tmp_path}/saved")
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    for name, value in average.items():
        assert torch.equal(resumed_average[name], value), name


def test_a_checkpoint_saved_within_an_evaluation_has_both_kinds_of_weights(tmp_path: Path) -> None:
    at = At("eval_batch_end", lambda trainer: trainer.save_checkpoint_to_save_folder())
    _fit(EMA("2ba"), at, save_folder=str(tmp_path), save_interval="9ep")
    saved = ckpt.open(tmp_path / "ep1-ba3")
    trained, evaluated = at.trained[3], at.evaluated["first"][0]
    assert not torch.equal(evaluated, trained)
    assert torch.equal(torch.from_numpy(saved["model.head.weight"]), trained)
    assert torch.equal(torch.from_numpy(saved["algorithms.EMA.average.head.weight"]), evaluated)


class Predicts(Callback):
    """Predicts at the end of each evaluation, and is not stopped by a prediction that fails."""

    def __init__(self, *, fails: bool) -> None:
        self.trainer: Any = None
        self.fails = fails

    def eval_end(self, state: Any, logger: Any) -> None:
        with contextlib.suppress(ArithmeticError):
            self.trainer.predict(make_loader("images", 1))

    def predict_batch_end(self, state: Any, logger: Any) -> None:
        if self.fails:
            raise ArithmeticError


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("method", [lambda: EMA("2ba"), ScheduleFree], ids=["EMA", "ScheduleFree"])
def test_a_prediction_within_an_evaluation_leaves_it_the_averages(method: Any, fails: bool) -> None:
    predicts, nested, plain = Predicts(fails=fails), At("", None), At("", None)

    def start(trainer: Any) -> None:
        predicts.trainer = trainer

    nested.event, nested.function = "fit_start", start
    model, _ = _fit(method(), nested, more=[predicts])
    alone, _ = _fit(method(), plain)
    for label in ("first", "second"):
        assert all(map(torch.equal, nested.evaluated[label], plain.evaluated[label])), label
    for name, value in alone.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


class Growing(nn.Module):
    """A model with a frozen part, several dtypes, and a buffer that its forward pass replaces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.head.requires_grad_(False)
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, batch: Any) -> torch.Tensor:
        x = batch[0]
        self.seen = 0.5 * self.seen + x.mean(0)
        hidden = self.body(x) * self.phase.abs() + self.wide.float() + (1j * self.phase).real
        logits: torch.Tensor = self.head(hidden)
        return logits

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


class Unfreezes(Callback):
    """Trains the head from the third batch on."""

    def batch_start(self, state: Any, logger: Any) -> None:
        if state.counts.batch >= 2:
            state.model.head.requires_grad_(True)


def _grow(algorithm: Any, *, peer: AveragedModel | None = None, **arguments: Any) -> Growing:
    model = Growing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    if peer is not None:
        optimizer.register_step_post_hook(lambda *_: peer.update_parameters(model))
    generator = torch.Generator().manual_seed(2)
    batches = [(torch.randn(6, 3, generator=generator), torch.tensor([0, 1] * 3)) for _ in range(6)]
    with Trainer(
        model=model,
        train_dataloader=batches,
        optimizers=optimizer,
        algorithms=algorithm,
        callbacks=Unfreezes(),
        max_duration="1ep",
        device="cpu",
        progress_bar=False,
        **arguments,
    ) as trainer:
        trainer.fit()
    return model


METHODS = {"EMA": lambda: EMA(None, 0.7), "SWA": lambda: SWA("0dur", "0.99dur", "1ba")}


@pytest.mark.parametrize("method", METHODS)
def test_the_average_equals_that_of_torch_for_a_layer_that_is_unfrozen_later(method: str) -> None:
    is_ema = method == "EMA"
    average_fn = get_ema_multi_avg_fn(0.7) if is_ema else get_swa_multi_avg_fn()
    peer = AveragedModel(Growing(), multi_avg_fn=average_fn, use_buffers=is_ema)
    algorithm: Any = METHODS[method]()
    if is_ema:
        peer.update_parameters(Growing())  # the average starts from the initial weights
    _grow(algorithm, peer=peer)
    average = algorithm.state_dict()["average"]
    expected = dict(peer.module.named_parameters()) | (dict(peer.module.named_buffers()) if is_ema else {})
    assert set(average) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            average[name], value.detach(), msg=lambda text, name=name: f"{name} {text}"
        )


def test_evaluation_has_the_average_of_an_unfrozen_layer_and_restores_a_replaced_buffer() -> None:
    algorithm, evaluated = EMA(None, 0.7), dict[str, torch.Tensor]()

    class Looks(Callback):
        def eval_start(self, state: Any, logger: Any) -> None:
            evaluated.update({name: one.detach().clone() for name, one in state.model.state_dict().items()})

    model = _grow(algorithm)
    trained = {name: one.detach().clone() for name, one in model.state_dict().items()}
    with Trainer(
        model=model, algorithms=(again := EMA(None, 0.7)), callbacks=Looks(), device="cpu", progress_bar=False
    ) as trainer:
        again.load_state_dict(algorithm.state_dict())
        trainer.eval([(torch.randn(4, 3), torch.zeros(4).long())] * 2)
    for name, value in algorithm.state_dict()["average"].items():
        assert torch.equal(evaluated[name], value), name
        assert torch.equal(model.state_dict()[name], trained[name]), name


@pytest.mark.parametrize("method", METHODS)
def test_the_average_of_an_unfrozen_layer_resumes(tmp_path: Path, method: str) -> None:
    make: Any = METHODS[method]
    whole = make()
    _grow(whole, save_folder=str(tmp_path), save_interval="4ba")
    resumed = make()
    _grow(resumed, load_path=str(tmp_path / "ep0-ba4"))
    expected = whole.state_dict()["average"]
    assert "head.weight" in expected
    assert set(resumed.state_dict()["average"]) == set(expected)
    for name, value in resumed.state_dict()["average"].items():
        assert torch.equal(value, expected[name]), name


def test_the_average_follows_tensors_that_appear_change_shape_and_vanish() -> None:
    model = nn.ModuleDict({"kept": nn.Linear(2, 2), "gone": nn.Linear(2, 2), "lazy": nn.LazyLinear(2)})
    model.register_buffer("bank", torch.zeros(1))
    average = WeightAverage(model, has_buffers=True)
    assert set(average.tensors) == {"kept.weight", "kept.bias", "gone.weight", "gone.bias", "bank"}
    del model["gone"]
    model["lazy"](torch.ones(1, 3))
    assert average.has_new
    model.bank = torch.ones(3)
    average.update(0.5)
    assert not average.has_new
    assert set(average.tensors) == {"kept.weight", "kept.bias", "lazy.weight", "lazy.bias", "bank"}
    assert torch.equal(average.tensors["bank"], torch.ones(3))
