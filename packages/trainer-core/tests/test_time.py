"""`Time`, `Timestamp` and `every`: formats, arithmetic, order, intervals."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.trainer.errors import TimeUnitError, TimeValueError
from hocket.trainer.interval import every
from hocket.trainer.time import Time, TimeUnit, describe_seconds, ensure_time
from hocket.trainer.timestamp import Timestamp

whole_units = st.sampled_from([unit for unit in TimeUnit if unit is not TimeUnit.DURATION])
counts = st.integers(-(2**63), 2**63 - 1)
times = st.one_of(
    st.builds(Time, counts, whole_units),
    st.builds(Time, st.floats(allow_nan=False, allow_infinity=False), st.just(TimeUnit.DURATION)),
)


@given(times)
def test_a_time_round_trips_through_text_and_pickle(time):
    assert Time.from_timestring(str(time)) == time
    assert type(Time.from_timestring(str(time)).value) is type(time.value)
    assert pickle.loads(pickle.dumps(time)) == time


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("10ep", 10, "ep"),
        ("100ba", 100, "ba"),
        ("3e4tok", 30_000, "tok"),
        ("9007199254740993sp", 2**53 + 1, "sp"),
        ("1.5e1ba", 15, "ba"),
        ("0.5dur", 0.5, "dur"),
        ("1dur", 1.0, "dur"),
        ("90sec", 90, "sec"),
        ("1h30m10s", 5410, "sec"),
        ("2h30m", 9000, "sec"),
        ("45s", 45, "sec"),
        (" 2 EP ", 2, "ep"),
    ],
)
def test_time_strings_are_parsed(text, value, unit):
    assert Time.from_timestring(text) == Time(value, unit)


@pytest.mark.parametrize(
    "text",
    ["", "ep", "10", "10xx", "1.5ep", "1e-1ba", "h", "1m1h", "nandur", "infdur", "1e9999ba", "10 e p", "٣ep"],
)
def test_invalid_time_strings_raise_with_their_text(text):
    with pytest.raises(TimeValueError) as raised:
        Time.from_timestring(text)
    assert f"`{text}`" in str(raised.value)


@given(hours=st.integers(0, 999), minutes=st.integers(0, 999), seconds=st.integers(0, 999))
def test_wall_clock_spans_are_parsed(hours, minutes, seconds):
    span = Time.from_timestring(f"{hours}h{minutes}m{seconds}s")
    assert span == Time(hours * 3600 + minutes * 60 + seconds, "sec")


@given(counts, counts, whole_units)
def test_arithmetic_and_order_equal_those_of_the_numbers(left, right, unit):
    a, b = Time(left, unit), Time(right, unit)
    assert (a + b).value == left + right
    assert (a - b).value == left - right
    assert (a < b, a <= b, a > b, a >= b, a == b) == (
        left < right,
        left <= right,
        left > right,
        left >= right,
        left == right,
    )
    assert a + right == left + b == f"{left + right}{unit.value}"
    if right:
        assert (a % b).value == left % right
        assert (a / b).unit is TimeUnit.DURATION


@given(times, times)
def test_mixing_units_raises(a, b):
    if a.unit is b.unit:
        return
    assert a != b
    for operation in (
        lambda: a < b,
        lambda: a >= b,
        lambda: a + b,
        lambda: a - b,
        lambda: a % b,
        lambda: a / b,
    ):
        with pytest.raises(TimeUnitError):
            operation()


@given(st.integers(0, 1000), st.integers(1, 10**12))
def test_a_decimal_share_of_a_span_is_exact(thousandths, length):
    assert (Time(length, "ba") * (thousandths / 1000)).value == thousandths * length // 1000
    assert Time(thousandths / 1000, "dur") * Time(length, "ba") == Time(thousandths * length // 1000, "ba")


@given(st.integers(-5, 5), whole_units)
def test_hash_agrees_with_equality(value, unit):
    assert len({Time(value, unit), Time(value, unit), value}) == 1


@pytest.mark.parametrize("bad", [1.5, 2.0, "3", None, True, float("nan")])
def test_integer_units_accept_integers_only(bad):
    with pytest.raises(TimeValueError) as raised:
        Time(bad, "ep")
    assert isinstance(raised.value, TypeError)
    assert isinstance(raised.value, ValueError)


def test_a_number_without_a_unit_raises():
    assert ensure_time(3, TimeUnit.EPOCH) == Time(3, "ep")
    assert ensure_time("3ba", TimeUnit.EPOCH) == Time(3, "ba")
    with pytest.raises(TimeValueError, match="no unit"):
        ensure_time(3)


def test_a_time_is_immutable():
    with pytest.raises(AttributeError):
        Time(1, "ep").value = 2
    with pytest.raises(AttributeError, match="copy"):
        Timestamp().batch = 2


steps = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 10**12), st.integers(0, 10**12), st.floats(0, 1e6)),
        st.just("epoch"),
        st.just("iteration"),
    ),
    max_size=30,
)


@given(steps)
def test_a_timestamp_counts_batches_samples_tokens_and_epochs(history):
    now = Timestamp()
    total = {"batch": 0, "sample": 0, "token": 0, "epoch": 0}
    in_epoch = {"batch": 0, "sample": 0, "token": 0}
    for step in history:
        if step == "epoch":
            now = now.to_next_epoch()
            total["epoch"] += 1
            in_epoch = dict.fromkeys(in_epoch, 0)
        elif step == "iteration":
            now = now.to_next_iteration()
            assert now.epoch_in_iteration == 0
        else:
            samples, tokens, duration = step
            now = now.to_next_batch(samples=samples, tokens=tokens, duration=duration)
            for each in (total, in_epoch):
                each["batch"] += 1
                each["sample"] += samples
                each["token"] += tokens
            assert now.batch_wct == timedelta(seconds=duration)
        assert {name: getattr(now.counts, name) for name in total} == total
        assert {name: getattr(now.counts, f"{name}_in_epoch") for name in in_epoch} == in_epoch
    assert now.get("tok") == Time(total["token"], "tok")
    assert Timestamp.from_state_dict(json.loads(json.dumps(now.state_dict()))) == now
    assert pickle.loads(pickle.dumps(now)) == now


def test_a_timestamp_compares_in_the_unit_of_the_other_operand():
    now = Timestamp(epoch=2, batch=Time(20, "ba"), sample=640, total_wct=timedelta(seconds=61.5))
    assert now >= "2ep"
    assert now < Time(3, "ep")
    assert now > "19ba"
    assert now <= "640sp"
    assert now.get(TimeUnit.SECOND) == Time(61, "sec")
    assert now.copy(epoch=5) == Timestamp(epoch=5, batch=20, sample=640, total_wct=61.5)
    with pytest.raises(TimeUnitError):
        now.get("dur")
    with pytest.raises(TimeUnitError):
        Timestamp(epoch=Time(1, "ba"))
    with pytest.raises(TimeValueError, match="`steps`"):
        Timestamp(steps=3)


class _Event(Enum):
    BATCH_END = "batch_end"
    BATCH_CHECKPOINT = "batch_checkpoint"
    EPOCH_END = "epoch_end"
    EPOCH_CHECKPOINT = "epoch_checkpoint"


@dataclass
class _State:
    max_duration: Time | None
    dataloader_len: int | None
    timestamp: Timestamp = field(default_factory=Timestamp)
    previous_timestamp: Timestamp = field(default_factory=Timestamp)


def fired_batches(is_time, max_duration, *, epoch_len, start=None):
    """Run the events of a training; return the (batch, event) pairs for which `is_time` returned true."""
    state = _State(ensure_time(max_duration), epoch_len)
    state.timestamp = start or Timestamp()
    fired = []

    def fire(event):
        if is_time(state, event):
            fired.append((state.timestamp.counts.batch, event.value))

    while state.timestamp < state.max_duration:
        state.previous_timestamp, state.timestamp = (
            state.timestamp,
            state.timestamp.to_next_batch(samples=3, tokens=7, duration=0.5),
        )
        fire(_Event.BATCH_END)
        fire(_Event.BATCH_CHECKPOINT)
        if state.timestamp.batch_in_epoch == epoch_len:
            state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.to_next_epoch()
            fire(_Event.EPOCH_END)
            fire(_Event.EPOCH_CHECKPOINT)
    return fired


@pytest.mark.parametrize(
    ("interval", "batches"),
    [
        ("4ba", [4, 8, 12]),
        (1, [5, 10]),
        ("2ep", [10]),
        ("10sp", [4, 7, 10]),
        ("70tok", [10]),
        ("2sec", [4, 8, 12]),
        ("0.25dur", [3, 6, 9, 12]),
        ("5dur", []),
    ],
)
def test_every_fires_at_the_interval(interval, batches):
    assert [batch for batch, _ in fired_batches(every(interval), "12ba", epoch_len=5)] == batches


def test_every_fires_once_at_the_end_of_training_at_the_configured_events():
    is_time = every("4ba", include_end_of_training=True, checkpoint_events=True)
    assert fired_batches(is_time, "2ep", epoch_len=5) == [
        (4, "batch_checkpoint"),
        (8, "batch_checkpoint"),
        (10, "epoch_checkpoint"),
    ]
    is_time = every("5ba", include_end_of_training=True)
    assert fired_batches(is_time, "2ep", epoch_len=5) == [(5, "batch_end"), (10, "batch_end")]
    is_time = every("1ep", include_end_of_training=True)
    assert fired_batches(is_time, "10ba", epoch_len=5) == [(5, "epoch_end"), (10, "batch_end")]
    is_time = every("1ep", include_end_of_training=True)
    assert fired_batches(is_time, "7ba", epoch_len=5) == [(5, "epoch_end"), (7, "batch_end")]


@given(
    interval=st.sampled_from(["1ba", "3ba", "7sp", "20tok", "0.1dur", "0.3dur", "1ep"]),
    length=st.integers(1, 30),
    at=st.integers(0, 30),
)
def test_every_fires_at_the_same_batches_in_a_resumed_run(interval, length, at):
    whole = fired_batches(every(interval), Time(length, "ba"), epoch_len=4)
    epoch, inside = divmod(at, 4)
    start = Timestamp(
        batch=at, sample=3 * at, token=7 * at, total_wct=0.5 * at, epoch=epoch, batch_in_epoch=inside
    )
    resumed = fired_batches(every(interval), Time(length, "ba"), epoch_len=4, start=start)
    assert resumed == [fired for fired in whole if fired[0] > at]


@given(st.integers(1, 200), st.integers(1, 60))
def test_a_fraction_of_the_duration_fires_as_often_as_it_fits(length, parts):
    fired = fired_batches(every(Time(1 / parts, "dur")), Time(length, "ba"), epoch_len=10)
    assert len(fired) == min(length, parts)
    assert fired[-1][0] == length


def test_invalid_intervals_raise():
    for bad in (0, "0ba", "-1ep", "0dur"):
        with pytest.raises(TimeValueError):
            every(bad)
    own = lambda state, event: True  # noqa: E731
    assert every(own) is own
    state = _State(Time(2, "ep"), None)
    state = replace(state, timestamp=Timestamp(batch=1))
    with pytest.raises(TimeUnitError, match="max_duration"):
        every("0.5dur")(state, _Event.BATCH_END)


def test_composers_constructors_of_times_work() -> None:
    assert Time.from_timestring("4_000tok") == Time.from_token(4000)
    assert Time.from_timestring("3_0e2sp") == Time.from_sample(3000)
    assert Time.from_epoch(2) / 2 == Time(1, "ep")
    assert Time.from_epoch(9) / 3 == Time(3, "ep")
    assert Time.from_batch(1) / Time.from_batch(2) == Time.from_duration(0.5)
    assert Time.from_iteration(1).unit is TimeUnit.ITERATION
    with pytest.raises(TimeValueError):
        Time.from_timestring("4_tok")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("1ep", "1 epoch"),
        ("3ep", "3 epochs"),
        ("1ba", "1 batch"),
        ("1200ba", "1,200 batches"),
        ("2tok", "2 tokens"),
        ("1sp", "1 sample"),
        ("2iter", "2 iterations"),
        ("0.25dur", "25 % of the training"),
        ("90sec", "1 min 30 s"),
        ("1h30m10s", "1 h 30 min"),
        ("2h10s", "2 h"),
        ("50h", "2 d 2 h"),
        ("0sec", "0 s"),
    ],
)
def test_a_time_is_described_in_words(given, words):
    assert Time.from_timestring(given).describe() == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.004, "0.004 s"),
        (0.0, "0 s"),
        (3.21, "3.2 s"),
        (59.99, "1 min"),
        (100.4, "1 min 40 s"),
        (3600.0, "1 h"),
    ],
)
def test_seconds_are_described_in_their_largest_units(seconds, words):
    assert describe_seconds(seconds) == words
