"""The suites of callbacks and loggers."""

from __future__ import annotations

import difflib
import inspect
import json
import math
from collections.abc import Callable as Function
from dataclasses import dataclass, field
from typing import Any

import torch

from hocket.trainer.callback import Callback
from hocket.trainer.event import Event
from hocket.trainer.log.logger import Logger
from hocket.trainer.loggers.logger_destination import LoggerDestination
from hocket.trainer.testing.stateful import check_stateful
from hocket.trainer.time import Time
from hocket.trainer.timestamp import Counts, Timestamp

_KNOWN = frozenset(name for name in dir(LoggerDestination) if not name.startswith("_"))


def check_callback(make: Function[[], Any]) -> None:
    """Check that an object can be given as a callback: the names and arguments of its methods, and its state.

    Args:
        make: A function that returns a fresh callback.

    Raises:
        AssertionError: If an event's method cannot be called with `(state, logger)`, if a method's name is
            nearly that of an event, if the callback listens to no event, or if its state does not survive
            saving and loading.
    """
    callback = make()
    assert _is_own(callback, "run_event") or any(_is_own(callback, event.value) for event in Event), (
        f"`{type(callback).__name__}` listens to nothing: it overrides neither `run_event` nor a method "
        f"named after an event, such as `{Event.BATCH_END.value}`"
    )
    _check_methods(callback)
    if hasattr(callback, "state_dict"):
        check_stateful(make)


def _check_methods(callback: Any) -> None:
    name = type(callback).__name__
    arguments: dict[str, tuple[str, ...]] = {event.value: ("state", "logger") for event in Event}
    arguments |= {"run_event": ("event", "state", "logger"), "close": ("state", "logger"), "post_close": ()}
    for method, argument_names in arguments.items():
        if _is_own(callback, method):
            try:
                inspect.signature(getattr(callback, method)).bind(*argument_names)
            except TypeError as error:
                raise AssertionError(
                    f"`{name}.{method}` cannot be called with ({', '.join(argument_names)}): {error}"
                ) from None
    for method in dir(callback):
        if not method.startswith("_") and method not in _KNOWN and callable(getattr(callback, method)):
            near = difflib.get_close_matches(method.removeprefix("on_"), list(arguments), 1, 0.9)
            assert not near, f"`{name}.{method}` is never called; did you mean `{near[0]}`?"


@dataclass
class _SomeState:
    """The part of the trainer's state that a logger may read."""

    run_name: str = "check-logger"
    max_duration: Time = field(default_factory=lambda: Time(2, "ba"))
    dataloader_len: int | None = 2
    timestamp: Timestamp = field(default_factory=Timestamp)
    previous_timestamp: Timestamp = field(default_factory=Timestamp)

    @property
    def counts(self) -> Counts:
        return self.timestamp.counts


def check_logger(
    make: Function[[], LoggerDestination], read: Function[[], list[tuple[int, str, Any]]] | None = None
) -> None:
    """Check that a logger destination takes every logged value, over two runs into the same place.

    Args:
        make: A function that returns a destination, both times for the same place, as a resumed run does.
        read: A function that returns the values in that place: triples of step, name and number.

    Raises:
        AssertionError: If the destination raises, or if a value did not arrive.
    """
    _check_methods(make())
    check_stateful(make)
    expected: list[tuple[int, str, Any]] = []
    for first in (1, 3):
        destination, state = make(), _SomeState()
        logger = Logger(state, [destination])
        assert logger.destinations, "run `check_logger` on rank 0, or the destination on every rank"
        _fire(destination, Event.INIT, state, logger)
        logger.log_hyperparameters({"width": 8, "nested": {"rate": 0.1}, "none": None})
        _fire(destination, Event.FIT_START, state, logger)
        for step in (first, first + 1):
            state.previous_timestamp, state.timestamp = state.timestamp, Timestamp(batch=step, sample=step)
            logger.log_metrics({"loss": torch.tensor(0.5 * step), "count": step})
            _fire(destination, Event.BATCH_END, state, logger)
            expected += [(step, "loss", 0.5 * step), (step, "count", step)]
        logger.log_metrics({"odd": math.nan}, keep=True)
        _fire(destination, Event.FIT_END, state, logger)
        destination.close(state, logger)  # type: ignore[arg-type]  # a part of a state is enough
        try:
            logger.close(timeout_s=30.0)
        except Exception as error:
            raise AssertionError(f"`{type(destination).__name__}` failed: {error}") from error
        destination.post_close()
        if read is not None:
            logged_points = [point for point in read() if point[1] != "odd"]
            assert logged_points == expected, (
                f"logged was {json.dumps(expected)}; what arrived is {logged_points}"
            )


def _fire(destination: LoggerDestination, event: Event, state: _SomeState, logger: Logger) -> None:
    destination.run_event(event, state, logger)  # type: ignore[arg-type]  # as above


def _is_own(callback: Any, method: str) -> bool:
    implementation = getattr(type(callback), method, None) or vars(callback).get(method)
    return implementation is not None and implementation is not getattr(Callback, method)
