"""Schedules against their formulas, and the learning rates that they set."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.trainer.errors import TimeUnitError, TimeValueError, TrainerConfigError
from hocket.trainer.optim import (
    BatchSizeWarmupScheduler,
    ConstantScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWarmRestartsScheduler,
    CosineAnnealingWithWarmupScheduler,
    ExponentialScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
    MultiStepWithWarmupScheduler,
    PolynomialScheduler,
    PolynomialWithWarmupScheduler,
    Scheduler,
    StepScheduler,
    WarmupStableDecayScheduler,
    apply_schedulers,
)
from hocket.trainer.time import Time, ensure_time
from hocket.trainer.timestamp import Timestamp


@dataclass
class _State:
    timestamp: Timestamp = field(default_factory=Timestamp)
    max_duration: Time | None = None
    dataloader_len: Time | int | None = None
    optimizers: list = field(default_factory=list)
    schedulers: list = field(default_factory=list)
    scale_schedule_ratio: float = 1.0
    step_schedulers_every_batch: bool | None = None


def at(batch, max_duration="100ba", dataloader_len=None):
    return _State(
        Timestamp(batch=batch, sample=8 * batch), max_duration and ensure_time(max_duration), dataloader_len
    )


alphas = st.floats(0.0, 2.0)


@given(now=st.integers(0, 300), t_max=st.integers(1, 200), alpha_f=alphas)
def test_cosine_equals_torchs_cosine(now, t_max, alpha_f):
    parameter = torch.zeros(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, t_max, eta_min=alpha_f)
    reference.last_epoch = min(now, t_max)
    (expected,) = reference._get_closed_form_lr()
    assert CosineAnnealingScheduler(f"{t_max}ba", alpha_f)(at(now)) == pytest.approx(expected, abs=1e-9)


@given(now=st.integers(0, 300), t_max=st.integers(1, 200), alpha_i=alphas, alpha_f=alphas)
def test_linear_equals_the_formula(now, t_max, alpha_i, alpha_f):
    share = min(now, t_max) / t_max
    expected = alpha_i * (1 - share) + alpha_f * share
    assert LinearScheduler(alpha_i, alpha_f, t_max=f"{t_max}ba")(at(now)) == pytest.approx(expected, abs=1e-9)


def test_constant_scheduler_applies_until_its_end():
    assert [ConstantScheduler(0.5, "10ba")(at(batch)) for batch in (0, 9, 10, 50)] == [0.5, 0.5, 1.0, 1.0]


@given(
    warmup=st.integers(1, 50),
    rest=st.integers(1, 100),
    now=st.integers(0, 200),
    alpha_i=alphas,
    alpha_f=alphas,
)
def test_after_a_warmup_the_schedule_runs_over_the_remaining_time(warmup, rest, now, alpha_i, alpha_f):
    t_max = warmup + rest
    share = min(1.0, max(0.0, (now - warmup) / rest))
    cosine = CosineAnnealingWithWarmupScheduler(f"{warmup}ba", f"{t_max}ba", alpha_f=alpha_f)
    line = LinearWithWarmupScheduler(f"{warmup}ba", alpha_i, alpha_f=alpha_f, t_max=f"{t_max}ba")
    constant = ConstantWithWarmupScheduler(f"{warmup}ba", alpha_i, t_max=f"{t_max}ba")
    if now < warmup:
        expected = (now / warmup, alpha_i * now / warmup, alpha_i * now / warmup)
    else:
        expected = (
            alpha_f + (1 - alpha_f) * (1 + math.cos(math.pi * share)) / 2,
            alpha_i + (alpha_f - alpha_i) * share,
            alpha_i,
        )
    assert [cosine(at(now)), line(at(now)), constant(at(now))] == pytest.approx(expected, abs=1e-9)


@given(
    warmup=st.integers(1, 50), rest=st.integers(1, 100), alpha_f=st.floats(0.0, 1.0), now=st.integers(0, 200)
)
def test_warmup_is_continuous_and_stays_in_bounds(warmup, rest, alpha_f, now):
    schedule = CosineAnnealingWithWarmupScheduler(f"{warmup}ba", f"{warmup + rest}ba", alpha_f=alpha_f)
    here, there = schedule(at(now)), schedule(at(now + 1))
    assert 0.0 <= here <= 1.0
    # The steepest parts are the warmup and the middle of the cosine.
    assert abs(there - here) <= max(1 / warmup, math.pi / 2 / rest) + 1e-9
    assert schedule(at(warmup)) == 1.0


def test_schedules_accept_times_in_any_unit():
    whole = CosineAnnealingScheduler()
    assert whole(at(50)) == pytest.approx(0.5)
    assert whole(at(50, "800sp")) == pytest.approx(0.5)
    assert whole(at(50, "4ep", dataloader_len=25)) == pytest.approx(0.5)
    assert whole(at(50, "4ep", dataloader_len=Time(25, "ba"))) == pytest.approx(0.5)
    assert LinearScheduler(t_max="2ep")(at(25, "9ep", dataloader_len=25)) == pytest.approx(0.5)
    warm = LinearWithWarmupScheduler("0.1dur")
    assert [warm(at(batch)) for batch in (0, 5, 10, 55, 100)] == pytest.approx([0, 0.5, 1, 0.5, 0])


def test_the_scale_schedule_ratio_stretches_all_but_warmup_and_shares():
    assert LinearScheduler(t_max="100ba")(at(25), 0.5) == pytest.approx(0.5)
    assert LinearScheduler(t_max="1dur")(at(25), 0.5) == pytest.approx(0.75)
    plain = CosineAnnealingWithWarmupScheduler("20ba", "100ba")
    scaled = CosineAnnealingWithWarmupScheduler("20ba", "100ba", scale_warmup=True)
    assert plain(at(10), 0.5) == pytest.approx(0.5)
    assert scaled(at(10), 0.5) == pytest.approx(1.0)
    assert plain(at(50), 0.5) == scaled(at(50), 0.5) == pytest.approx(0.0)


def test_invalid_times_raise():
    with pytest.raises(TimeUnitError, match="clock"):
        LinearScheduler(t_max="1h")(at(1))
    with pytest.raises(TimeUnitError, match="`max_duration` is not set"):
        LinearScheduler()(at(1, None))
    with pytest.raises(TimeUnitError, match="no length"):
        LinearScheduler(t_max="3ep")(at(1))
    with pytest.raises(TimeUnitError, match="`t_warmup`"):
        LinearWithWarmupScheduler("10sp")(at(1))
    with pytest.raises(TimeValueError, match="-1ba"):
        LinearWithWarmupScheduler("-1ba")
    with pytest.warns(UserWarning, match="warmup of zero"):
        schedule = CosineAnnealingWithWarmupScheduler("0ba")
    assert schedule(at(0)) == 1.0


def test_rates_are_the_initial_rates_times_all_multipliers():
    parameters = [torch.zeros(1), torch.zeros(1)]
    optimizer = torch.optim.AdamW(
        [{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:]}], lr=0.25
    )
    state = at(25)
    state.optimizers = [optimizer]
    apply_schedulers(state)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    state.schedulers = [LinearScheduler(), lambda state, ssr=1.0: 0.5]
    assert all(isinstance(schedule, Scheduler) for schedule in state.schedulers)
    for _ in range(3):
        apply_schedulers(state)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5 * 0.375, 0.25 * 0.375])
    state.timestamp = Timestamp(batch=50)
    apply_schedulers(state, ssr=1.0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5 * 0.25, 0.25 * 0.25])


def test_rates_that_are_tensors_are_filled_in_place():
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([torch.zeros(1)], lr=rate, capturable=False, foreach=False)
    state = at(50)
    state.optimizers, state.schedulers = [optimizer], [LinearScheduler()]
    apply_schedulers(state)
    apply_schedulers(state)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_schedules_may_advance_by_epochs():
    state = at(17, dataloader_len=5)
    state.timestamp = Timestamp(epoch=3, batch=17, batch_in_epoch=2, sample=170, sample_in_epoch=20)
    state.optimizers, state.schedulers = [torch.optim.SGD([torch.zeros(1)], lr=1.0)], [LinearScheduler()]
    state.step_schedulers_every_batch = False
    apply_schedulers(state)
    assert state.optimizers[0].param_groups[0]["lr"] == pytest.approx(1 - 15 / 100)


def test_a_resumed_run_has_the_same_rates():
    def rates(batches, state_dict=None):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
        if state_dict:
            optimizer.load_state_dict(state_dict)
        seen = []
        for batch in batches:
            state = at(batch)
            state.optimizers, state.schedulers = [optimizer], [CosineAnnealingWithWarmupScheduler("7ba")]
            apply_schedulers(state)
            seen.append(optimizer.param_groups[0]["lr"])
        return seen, optimizer.state_dict()

    whole, _ = rates(range(100))
    first, saved = rates(range(33))
    assert first + rates(range(33, 100), saved)[0] == whole


def torchs_rates(scheduler, steps):
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


def sgd():
    return torch.optim.SGD([torch.zeros(1)], lr=1.0)


@settings(max_examples=30)
@given(step=st.integers(1, 20), gamma=st.floats(0.1, 1.0), milestones=st.sets(st.integers(1, 40), max_size=4))
def test_step_schedules_equal_torchs(step, gamma, milestones):
    step_lr = torch.optim.lr_scheduler.StepLR(sgd(), step, gamma)
    multi_lr = torch.optim.lr_scheduler.MultiStepLR(sgd(), sorted(milestones), gamma)
    exponential_lr = torch.optim.lr_scheduler.ExponentialLR(sgd(), gamma)
    ours = [
        StepScheduler(f"{step}ba", gamma),
        MultiStepScheduler([f"{milestone}ba" for milestone in milestones], gamma),
        ExponentialScheduler(gamma, "1ba"),
    ]
    for schedule, theirs in zip(ours, (step_lr, multi_lr, exponential_lr), strict=True):
        assert [schedule(at(now)) for now in range(50)] == pytest.approx(torchs_rates(theirs, 50), rel=1e-6)


@settings(max_examples=30)
@given(t_0=st.integers(1, 20), t_mult=st.integers(1, 3), alpha_f=st.floats(0.0, 1.0))
def test_warm_restarts_equal_torchs(t_0, t_mult, alpha_f):
    theirs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(sgd(), t_0, t_mult, eta_min=alpha_f)
    ours = CosineAnnealingWarmRestartsScheduler(f"{t_0}ba", t_mult, alpha_f=alpha_f)
    assert [ours(at(now)) for now in range(60)] == pytest.approx(torchs_rates(theirs, 60), abs=1e-9)


@settings(max_examples=30)
@given(t_max=st.integers(1, 60), power=st.floats(0.5, 3.0))
def test_polynomial_equals_torchs(t_max, power):
    theirs = torch.optim.lr_scheduler.PolynomialLR(sgd(), t_max, power)
    ours = PolynomialScheduler(power, f"{t_max}ba")
    assert [ours(at(now)) for now in range(60)] == pytest.approx(torchs_rates(theirs, 60), abs=1e-6)


@given(warmup=st.integers(1, 20), rest=st.integers(1, 40), power=st.floats(0.5, 3.0), now=st.integers(0, 80))
def test_polynomial_and_step_schedules_after_a_warmup_equal_the_formulas(warmup, rest, power, now):
    t_max = warmup + rest
    decay = PolynomialWithWarmupScheduler(f"{warmup}ba", power, t_max=f"{t_max}ba", alpha_f=0.1)
    steps = MultiStepWithWarmupScheduler(f"{warmup}ba", [f"{t_max}ba", "1ba"], gamma=0.5)
    if now < warmup:
        assert decay(at(now)) == steps(at(now)) == pytest.approx(now / warmup)
    else:
        share = min(1.0, (now - warmup) / rest)
        assert decay(at(now)) == pytest.approx(0.1 + 0.9 * (1 - share) ** power)
        assert steps(at(now)) == 0.5 ** (1 + (now >= t_max))


EVERY_SCHEDULE = {
    "constant": lambda time: ConstantScheduler(0.5, time),
    "linear": lambda time: LinearScheduler(t_max=time),
    "cosine": lambda time: CosineAnnealingScheduler(time),
    "polynomial": lambda time: PolynomialScheduler(2.0, time),
    "step": lambda time: StepScheduler(time, 0.5),
    "multistep": lambda time: MultiStepScheduler([time], 0.5),
    "exponential": lambda time: ExponentialScheduler(0.5, time),
    "restarts": lambda time: CosineAnnealingWarmRestartsScheduler(time, 2.0),
    "constant with warmup": lambda time: ConstantWithWarmupScheduler(time, t_max="200ba"),
    "linear with warmup": lambda time: LinearWithWarmupScheduler(time, t_max="200ba"),
    "cosine with warmup": lambda time: CosineAnnealingWithWarmupScheduler(time, "200ba"),
    "polynomial with warmup": lambda time: PolynomialWithWarmupScheduler(time, t_max="200ba"),
    "multistep with warmup": lambda time: MultiStepWithWarmupScheduler(time, ["150ba"]),
    "warmup stable decay": lambda time: WarmupStableDecayScheduler(time, "20ba", t_max="200ba"),
}


@pytest.mark.parametrize("name", EVERY_SCHEDULE)
@settings(max_examples=25)
@given(epochs=st.integers(1, 5), epoch_len=st.integers(1, 9), now=st.integers(0, 60))
def test_a_length_gives_the_same_schedule_in_any_unit(name, epochs, epoch_len, now):
    make, batches = EVERY_SCHEDULE[name], epochs * epoch_len
    state = at(now, f"{batches}ba", dataloader_len=epoch_len)
    expected = make(f"{batches}ba")(state)
    assert make(f"{epochs}ep")(state) == expected
    assert make("1dur")(state) == expected
    state.max_duration = ensure_time(f"{epochs}ep")
    assert make("1dur")(state) == expected
    # A batch is 8 samples and 64 tokens; the schedules' other times, such as `200ba`, stay in batches.
    state.timestamp = Timestamp(batch=now, sample=8 * now, token=64 * now)
    if "with" not in name and "stable" not in name:
        assert make(f"{8 * batches}sp")(state) == pytest.approx(expected)
        assert make(f"{64 * batches}tok")(state) == pytest.approx(expected)


@pytest.mark.parametrize("name", EVERY_SCHEDULE)
@settings(max_examples=25)
@given(now=st.integers(0, 90), ratio=st.sampled_from([0.25, 0.5, 2.0, 4.0]))
def test_a_scaled_schedule_equals_the_schedule_at_the_scaled_time(name, now, ratio):
    """A ratio of 0.5 evaluates every schedule at t / 0.5; a warmup is not scaled."""
    schedule = EVERY_SCHEDULE[name]("24ba")
    if "warmup" in name:
        past = max(now, 24)  # after the warmup, scaled or not
        if ratio * 150 > past:
            return
        assert schedule(at(2000), ratio) == schedule(at(2000))
    else:
        assert schedule(at(int(now * ratio) if ratio > 1 else now), ratio) == pytest.approx(
            schedule(at(now if ratio > 1 else int(now / ratio)))
        )


@given(
    warmup=st.integers(0, 20), stable=st.integers(0, 40), decay=st.integers(1, 30), now=st.integers(0, 120)
)
def test_warmup_stable_decay_equals_the_formula(warmup, stable, decay, now):
    end = warmup + stable + decay
    shapes = {"linear": lambda s: 1 - s, "cosine": lambda s: (1 + math.cos(math.pi * s)) / 2}
    for shape, value in {**shapes, "sqrt": lambda s: 1 - math.sqrt(s)}.items():
        make = WarmupStableDecayScheduler
        if warmup == 0:
            with pytest.warns(UserWarning, match="warmup of zero"):
                schedule = make("0ba", f"{decay}ba", t_max=f"{end}ba", decay=shape)
        else:
            schedule = make(f"{warmup}ba", f"{decay}ba", t_max=f"{end}ba", decay=shape)
        if now < warmup:
            expected = now / warmup
        elif now < warmup + stable:
            expected = 1.0
        else:
            expected = value(min(1.0, (now - warmup - stable) / decay))
        assert schedule(at(now)) == pytest.approx(expected, abs=1e-9)


def test_decay_now_ends_training_and_is_stored():
    schedule = WarmupStableDecayScheduler("10ba", "0.2dur")
    state = at(40, "100ba")
    assert schedule(state) == 1.0
    assert schedule.decay_now(state) == state.max_duration == Time(60, "ba")
    assert [schedule(at(now, "60ba")) for now in (40, 45, 50, 60, 70)] == [1.0, 0.75, 0.5, 0.0, 0.0]
    resumed = WarmupStableDecayScheduler("10ba", "0.2dur")
    resumed.load_state_dict(schedule.state_dict())
    assert [resumed(at(now, "60ba")) for now in (40, 45, 50, 60)] == [1.0, 0.75, 0.5, 0.0]
    assert WarmupStableDecayScheduler("10ba").state_dict() == {}
    # A decay that starts within the warmup multiplies the rate that the warmup has reached.
    early = WarmupStableDecayScheduler("10ba")
    early.decay_now(at(5), "10ba")
    assert [early(at(now)) for now in (5, 10, 15)] == [0.5, 0.5, 0.0]
    with pytest.raises(TimeValueError, match="`decay` is `steep`"):
        WarmupStableDecayScheduler("1ba", decay="steep")
    with pytest.raises(TimeUnitError, match="`t_decay`"):
        WarmupStableDecayScheduler("1ba", "10sp")(at(1))


@given(
    initial=st.integers(1, 8), growth=st.integers(0, 12), unit=st.integers(1, 16), sample=st.integers(0, 3000)
)
def test_batch_sizes_grow_in_equal_steps(initial, growth, unit, sample):
    first, last = initial * unit, (initial + growth) * unit
    schedule = BatchSizeWarmupScheduler(first, last, t_warmup="2000sp", multiple_of=unit)

    def size(sample):
        return schedule(_State(Timestamp(sample=sample)))

    assert size(0) == first
    assert size(2000) == size(10_000) == last
    assert size(sample) % unit == 0
    assert size(sample) <= size(sample + 1) <= last
    assert size(sample) == first + unit * (growth * min(sample, 2000) // 2000)


def test_invalid_schedules_raise():
    with pytest.raises(TimeValueError, match="`step_size`"):
        StepScheduler("0ba")
    with pytest.raises(TimeValueError, match="comes to less than one"):
        StepScheduler("0.001dur")(at(1))
    with pytest.raises(TimeValueError, match="`t_mult`"):
        CosineAnnealingWarmRestartsScheduler("1ba", 0.5)
    with pytest.raises(TimeValueError, match="`initial` is 10"):
        BatchSizeWarmupScheduler(10, 16, t_warmup="1ep", multiple_of=4)
    with pytest.raises(TimeValueError, match="below"):
        BatchSizeWarmupScheduler(16, 8, t_warmup="1ep")


@pytest.mark.parametrize(
    ("schedule", "name", "arguments"),
    [
        (ConstantScheduler, "t_max", {}),
        (LinearScheduler, "t_max", {}),
        (CosineAnnealingScheduler, "t_max", {}),
        (PolynomialScheduler, "t_max", {"power": 2.0}),
        (LinearWithWarmupScheduler, "t_max", {"t_warmup": "1ba"}),
        (CosineAnnealingWithWarmupScheduler, "t_max", {"t_warmup": "1ba"}),
        (WarmupStableDecayScheduler, "t_max", {"t_warmup": "1ba"}),
        (MultiStepScheduler, "milestones", {}),
        (MultiStepWithWarmupScheduler, "milestones", {"t_warmup": "1ba"}),
        (BatchSizeWarmupScheduler, "t_warmup", {"initial": 8, "final": 16}),
    ],
)
def test_a_negative_time_is_refused_where_it_is_given(schedule, name, arguments):
    with pytest.raises(TimeValueError, match=f"`{name}` is `-1ba`; expected a time of zero or more"):
        schedule(**arguments, **{name: "-1ba"})


@pytest.mark.parametrize(
    ("schedule", "name", "arguments"),
    [
        (ConstantScheduler, "alpha", {}),
        (LinearScheduler, "alpha_i", {}),
        (LinearScheduler, "alpha_f", {}),
        (CosineAnnealingScheduler, "alpha_f", {}),
        (PolynomialScheduler, "power", {}),
        (StepScheduler, "gamma", {"step_size": "1ba"}),
        (ExponentialScheduler, "gamma", {}),
        (CosineAnnealingWarmRestartsScheduler, "t_mult", {"t_0": "1ba"}),
        (PolynomialWithWarmupScheduler, "power", {"t_warmup": "1ba"}),
        (ConstantWithWarmupScheduler, "alpha", {"t_warmup": "1ba"}),
        (WarmupStableDecayScheduler, "alpha_f", {"t_warmup": "1ba"}),
    ],
)
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_no_finite_number_is_refused_where_it_is_given(schedule, name, arguments, number):
    with pytest.raises((TimeValueError, TrainerConfigError), match=f"`{name}` is {number}; expected"):
        schedule(**arguments, **{name: number})
