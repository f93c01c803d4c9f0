"""`Engine`: calls each algorithm, callback and logger at the events that it listens to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from hocket.trainer.callback import Callback
from hocket.trainer.engine.passes import AlgorithmPass, check_pairs, make_passes, run_passes
from hocket.trainer.errors import CallbackReuseError
from hocket.trainer.event import Event

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State


class Listener(NamedTuple):
    """A call to make at an event, and the name of its owner for error messages."""

    call: Callable[[State, Logger], object]
    name: str


class Listeners:
    """The listeners of each event: under the event's name, a tuple of `Listener`s, empty for most.

    The loop tests `if on.batch_start:`, so an event without listeners costs one truth test.
    """

    __slots__ = tuple(event.value for event in Event)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Listener, ...]: ...


# The events at which an algorithm may change the batch after it was counted.
_BATCH_EVENTS = frozenset({Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH})

# Callbacks of trainers that are not closed.
_in_use: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class Engine:
    """The dispatcher of events: prepares the tuple of calls for each event, and makes them.

    The order of calls is algorithms, callbacks, loggers; at `INIT` it is loggers, callbacks, algorithms. The
    tuples are prepared again whenever `state.callbacks` or `state.algorithms` changes; an event that is being
    fired continues with the old tuple.

    Args:
        state: Has the algorithms and callbacks.
        logger: Has the loggers.
        algorithm_passes: Further passes that order algorithms (see `hocket.trainer.engine.make_passes`).

    Attributes:
        on: The prepared tuples, by the events' names.
        may_change_batches: Whether an algorithm listens at an event between the fetch of a batch and its
            forward pass. The same on every rank, as the algorithms are.
        keeps_outputs: Whether an algorithm, callback or logger may read `state.outputs`.
        instrument: A function `(event, kind, listener) -> listener` that replaces each listener, for a
            profiler that times calls; the kind is `"algorithm"`, `"callback"` or `"logger"`. Call `prepare`
            after setting it.

    Raises:
        CallbackReuseError: If a callback or logger belongs to another trainer that is not closed.
        TrainerConfigError: If two algorithms cannot be used together.
    """

    def __init__(self, state: State, logger: Logger, *, algorithm_passes: Any = None) -> None:
        self._state = state
        self._passes: list[AlgorithmPass] = make_passes(algorithm_passes)
        check_pairs(state.algorithms)  # before callbacks are marked as in use
        self._logger = logger
        self._is_closed = False
        self.on = Listeners()
        self.instrument: Callable[[Event, str, Listener], Listener] | None = None
        callbacks = [*state.callbacks, *logger.destinations]
        for callback in callbacks:
            if _in_use.get(id(callback)) is callback:
                raise CallbackReuseError(
                    f"`{_name(callback)}` still belongs to a trainer that is open; call that trainer's "
                    "`close()` (or use it in a `with` statement), or make a new callback"
                )
        for callback in callbacks:
            _in_use[id(callback)] = callback
        state.callbacks.on_change = self.prepare
        state.algorithms.on_change = self.prepare
        self.prepare()

    def __repr__(self) -> str:
        counts = f"{len(self._state.algorithms)} algorithms, {len(self._state.callbacks)} callbacks"
        return f"<Engine: {counts}, {len(self._logger.destinations)} loggers>"

    def prepare(self) -> None:
        """Prepare the listeners of all events again.

        Raises:
            TrainerConfigError: If two algorithms cannot be used together.
        """
        check_pairs(self._state.algorithms)
        self.may_change_batches = any(
            (events := _events_of(one)) is None or not _BATCH_EVENTS.isdisjoint(events)
            for one in self._state.algorithms
        )
        participants = (*self._state.algorithms, *self._state.callbacks, *self._logger.destinations)
        # Looked up in the class itself: a subclass may read outputs where its base does not.
        self.keeps_outputs = any(type(one).__dict__.get("reads_outputs", True) for one in participants)
        for event in Event:
            algorithms = [
                Listener(partial(_apply_if_matched, algorithm, event), _name(algorithm))
                for algorithm in run_passes(self._state.algorithms, event, self._passes)
                if (events := _events_of(algorithm)) is None or event in events
            ]
            callbacks = _listeners(self._state.callbacks, event)
            loggers = _listeners(self._logger.destinations, event)
            if (instrument := self.instrument) is not None:
                algorithms = [instrument(event, "algorithm", one) for one in algorithms]
                callbacks = [instrument(event, "callback", one) for one in callbacks]
                loggers = [instrument(event, "logger", one) for one in loggers]
            order = (
                (loggers, callbacks, algorithms) if event is Event.INIT else (algorithms, callbacks, loggers)
            )
            setattr(self.on, event._value_, tuple(listener for group in order for listener in group))

    def fire(self, event: Event) -> None:
        """Call all listeners of `event`.

        An exception that one of them raises gets a note with the listener, the event and the time.
        """
        state, logger = self._state, self._logger
        try:
            # `_value_` is `value` without the descriptor, which takes as long as the call of a listener.
            for call, name in getattr(self.on, event._value_):  # noqa: B007 - for the note
                call(state, logger)
        except BaseException as error:
            error.add_note(f"raised by `{name}` at `Event.{event.name}`, {state.timestamp.describe()}")
            raise

    def close(self) -> None:
        """Close all callbacks and loggers, even if some of them raise. A second call does nothing.

        Raises:
            Exception: The first error of a `close` or `post_close`, with notes on the others.
        """
        if self._is_closed:
            return
        self._is_closed = True
        errors: list[Exception] = []
        closed: list[Any] = []
        # Loggers last, when they have received the values that callbacks log in their `close` too.
        self._close_all(self._state.callbacks, closed, errors)
        _try(self._logger.flush, self._logger, "flush", errors)
        self._close_all(self._logger.destinations, closed, errors)
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

    def _close_all(self, callbacks: Iterable[Any], closed: list[Any], errors: list[Exception]) -> None:
        """Call the `close` of callbacks; those without an error are added to `closed`, errors to `errors`."""
        for callback in callbacks:
            close = getattr(callback, "close", None)
            if close is None or _try(partial(close, self._state, self._logger), callback, "close", errors):
                closed.append(callback)


def _try(call: Callable[[], object], owner: object, method: str, errors: list[Exception]) -> bool:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - one that cannot close must not keep the others from it
        error.add_note(f"raised by `{_name(owner)}.{method}`")
        errors.append(error)
        return False
    return True


def _listeners(callbacks: Iterable[Any], event: Event) -> list[Listener]:
    """Return the listeners to `event`: a callback's own method, or its `run_event` for all events."""
    listeners = []
    for callback in callbacks:
        if _overrides(callback, "run_event"):
            listeners.append(Listener(partial(callback.run_event, event), _name(callback)))
        elif _overrides(callback, event.value):
            listeners.append(Listener(getattr(callback, event.value), _name(callback)))
    return listeners


def _events_of(algorithm: Any) -> AbstractSet[Event] | None:
    """Return the events that an algorithm states; None, for all events, if they are not a set."""
    events = getattr(algorithm, "events", None)
    return events if isinstance(events, AbstractSet) else None


def _overrides(callback: Any, method: str) -> bool:
    if method in getattr(callback, "__dict__", ()):
        return True
    override = getattr(type(callback), method, None)
    return override is not None and override is not getattr(Callback, method)


def _apply_if_matched(algorithm: Any, event: Event, state: State, logger: Logger) -> bool:
    """Apply an algorithm if it matches; return whether it matched, for a trace."""
    if algorithm.match(event, state):
        algorithm.apply(event, state, logger)
        return True
    return False


def _name(anything: object) -> str:
    return type(anything).__name__
