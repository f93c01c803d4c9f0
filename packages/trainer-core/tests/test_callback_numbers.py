"""Numbers that a callback or logger cannot use are refused where they are given, and not while training."""

import inspect
import re
from typing import Any

import pytest
import torch

from hocket.trainer import callbacks, loggers
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.profiler import cyclic_schedule
from support.training import make

REQUIRED: dict[str, Any] = {
    "monitor": "loss",
    "dataloader_label": "train",
    "threshold": 0.5,
    "prompts": ["a"],
}
# Arguments that may be negative: a difference whose sign is dropped, and the value of a metric.
SIGNED = {("EarlyStopper", "min_delta"), ("ThresholdStopper", "threshold")}


def _numbers() -> list[tuple[type[Any], str]]:
    """Return each argument of a number or a time, of every public callback and logger."""
    classes = [getattr(room, name) for room in (callbacks, loggers) for name in room.__all__]
    return [
        (one, parameter.name)
        for one in classes
        if inspect.isclass(one)
        for parameter in inspect.signature(one).parameters.values()
        if re.search(r"\b(int|float|TimeInput)\b", str(parameter.annotation))
        and not str(parameter.annotation).startswith(("Mapping", "dict"))
    ]


NUMBERS = _numbers()


def _refusal(kind: type[Any], name: str, value: Any) -> str:
    parameters = inspect.signature(kind).parameters
    required = {key: REQUIRED[key] for key in parameters if key in REQUIRED and key != name}
    with pytest.raises((TrainerConfigError, TypeError, ValueError)) as refused:
        kind(**required, **{name: value})
    assert refused.type.__module__.startswith("hocket"), refused.value
    return str(refused.value)


@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=[f"{kind.__name__}-{name}" for kind, name in NUMBERS])
def test_a_number_out_of_range_is_refused_where_it_is_given(kind: type[Any], name: str) -> None:
    values = [float("nan"), True] if (kind.__name__, name) in SIGNED else [-1, float("nan"), True]
    for value in values:
        message = _refusal(kind, name, value)
        assert re.search(r"nan|-1|True", message), message
        assert "expected" in message


def test_an_interval_of_no_batches_is_refused() -> None:
    assert "`dist_aggregate_batch_interval` is 0" in _refusal(
        callbacks.MemoryMonitor, "dist_aggregate_batch_interval", 0
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale_schedule_ratio": float("nan")}, "`scale_schedule_ratio` is nan"),
        ({"seed": "one"}, "`seed` is 'one'; expected a whole number of 64 bits"),
        ({"seed": 2**70}, "expected a whole number of 64 bits"),
        ({"seed": True}, "`seed` is True"),
    ],
)
def test_a_number_of_the_trainer_out_of_range_is_refused_where_it_is_given(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainerConfigError, match=message):
        make(**given)


@pytest.mark.parametrize("name", ["skip_first", "wait", "warmup", "active", "repeat"])
def test_a_schedule_of_a_profiler_takes_whole_numbers(name: str) -> None:
    for value in (-1, 1.5, True):
        with pytest.raises(TrainerConfigError, match=rf"`{name}` is {value}; expected a whole number"):
            cyclic_schedule(**{name: value})


def test_a_number_of_another_library_is_named_with_its_type() -> None:
    assert "expected a whole number from 1 on, an `int` and no `Tensor`" in _refusal(
        callbacks.SpeedMonitor, "window_size", torch.tensor(2)
    )


def test_the_arguments_of_every_callback_were_found() -> None:
    names = {f"{kind.__name__}.{name}" for kind, name in NUMBERS}
    assert {"RuntimeEstimator.skip_batches", "SpeedMonitor.window_size", "Generate.interval"} <= names
