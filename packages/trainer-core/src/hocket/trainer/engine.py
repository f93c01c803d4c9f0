"""`Engine`: calls algorithms, callbacks and loggers at the events they listen to, and nobody else."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from hocket.trainer.callback import Callback
from hocket.trainer.errors import CallbackReuseError
from hocket.trainer.event import Event

if TYPE_CHECKING:
    from hocket.trainer.logger import Logger
    from hocket.trainer.state import State


class Listener(NamedTuple):
    """Somebody to call at an event, and what to call them in an error."""

    call: Callable[[State, Logger], object]
    name: str


class Listeners:
    """Who listens to what: for each event, under its name, a tuple of `Listener`s, empty for most.

    The loop asks `if on.batch_start:` and so pays one truth test for an event that nobody listens to.
    """

    __slots__ = tuple(event.value for event in Event)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Listener, ...]: ...


# Events that end what a `BEFORE_*` event began: algorithms undo there in reverse, so that they nest.
# The data loader's and the checkpoint's `AFTER_*` events end nothing of an algorithm's.
_REVERSED = frozenset(
    {
        Event.AFTER_FORWARD,
        Event.AFTER_LOSS,
        Event.AFTER_BACKWARD,
        Event.AFTER_TRAIN_BATCH,
        Event.EVAL_AFTER_FORWARD,
        Event.PREDICT_AFTER_FORWARD,
    }
)

# Callbacks of trainers that are not closed.
_in_use: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class Engine:
    """Prepares, for each event, the tuple of calls to make, and makes them.

    The order: algorithms, callbacks, loggers; at `INIT` loggers, callbacks, algorithms. Whenever
    `state.callbacks` or `state.algorithms` change, the tuples are prepared anew; an event that is being fired
    goes on with the old one.

    Attributes:
        on: The prepared tuples, by the events' names.

    Raises:
        CallbackReuseError: If a callback or logger belongs to another trainer that is not closed.
    """

    def __init__(self, state: State, logger: Logger) -> None:
        self._state = state
        self._logger = logger
        self._is_closed = False
        self.on = Listeners()
        everybody = [*state.callbacks, *logger.destinations]
        for callback in everybody:
            if _in_use.get(id(callback)) is callback:
                raise CallbackReuseError(
                    f"`{_name(callback)}` still belongs to a trainer that is open; call that trainer's "
                    "`close()` (or use it in a `with` statement), or make a new callback"
                )
        for callback in everybody:
            _in_use[id(callback)] = callback
        state.callbacks.on_change = self.prepare
        state.algorithms.on_change = self.prepare
        self.prepare()

    def prepare(self) -> None:
        """Find out anew who listens to what."""
        for event in Event:
            algorithms = [
                Listener(partial(_apply_if_matched, algorithm, event), _name(algorithm))
                for algorithm in self._state.algorithms
                if getattr(algorithm, "events", None) is None or event in algorithm.events
            ]
            if event in _REVERSED:
                algorithms.reverse()
            callbacks = _listeners(self._state.callbacks, event)
            loggers = _listeners(self._logger.destinations, event)
            order = (
                (loggers, callbacks, algorithms) if event is Event.INIT else (algorithms, callbacks, loggers)
            )
            setattr(self.on, event.value, tuple(listener for group in order for listener in group))

    def fire(self, event: Event) -> None:
        """Call everybody who listens to `event`.

        Whatever one of them raises is raised, with a note that names it, the event and the time.
        """
        state, logger = self._state, self._logger
        for call, name in getattr(self.on, event.value):
            try:
                call(state, logger)
            except BaseException as error:
                error.add_note(f"raised by `{name}` at `Event.{event.name}`, {state.timestamp}")
                raise

    def close(self) -> None:
        """Close callbacks and loggers, each of them whatever the others do. A second call does nothing.

        Raises:
            Exception: The first that a `close` or `post_close` raised, with notes on the others.
        """
        if self._is_closed:
            return
        self._is_closed = True
        errors: list[Exception] = []
        closed: list[Any] = []
        # Loggers last: what a callback logs while it closes still arrives.
        for callback in (*self._state.callbacks, *self._logger.destinations):
            close = getattr(callback, "close", None)
            if close is None or _try(partial(close, self._state, self._logger), callback, "close", errors):
                closed.append(callback)
        _try(self._logger.close, self._logger, "close", errors)
        for callback in closed:
            if post_close := getattr(callback, "post_close", None):
                _try(post_close, callback, "post_close", errors)
        for callback in (*self._state.callbacks, *self._logger.destinations):
            _in_use.pop(id(callback), None)
        if errors:
            first, *others = errors
            for other in others:
                first.add_note(f"and then: {type(other).__name__}: {other}")
            raise first


def _try(call: Callable[[], object], owner: object, what: str, errors: list[Exception]) -> bool:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - one that cannot close must not keep the others from it
        error.add_note(f"raised by `{_name(owner)}.{what}`")
        errors.append(error)
        return False
    return True


def _listeners(callbacks: Iterable[Any], event: Event) -> list[Listener]:
    """Those of `callbacks` that listen to `event`: a callback's own method, or `run_event` for all events."""
    found = []
    for callback in callbacks:
        if _overrides(callback, "run_event"):
            found.append(Listener(partial(callback.run_event, event), _name(callback)))
        elif _overrides(callback, event.value):
            found.append(Listener(getattr(callback, event.value), _name(callback)))
    return found


def _overrides(callback: Any, method: str) -> bool:
    if method in getattr(callback, "__dict__", ()):
        return True
    own = getattr(type(callback), method, None)
    return own is not None and own is not getattr(Callback, method)


def _apply_if_matched(algorithm: Any, event: Event, state: State, logger: Logger) -> None:
    if algorithm.match(event, state):
        algorithm.apply(event, state, logger)


def _name(anything: object) -> str:
    return type(anything).__name__
