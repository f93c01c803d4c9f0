"""The train step: standard, with a closure, wrapped, and defined by the user."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hocket.trainer import Algorithm, Callback, Event
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.loggers import InMemoryLogger
from hocket.trainer.protocols import TrainStep
from hocket.trainer.step.step import ClosureStep
from support.training import Net, Recorder, loader, make, parameters


def assert_same(one, other):
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_lbfgs_trains_as_in_a_plain_loop():
    def lbfgs(model):
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    model = Net()
    optimizer = lbfgs(model)
    first = []
    for batch in loader():

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = model.loss(model(batch), batch)
            loss.backward()
            return loss

        first.append(float(optimizer.step(closure).detach()))
    trained, logger = Net(), InMemoryLogger()
    with make(model=trained, optimizers=lbfgs(trained), loggers=logger, max_duration="1ep") as trainer:
        trainer.fit()
        assert_same(model.state_dict(), parameters(trainer))
        assert [loss for _, loss in logger.data["loss/train/total"]] == first


def test_the_parts_that_lbfgs_logs_are_those_of_the_loss_before_the_update():
    class Parts(Net):
        def loss(self, outputs, batch):
            return {"cross_entropy": super().loss(outputs, batch)}

    model, logger = Parts(), InMemoryLogger()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    with make(model=model, optimizers=optimizer, loggers=logger, max_duration="3ba") as trainer:
        trainer.fit()
    assert logger.data["loss/train/cross_entropy"] == logger.data["loss/train/total"]


def test_gradients_are_clipped_in_each_evaluation_of_a_closure():
    norms = []

    class Clip(Algorithm):
        def match(self, event, state):
            return event is Event.AFTER_TRAIN_BATCH

        def apply(self, event, state, logger):
            torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1e-3)
            norms.append(1)

    recorder = Recorder()
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=3)
    with make(
        model=model, optimizers=optimizer, algorithms=Clip(), callbacks=recorder, max_duration="1ba"
    ) as trainer:
        trainer.fit()
    forwards = recorder.events.count(Event.BEFORE_FORWARD)
    assert forwards == len(norms) > 1


def test_a_closure_step_with_fp16_or_several_optimizers_raises():
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(TrainerConfigError, match=r"`LBFGS`.*`precision` is `amp_fp16`"):
        make(model=model, optimizers=optimizer, precision="amp_fp16")


class TwoSteps(torch.optim.Optimizer):
    """SAM as it is often written: its `closure` has the default None, and is called at the moved weights."""

    def __init__(self, parameters, rho=0.3):
        super().__init__(parameters, {"rho": rho, "lr": 0.2})

    @torch.no_grad()
    def first_step(self):
        parameters = self.param_groups[0]["params"]
        norm = torch.stack([one.grad.norm() for one in parameters]).norm()
        for one in parameters:
            self.state[one]["old"] = one.clone()
            one.add_(one.grad * (self.param_groups[0]["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for one in self.param_groups[0]["params"]:
            one.copy_(self.state[one]["old"])
            one.sub_(self.param_groups[0]["lr"] * one.grad)
        self.zero_grad()

    def step(self, closure=None):
        assert closure is not None, "SAM requires closure"
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


class Extragradient(TwoSteps):
    """An optimizer whose closure is required, and called once before and once after a first step."""

    first_step = second_step = None

    def step(self, closure):
        loss = closure()
        TwoSteps.first_step(self)
        closure()
        TwoSteps.second_step(self)
        return loss


class Guesses(TwoSteps):
    """An optimizer that moves the weights before it asks for the first loss."""

    first_step = second_step = None

    def step(self, closure):
        parameters = self.param_groups[0]["params"]
        for one in parameters:
            one.data.add_(0.1)
        closure()
        for one in parameters:
            one.data.sub_(0.1).sub_(one.grad, alpha=0.2)


@pytest.mark.parametrize("kind", [TwoSteps, Extragradient, Guesses])
@pytest.mark.parametrize("size", [None, 2])
def test_an_optimizer_that_needs_a_closure_trains_as_in_a_plain_loop(kind, size):
    model = Net()
    optimizer = kind(model.parameters())
    for batch in loader():

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = model.loss(model(batch), batch)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)
    trained = Net()
    with make(
        model=trained,
        optimizers=kind(trained.parameters()),
        device_train_microbatch_size=size,
        max_duration="1ep",
    ) as trainer:
        trainer.fit()
        for name, value in parameters(trainer).items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_a_closure_step_may_be_chosen_and_a_function_cannot_serve_one():
    class Unsaid(Extragradient):
        def step(self, closure=None):
            return super().step(closure)

    results = []
    for kind, arguments in ((Unsaid, {"train_step": ClosureStep}), (Extragradient, {})):
        model = Net()
        with make(
            model=model, optimizers=kind(model.parameters()), max_duration="3ba", **arguments
        ) as trainer:
            trainer.fit()
            results.append(parameters(trainer))
    assert_same(*results)
    model = Net()
    with pytest.raises(TrainerConfigError, match="`Extragradient` evaluates the loss within its step"):
        make(
            model=model,
            optimizers=Extragradient(model.parameters()),
            train_step=lambda state, batch: state.loss,
        )


class Wrapped:
    """Computes the gradients twice, at the parameters and at a nearby point, as SAM does."""

    def __init__(self, inner):
        self.inner = inner

    def compute_gradients(self, batch):
        loss = self.inner.compute_gradients(batch)
        model = self.inner.context.state.model
        shifts = [0.05 * parameter.grad for parameter in model.parameters()]
        with torch.no_grad():
            for parameter, shift in zip(model.parameters(), shifts, strict=True):
                parameter.add_(shift)
        self.inner.compute_gradients(batch)
        with torch.no_grad():
            for parameter, shift in zip(model.parameters(), shifts, strict=True):
                parameter.sub_(shift)
        return loss

    def update(self):
        self.inner.update()


def reference_of_wrapped(num_batches):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in list(loader())[:num_batches]:
        model.loss(model(batch), batch).backward()
        shifts = [0.05 * parameter.grad for parameter in model.parameters()]
        with torch.no_grad():
            for parameter, shift in zip(model.parameters(), shifts, strict=True):
                parameter.add_(shift)
        optimizer.zero_grad()
        model.loss(model(batch), batch).backward()
        with torch.no_grad():
            for parameter, shift in zip(model.parameters(), shifts, strict=True):
                parameter.sub_(shift)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("by", ["argument", "algorithm"])
def test_a_step_may_be_wrapped_and_compute_gradients_twice(by):
    class Wrap(Algorithm):
        def match(self, event, state):
            return event is Event.INIT

        def apply(self, event, state, logger):
            state.train_step = Wrapped(state.train_step)

    how = {"train_step": Wrapped} if by == "argument" else {"algorithms": Wrap()}
    with make(max_duration="3ba", **how) as trainer:
        assert isinstance(trainer.state.train_step, TrainStep)
        trainer.fit()
        assert_same(reference_of_wrapped(3), parameters(trainer))


def test_a_function_as_train_step_computes_the_gradients():
    def double_loss(state, batch):
        loss = 2 * state.model.loss(state.module(batch), batch)
        loss.backward()
        return loss

    logger = InMemoryLogger()
    with make(train_step=double_loss, max_duration="3ba", loggers=logger) as trainer:
        trainer.fit()
        trained = parameters(trainer)
        losses = [loss for _, loss in logger.data["loss/train/total"]]
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for batch in list(loader())[:3]:
        optimizer.zero_grad()
        loss = 2 * model.loss(model(batch), batch)
        loss.backward()
        expected.append(float(loss.detach()))
        optimizer.step()
    assert_same(model.state_dict(), trained)
    assert losses == expected


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Linear(2, 5)
        self.discriminator = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch):
        return self.discriminator(batch[0])

    def loss(self, outputs, batch):
        raise AssertionError("the step computes both losses")


class GanStep:
    """Trains the discriminator, then the generator, each with its own optimizer."""

    def __init__(self, model, generator, discriminator):
        self.model, self.optimizers = model, (discriminator, generator)

    def compute_gradients(self, batch):
        real, model = batch[0], self.model
        noise = torch.ones(len(real), 2)
        fake = model.generator(noise)
        loss = nn.functional.softplus(model.discriminator(fake.detach())).mean()
        loss = loss + nn.functional.softplus(-model.discriminator(real)).mean()
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.discriminator.parameters()]
        against = nn.functional.softplus(-model.discriminator(fake)).mean()
        against.backward()
        for parameter, gradient in zip(model.discriminator.parameters(), gradients, strict=True):
            parameter.grad = gradient
        return (loss + against).detach()

    def update(self):
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def make_gan(folder=None, **arguments):
    model = Gan()
    optimizers = {
        "generator": torch.optim.SGD(model.generator.parameters(), lr=0.1),
        "discriminator": torch.optim.Adam(model.discriminator.parameters(), lr=0.01),
    }
    schedulers = {"generator": lambda state, ssr=1.0: 0.5, "discriminator": None}
    step = GanStep(model, **optimizers)
    return make(
        model=model,
        optimizers=optimizers,
        schedulers=schedulers,
        train_step=step,
        save_folder=folder,
        **arguments,
    )


def test_a_gan_trains_two_optimizers_each_with_its_own_schedule(tmp_path):
    ends = []

    class Rates(Callback):
        def batch_end(self, state, logger):
            ends.append([optimizer.param_groups[0]["lr"] for optimizer in state.optimizers])

    with make_gan(max_duration="6ba", callbacks=Rates()) as trainer:
        trainer.fit()
        whole = parameters(trainer)
    assert ends == [[0.05, 0.01]] * 6
    with make_gan(str(tmp_path), max_duration="3ba") as trainer:
        trainer.fit()
    with make_gan(str(tmp_path), max_duration="6ba", autoresume=True) as trainer:
        assert trainer.state.timestamp.batch == "3ba"
        trainer.fit()
        assert_same(whole, parameters(trainer))


def test_an_invalid_train_step_raises():
    with pytest.raises(TrainerConfigError, match="`train_step` is a `int`"):
        make(train_step=3)
    with pytest.raises(TrainerConfigError, match="`optimizers` has a `str`"):
        make(optimizers=["adam"])


class Plain(nn.Module):
    """A plain module, which handles neither batches nor losses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = Net().layers

    def forward(self, x):
        return self.layers(x)


class WithLoss(Plain):
    """A module that returns an object with a loss, as Hugging Face's models do."""

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return SimpleNamespace(logits=logits, loss=nn.functional.cross_entropy(logits, labels))


class Swapped(Net):
    def loss(self, batch, outputs):
        return nn.functional.cross_entropy(outputs, batch[1])


def as_dicts():
    return [{"x": x, "labels": y} for x, y in loader()]


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (Plain, {"loss_fn": nn.functional.cross_entropy}),
        (Plain, {"loss_fn": nn.CrossEntropyLoss()}),
        (Plain, {"loss_fn": lambda outputs, batch: nn.functional.cross_entropy(outputs, batch[1])}),
        (Plain, {"loss_fn": nn.functional.cross_entropy, "train_dataloader": as_dicts()}),
        (WithLoss, {"train_dataloader": as_dicts()}),
        (Swapped, {}),
    ],
)
def test_any_module_trains_with_a_loss(model, arguments):
    with make(max_duration="4ba") as trainer:
        trainer.fit()
        expected = list(parameters(trainer).values())
    one = model()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
    with make(model=one, optimizers=optimizer, max_duration="4ba", **arguments) as trainer:
        trainer.fit()
        for value, other in zip(parameters(trainer).values(), expected, strict=True):
            assert torch.equal(value, other)


def test_a_loss_may_have_parts():
    class Parts(Net):
        def loss(self, outputs, batch):
            loss = nn.functional.cross_entropy(outputs, batch[1])
            return {"first": loss * 0.25, "second": loss * 0.75}

    class OneItem(Net):
        def loss(self, outputs, batch):
            return nn.functional.cross_entropy(outputs, batch[1]).reshape(1)

    class Vector(Net):
        def loss(self, outputs, batch):
            return nn.functional.cross_entropy(outputs, batch[1], reduction="none")

    class Number(Net):
        def loss(self, outputs, batch):
            return 1.0

    with make(max_duration="2ba") as trainer:
        trainer.fit()
        expected = parameters(trainer)
    with make(model=OneItem(), max_duration="2ba") as trainer:
        trainer.fit()
        assert_same(expected, parameters(trainer))
    logger = InMemoryLogger()
    options = {"loggers": logger, "device_train_microbatch_size": 3}
    with make(model=Parts(), max_duration="2ba", **options) as trainer:
        trainer.fit()
        for name, value in parameters(trainer).items():
            torch.testing.assert_close(value, expected[name])
    logged = {name: dict(points) for name, points in logger.data.items() if name.startswith("loss/train/")}
    assert logged.keys() == {"loss/train/total", "loss/train/first", "loss/train/second"}
    for batch, total in logged["loss/train/total"].items():
        assert logged["loss/train/first"][batch] == pytest.approx(total * 0.25)
        assert logged["loss/train/second"][batch] == pytest.approx(total * 0.75)
    for model, message in (
        (Vector(), r"shape \[4\]; expected a scalar"),
        (Number(), "the loss is a `float`"),
    ):
        with pytest.raises(TrainerConfigError, match=message):
            make(model=model, max_duration="1ba").fit()
