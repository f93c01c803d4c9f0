"""A warning for methods of callbacks that look like those of an event and are never called."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from hocket.trainer.callback import Callback
from hocket.trainer.event import Event
from hocket.trainer.loggers.logger_destination import LoggerDestination

_NEAR = 0.8


def warn_of_misspelt_events(callbacks: Iterable[Any]) -> None:
    """Warn once for each class with a method that seems to be meant for an event under another name.

    Such a method is public, takes `(state, logger)`, is named nearly as an event's, and is used by no other
    method of the class. A class with a `run_event` of its own may call any of its methods, and is left out.

    Args:
        callbacks: Callbacks and loggers; others are left out.
    """
    for cls in dict.fromkeys(type(one) for one in callbacks if isinstance(one, Callback)):
        if cls.run_event is not Callback.run_event:
            continue
        for method, event in _misspelt(cls):
            warnings.warn(
                f"`{cls.__name__}.{method}` is never called: there is no such event; did you mean "
                f"`{event}(self, state, logger)`? A helper that is not meant for an event can be named "
                f"`_{method}`",
                stacklevel=2,
            )


def _misspelt(cls: type) -> Iterator[tuple[str, str]]:
    """Yield the methods that seem to be meant for an event, each with the nearest event's method."""
    own = {
        name: method
        for name, method in inspect.getmembers(cls, inspect.isfunction)
        if not hasattr(Callback, name) and not hasattr(LoggerDestination, name)
    }
    names = [event.value for event in Event]
    for name, method in own.items():
        if name.startswith("_") or not _takes_state_and_logger(method):
            continue
        bare = name.lower().removeprefix("on_").removeprefix("train_")
        if (near := difflib.get_close_matches(bare, names, n=1, cutoff=_NEAR)) and not _is_used(cls, name):
            yield name, near[0]


def _takes_state_and_logger(method: Any) -> bool:
    """Return whether a method can be called as that of an event, and names its arguments as one does."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    needed = [one.name.lstrip("_") for one in parameters if one.default is one.empty]
    return needed == ["state", "logger"]


def _is_used(cls: type, name: str) -> bool:
    """Return whether a method of the class mentions an attribute of this name."""
    # Decorators keep the function that they replace.
    methods = (inspect.unwrap(one) for _, one in inspect.getmembers(cls, inspect.isfunction))
    return any(name in method.__code__.co_names for method in methods)
