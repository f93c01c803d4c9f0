"""torch's `lr_scheduler` classes and `scale_schedule_ratio` in whole trainings."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim import SGD, lr_scheduler

from hocket.trainer import Callback, Event
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.optim import (
    CosineAnnealingScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
    WarmupStableDecayScheduler,
    load_torch_scheduler_state,
    torch_scheduler_state,
)
from support.training import FileStore, Net, Watch, make

EVERY_TORCH_SCHEDULER = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 3, 3], 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.25, total_iters=4),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10, 2.0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
}


def train(make_schedulers, fits=("10ba",), **arguments):
    """Train with the trainer, and return the learning rate of each step."""
    model, rates = Net(), []
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = make(
        model=model,
        optimizers=optimizer,
        schedulers=make_schedulers(optimizer),
        callbacks=Watch(lambda state: rates.append(optimizer.param_groups[0]["lr"])),
        **arguments,
    )
    with trainer:
        for fit in fits:
            trainer.fit(fit) if isinstance(fit, str) else fit(trainer, optimizer)
    return rates


def plain_loop(make_scheduler, steps, steps_an_epoch=1):
    """Return the learning rates of the same steps in a plain loop."""
    optimizer = SGD(Net().parameters(), lr=0.1, momentum=0.9)
    scheduler, rates = make_scheduler(optimizer), []
    for step in range(1, steps + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step % steps_an_epoch == 0:
            scheduler.step()
    return rates


@pytest.mark.parametrize("name", EVERY_TORCH_SCHEDULER)
def test_rates_equal_those_of_a_plain_loop_also_after_a_resume(name, tmp_path):
    make_scheduler = EVERY_TORCH_SCHEDULER[name]
    expected = plain_loop(make_scheduler, 11)
    arguments = {"step_schedulers_every_batch": True}
    assert train(make_scheduler, ("4ba", "7ba"), **arguments) == pytest.approx(expected)
    saved = train(
        make_scheduler,
        max_duration="6ba",
        checkpointing={"store": FileStore(tmp_path)},
        fits=("6ba",),
        **arguments,
    )
    arguments |= {"checkpointing": {"store": FileStore(tmp_path)}, "autoresume": True, "max_duration": "11ba"}
    resumed = train(make_scheduler, (lambda trainer, _: trainer.fit(),), **arguments)
    assert saved + resumed == pytest.approx(expected)


def test_torchs_schedulers_step_every_epoch_and_hockets_every_batch():
    """Rates are multiplied; an epoch has five batches."""
    by_hand = plain_loop(lambda o: lr_scheduler.ExponentialLR(o, 0.5), 15, steps_an_epoch=5)
    assert train(lambda o: lr_scheduler.ExponentialLR(o, 0.5), ("3ep",)) == pytest.approx(by_hand)
    both = train(lambda o: [lr_scheduler.ExponentialLR(o, 0.5), LinearScheduler(t_max="30ba")], ("3ep",))
    assert both == pytest.approx([rate * (1 - step / 30) for step, rate in enumerate(by_hand)])


class RateOfEach(Callback):
    """Records the learning rate at the events of a step."""

    def __init__(self):
        self.rates = {}

    def run_event(self, event, state, logger):
        if event in (Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_FORWARD, Event.BATCH_END):
            self.rates.setdefault(event, []).append(state.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize(
    "make_scheduler",
    [lambda o: LinearScheduler(t_max="4ba"), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=4)],
    ids=["ours", "torch's"],
)
def test_all_events_of_a_step_have_the_steps_rate(make_scheduler):
    noted = RateOfEach()
    optimizer = SGD((model := Net()).parameters(), lr=0.1)
    arguments = {"schedulers": make_scheduler(optimizer), "step_schedulers_every_batch": True}
    with make(model=model, optimizers=optimizer, callbacks=noted, **arguments) as trainer:
        trainer.fit("4ba")
    assert len(noted.rates) == 4
    for rates in noted.rates.values():
        assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025])


def test_several_schedulers_of_a_tutorial_work_together():
    rates = train(
        lambda o: [lr_scheduler.LinearLR(o, 0.5, total_iters=2), MultiStepScheduler(["0.3dur", "0.6dur"])],
        max_duration="10ba",
        step_schedulers_every_batch=True,
        fits=(lambda trainer, _: trainer.fit(),),
    )
    ramp = [0.05, 0.075] + [0.1] * 8
    assert rates == pytest.approx([rate * 0.1 ** ((n >= 3) + (n >= 6)) for n, rate in enumerate(ramp)])


def test_a_list_of_schedulers_is_chained():
    def chain(optimizer):
        return [lr_scheduler.ConstantLR(optimizer, 0.5, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)]

    expected = plain_loop(lambda o: lr_scheduler.ChainedScheduler(chain(o), optimizer=o), 8)
    arguments = {"step_schedulers_every_batch": True}
    assert train(chain, ("8ba",), **arguments) == pytest.approx(expected)
    halved = train(lambda o: [*chain(o), lambda state, ssr=1.0: 0.5], ("8ba",), **arguments)
    assert halved == pytest.approx([rate / 2 for rate in expected])


def test_a_rate_set_by_a_callback_is_kept():
    def set_rate(trainer, optimizer):
        trainer.fit("2ba")
        optimizer.param_groups[0]["lr"] = 0.8
        trainer.fit("3ba")

    arguments = {"step_schedulers_every_batch": True}
    rates = train(lambda o: lr_scheduler.ExponentialLR(o, 0.5), (set_rate,), **arguments)
    assert rates == pytest.approx([0.1, 0.05, 0.4, 0.2, 0.1])


def test_scale_schedule_ratio_scales_the_duration_and_every_schedule():
    """With a ratio of 0.5, the training and every schedule take half the time."""
    whole = train(
        lambda o: CosineAnnealingScheduler("20ba"),
        max_duration="20ba",
        fits=(lambda trainer, _: trainer.fit(),),
    )
    half = train(
        lambda o: CosineAnnealingScheduler("20ba"),
        max_duration="20ba",
        scale_schedule_ratio=0.5,
        fits=(lambda trainer, _: trainer.fit(),),
    )
    assert half == pytest.approx(whole[::2])
    warm = train(
        lambda o: LinearWithWarmupScheduler("4ba"),
        max_duration="2ep",
        scale_schedule_ratio=2.0,
        fits=(lambda trainer, _: trainer.fit(),),
    )
    assert len(warm) == 20
    assert warm[:5] == pytest.approx([0.0, 0.025, 0.05, 0.075, 0.1])
    assert warm[12] == pytest.approx(0.05)


def test_fit_accepts_its_own_ratio_and_schedulers():
    def fits(trainer, optimizer):
        trainer.fit("10ba", scale_schedule_ratio=0.5)
        assert trainer.state.timestamp.batch == "5ba"
        trainer.fit(
            "4ba",
            schedulers=lr_scheduler.StepLR(optimizer, 4, 0.1),
            scale_schedule_ratio=0.5,
            step_schedulers_every_batch=True,
        )
        with pytest.raises(TrainerConfigError, match="once they run"):
            trainer.fit("4ba", scale_schedule_ratio=2.0)

    rates = train(lambda o: LinearScheduler(t_max="10ba"), (fits,))
    # The new scheduler starts from the current rate, as torch's do, at the first batch of its fit.
    assert rates == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02, 0.02, 0.02])


@pytest.mark.parametrize("ratio", [0.5, 2.0])
@pytest.mark.parametrize(
    "name",
    [
        "StepLR",
        "MultiStepLR",
        "ExponentialLR",
        "CosineAnnealingLR",
        "LinearLR",
        "PolynomialLR",
        "CosineAnnealingWarmRestarts",
    ],
)
def test_torchs_schedulers_are_scaled(name, ratio):
    stretched = train(
        EVERY_TORCH_SCHEDULER[name],
        max_duration="12ba",
        scale_schedule_ratio=ratio,
        step_schedulers_every_batch=True,
        fits=(lambda trainer, _: trainer.fit(),),
    )
    expected = {
        "StepLR": lambda o: lr_scheduler.StepLR(o, int(2 * ratio), 0.5),
        "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(
            o, [int(2 * ratio), int(3 * ratio), int(3 * ratio)], 0.5
        ),
        "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9 ** (1 / ratio)),
        "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, int(10 * ratio)),
        "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.25, total_iters=int(4 * ratio)),
        "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, int(10 * ratio), 2.0),
        "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(
            o, int(3 * ratio), 2
        ),
    }[name]
    assert stretched == pytest.approx(plain_loop(expected, int(12 * ratio)))


def test_schedulers_that_cannot_be_scaled_or_run_raise():
    with pytest.raises(TrainerConfigError, match="no `schedulers` to stretch"):
        make(max_duration="2ba", scale_schedule_ratio=0.5)
    with pytest.raises(TrainerConfigError, match="`scale_schedule_ratio` is -1"):
        make(schedulers=LinearScheduler(), max_duration="2ba", scale_schedule_ratio=-1.0)
    with pytest.raises(TrainerConfigError, match="leaves nothing"):
        make(schedulers=LinearScheduler(), max_duration="2ba", scale_schedule_ratio=0.1)
    with pytest.raises(TrainerConfigError, match="`OneCycleLR` cannot be stretched"):
        train(EVERY_TORCH_SCHEDULER["OneCycleLR"], max_duration="2ba", scale_schedule_ratio=0.5)
    with pytest.raises(TrainerConfigError, match=r"name it: `MetricScheduler\(scheduler"):
        train(lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(TrainerConfigError, match="`schedulers` has a `str`"):
        make(schedulers=["cosine"])


@pytest.mark.parametrize("name", EVERY_TORCH_SCHEDULER)
def test_saved_states_of_schedulers_are_plain_and_complete(name):
    def plain(value):
        if isinstance(value, dict):
            return all(type(key) is str and plain(item) for key, item in value.items())
        return (
            all(map(plain, value))
            if type(value) is list
            else type(value) in (type(None), bool, int, float, str)
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the optimizer does not step
        first = EVERY_TORCH_SCHEDULER[name](SGD([torch.zeros(1)], lr=0.1, momentum=0.9))
        for _ in range(4):
            first.step()
        state = torch_scheduler_state(first)
        assert plain(state)
        second = EVERY_TORCH_SCHEDULER[name](SGD([torch.zeros(1)], lr=0.1, momentum=0.9))
        load_torch_scheduler_state(second, state)
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        for _ in range(6):
            first.step()
            second.step()
            assert second.get_last_lr() == first.get_last_lr()


@pytest.mark.parametrize("is_named", [False, True])
def test_decay_now_in_a_training_and_after_a_resume(tmp_path, is_named):
    def run(schedule, **arguments):
        model, rates = Net(), []
        optimizer = SGD(model.parameters(), lr=0.1)
        updates = {"optimizers": optimizer, "schedulers": schedule}
        if is_named:
            updates = {name: {"main": given} for name, given in updates.items()}

        def watch(state):
            rates.append(optimizer.param_groups[0]["lr"])
            if state.timestamp.batch == "4ba" and "autoresume" not in arguments:
                schedule.decay_now(state, "4ba")

        with make(model=model, callbacks=Watch(watch), **updates, **arguments) as trainer:
            trainer.fit()
        return rates

    expected = [0.0, 0.05, 0.1, 0.1, 0.1, 0.075, 0.05, 0.025]
    make_schedule = WarmupStableDecayScheduler
    assert run(make_schedule("2ba"), max_duration="100ba") == pytest.approx(expected)
    store = {"checkpointing": {"store": FileStore(tmp_path)}, "save_interval": "6ba"}
    run(make_schedule("2ba"), max_duration="100ba", **store)
    (tmp_path / "ep1-ba8").unlink()
    resumed = run(make_schedule("2ba"), max_duration="8ba", autoresume=True, **store)
    assert resumed == pytest.approx(expected[6:])
