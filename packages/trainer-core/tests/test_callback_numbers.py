"""Numbers that a callback or logger cannot use are refused where they are given, and not while training."""

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hocket.trainer import CheckpointSaver, DataSpec, Evaluator, callbacks, loggers
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.loss import DiceLoss
from hocket.trainer.optim import DecoupledAdamW, DecoupledSGDW
from hocket.trainer.profiler import JSONTraceHandler, Profiler, cyclic_schedule
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


INTERVAL = "sys_prof_stats_thread_interval_seconds"
WEIGHTS = [torch.nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize(
    ("make_part", "name", "values"),
    [
        (
            lambda **given: Evaluator(label="e", dataloader=[1], **given),
            "eval_interval",
            ("-1ba", "x", math.nan),
        ),
        (lambda **given: CheckpointSaver("run", **given), "save_interval", ("-1ba", "0ba", "x", math.nan)),
        (lambda **given: DataSpec([1], **given), "num_samples", (-1, 2.5, "x")),
        (lambda **given: DataSpec([1], **given), "num_tokens", (-1, 2.5, "x")),
        (lambda **given: make(loop=given), "overfit_batches", (-1, math.nan, 1.5)),
        (lambda **given: DecoupledSGDW(WEIGHTS, **{"lr": 0.1, **given}), "lr", (math.nan,)),
        (lambda **given: DecoupledSGDW([{"params": WEIGHTS, **given}], lr=0.1), "weight_decay", (math.nan,)),
        (lambda **given: DecoupledSGDW(WEIGHTS, lr=0.1, **given), "dampening", (math.nan, "x")),
        (lambda **given: DecoupledAdamW(WEIGHTS, **given), "eps", (math.nan, -1)),
        (lambda **given: Profiler(cyclic_schedule(), [], **given), INTERVAL, (-1, 0, math.nan, "x")),
        (lambda **given: JSONTraceHandler("traces", **given), "num_traces_to_keep", (-2, 1.5, "x")),
        (DiceLoss, "smooth", (-1, math.nan, "x")),
    ],
)
def test_a_number_of_a_part_out_of_range_is_refused_where_it_is_given(
    make_part: Callable[..., object], name: str, values: tuple[object, ...]
) -> None:
    for value in values:
        with pytest.raises(ValueError, match=r"expected|is no time|not a whole number|Invalid"):
            make_part(**{name: value})


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
