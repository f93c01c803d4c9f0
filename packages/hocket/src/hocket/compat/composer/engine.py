"""`Engine` and `Logger` with Composer's methods, for scripts that fire events by themselves."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, cast

from hocket.compat.composer.in_memory_logger import InMemoryLogger, TimedStep
from hocket.compat.composer.own_destination import accept_calls
from hocket.compat.composer.utils.nested_values import ensure_tuple
from hocket.trainer import Engine as _Engine
from hocket.trainer import Event, LoggerDestination, State
from hocket.trainer import Logger as _Logger
from hocket.trainer.engine.passes import AlgorithmPass, run_passes
from hocket.trainer.errors import TrainerConfigError, TrainerError


class EngineClosedError(TrainerError, RuntimeError):
    """An event was fired on an engine that is closed; make a new one."""

    code = "HKT-HO04"


@dataclass
class Trace:
    """A record of an algorithm's run at an event."""

    name: str = ""
    event: Event | None = None
    exit_code: Any = None
    order: int | None = None
    run: bool = False


class Engine(_Engine):
    """`hocket.trainer.Engine` with Composer's methods.

    A pass of the user runs after the default ones, as in Composer, unless its index is given. An engine that
    nothing refers to any more is closed.

    Args:
        state: The state with the algorithms and callbacks.
        logger: The logger with the destinations.
        algorithm_passes: A pass, a pair of a pass and its index, or several of these.

    Raises:
        TrainerConfigError: If a pass is no function.
    """

    def __init__(self, state: State, logger: _Logger, algorithm_passes: Any = None) -> None:
        super().__init__(state, logger)
        for pair in _passes_of(algorithm_passes):
            self.register_pass(*pair)
        # A strong reference would keep the engine from being closed when it is dropped.
        engine_ref = weakref.ref(self)

        def prepare() -> None:
            if (engine := engine_ref()) is not None:
                engine.prepare()

        state.callbacks.on_change = state.algorithms.on_change = prepare

    def __del__(self) -> None:
        if hasattr(self, "on"):  # false if `__init__` failed before it
            self.close()

    @property
    def algorithm_passes(self) -> list[AlgorithmPass]:
        """The passes, in the order in which they run."""
        return self._passes

    def register_pass(self, algorithm_pass: AlgorithmPass, index: int = -1) -> None:
        """Add a pass.

        Args:
            algorithm_pass: `(algorithms, event) -> algorithms`.
            index: Position of the pass; -1 for the last.
        """
        self._passes.insert(len(self._passes) if index == -1 else index, algorithm_pass)
        self.prepare()

    def run_event(self, event: Event | str) -> OrderedDict[str, Trace]:
        """Call the listeners of an event, and return a trace of each algorithm that was applied.

        `match` is called on every algorithm before the first one is applied.

        Args:
            event: The event, or its name.

        Returns:
            A `Trace` for each algorithm that was applied, under `<algorithm>/<event>`.

        Raises:
            EngineClosedError: If the engine is closed.
        """
        event = event if isinstance(event, Event) else Event(str(event).lower())
        if self._is_closed:
            raise EngineClosedError(
                f"`{event.name}` was fired on an engine that is closed; make a new `Engine` or `Trainer`"
            )
        if event is Event.INIT:
            self._call_callbacks(event, are_loggers=True)
            self._call_callbacks(event, are_loggers=False)
            return self._apply_algorithms(event)
        traces = self._apply_algorithms(event)
        self._call_callbacks(event, are_loggers=False)
        self._call_callbacks(event, are_loggers=True)
        return traces

    def _apply_algorithms(self, event: Event) -> OrderedDict[str, Trace]:
        state = self._state
        traces: OrderedDict[str, Trace] = OrderedDict()
        matched = [one for one in state.algorithms if one.match(event, state)]
        for order, algorithm in enumerate(run_passes(matched, event, self._passes)):
            exit_code = algorithm.apply(event, state, self._logger)
            key = f"{algorithm}/{event}"
            # Two algorithms with the same arguments have the same description.
            key = f"{key}/{order}" if key in traces else key
            traces[key] = Trace(type(algorithm).__name__, event, exit_code, order, run=True)
        return traces

    def _call_callbacks(self, event: Event, *, are_loggers: bool) -> None:
        for callback in (*self._state.callbacks, *self._logger.destinations):
            if isinstance(callback, LoggerDestination) is are_loggers:
                callback.run_event(event, self._state, self._logger)


class Logger(_Logger):
    """`hocket.trainer.Logger`, which also takes one destination, or none."""

    def __init__(self, state: State, destinations: Any = None) -> None:
        super().__init__(state, ensure_tuple(destinations))
        for destination in self.destinations:
            accept_calls(destination, state)
            if isinstance(destination, InMemoryLogger):
                destination.bind(self)

    def has_file_upload_destination(self) -> bool:
        """Return whether a destination on this rank stores files."""
        return self.has_file_destination()

    def _step(self, step: int | None) -> int:
        timestamp = cast("State", self._state).timestamp
        return TimedStep.at(timestamp.counts.batch if step is None else int(step), timestamp)


def _passes_of(given: Any) -> list[tuple[AlgorithmPass, int]]:
    if given is None:
        return []
    is_pair = isinstance(given, (list, tuple)) and len(given) == 2 and isinstance(given[1], int)
    several = [given] if callable(given) or is_pair else given
    pairs = [tuple(one) if isinstance(one, (list, tuple)) else (one, -1) for one in several]
    for pair in pairs:
        if not callable(pair[0]):
            raise TrainerConfigError(
                f"`algorithm_passes` has {pair[0]!r}; expected a function (algorithms, event) -> algorithms, "
                "or a pair of one and an index"
            )
    return [(pair[0], pair[1] if len(pair) > 1 else -1) for pair in pairs]


__all__ = ["Engine", "EngineClosedError", "Logger", "Trace"]
