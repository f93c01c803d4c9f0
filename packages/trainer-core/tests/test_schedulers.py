"""Schedules against the formulas they are named after, and the learning rates they set."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.trainer.errors import TimeUnitError, TimeValueError
from hocket.trainer.optim import (
    ConstantScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    Scheduler,
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


def at(batch, max_duration="100ba", dataloader_len=None):
    return _State(
        Timestamp(batch=batch, sample=8 * batch), max_duration and ensure_time(max_duration), dataloader_len
    )


alphas = st.floats(0.0, 2.0)


@given(now=st.integers(0, 300), t_max=st.integers(1, 200), alpha_f=alphas)
def test_cosine_is_torchs_cosine(now, t_max, alpha_f):
    parameter = torch.zeros(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, t_max, eta_min=alpha_f)
    reference.last_epoch = min(now, t_max)
    (expected,) = reference._get_closed_form_lr()
    assert CosineAnnealingScheduler(f"{t_max}ba", alpha_f)(at(now)) == pytest.approx(expected, abs=1e-9)


@given(now=st.integers(0, 300), t_max=st.integers(1, 200), alpha_i=alphas, alpha_f=alphas)
def test_linear(now, t_max, alpha_i, alpha_f):
    share = min(now, t_max) / t_max
    expected = alpha_i * (1 - share) + alpha_f * share
    assert LinearScheduler(alpha_i, alpha_f, t_max=f"{t_max}ba")(at(now)) == pytest.approx(expected, abs=1e-9)


def test_constant_until_its_end():
    assert [ConstantScheduler(0.5, "10ba")(at(batch)) for batch in (0, 9, 10, 50)] == [0.5, 0.5, 1.0, 1.0]


@given(
    warmup=st.integers(1, 50),
    rest=st.integers(1, 100),
    now=st.integers(0, 200),
    alpha_i=alphas,
    alpha_f=alphas,
)
def test_warmup_then_the_schedule_over_what_is_left(warmup, rest, now, alpha_i, alpha_f):
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
def test_warmup_has_no_jump_and_stays_in_bounds(warmup, rest, alpha_f, now):
    schedule = CosineAnnealingWithWarmupScheduler(f"{warmup}ba", f"{warmup + rest}ba", alpha_f=alpha_f)
    here, there = schedule(at(now)), schedule(at(now + 1))
    assert 0.0 <= here <= 1.0
    # The steepest parts are the warmup and the middle of the cosine.
    assert abs(there - here) <= max(1 / warmup, math.pi / 2 / rest) + 1e-9
    assert schedule(at(warmup)) == 1.0


def test_times_in_other_units():
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


def test_times_that_cannot_be_followed():
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


def test_rates_are_the_initial_ones_times_every_multiplier():
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


def test_torchs_own_schedulers_are_refused_by_name():
    state = at(1)
    state.optimizers = [torch.optim.SGD([torch.zeros(1)], lr=0.1)]
    state.schedulers = [torch.optim.lr_scheduler.StepLR(state.optimizers[0], 3)]
    with pytest.raises(TypeError, match="`StepLR`"):
        apply_schedulers(state)
