"""A callback's method that is named nearly as an event's: a warning names both, and helpers get none."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from hocket.trainer import Callback, callbacks, loggers
from hocket.trainer.engine.misspelt_events import warn_of_misspelt_events
from hocket.trainer.loggers.logger_destination import LoggerDestination
from support.training import make


def warned(*given: Any) -> list[str]:
    """Return the warnings about callbacks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_misspelt_events(given)
    return [str(one.message) for one in caught]


def class_with(method: str, *, base: type = Callback) -> type:
    """Return a callback with one method that takes a state and a logger."""
    return type("Own", (base,), {method: lambda self, state, logger: None})


@pytest.mark.parametrize(
    ("method", "event"),
    [
        ("batch_ends", "batch_end"),
        ("on_batch_end", "batch_end"),
        ("on_train_batch_end", "batch_end"),
        ("on_train_epoch_end", "epoch_end"),
        ("after_los", "after_loss"),
        ("batchEnd", "batch_end"),
        ("fit_begin_end", None),
        ("eval_stop", None),
        ("_batch_ends", None),
        ("batch_end", None),
        ("log_gradients", None),
    ],
)
@pytest.mark.parametrize("base", [Callback, LoggerDestination])
def test_a_name_near_an_event_is_named_with_it(method: str, event: str | None, base: type) -> None:
    expected = f"`Own.{method}` is never called: there is no such event; did you mean `{event}(self, state"
    found = warned(class_with(method, base=base)())
    assert [text.startswith(expected) for text in found] == [True] * (event is not None)


def test_a_trainer_warns_once_for_a_class_when_it_is_made() -> None:
    own = class_with("after_los")
    with pytest.warns(UserWarning, match=r"`Own.after_los` is never called") as caught:
        make(callbacks=[own(), own()], max_duration="1ba").close()
    assert len([one for one in caught if "is never called" in str(one.message)]) == 1


class Helpers(Callback):
    """Methods whose names are near those of events, and that are not meant for one."""

    def batch_ends(self, state: Any) -> None: ...

    def epoch_ends(self, state: Any, logger: Any, loss: float) -> None: ...

    def after_losses(self, state: Any, logger: Any) -> None: ...

    def batch_end(self, state: Any, logger: Any) -> None:
        self.after_losses(state, logger)

    @property
    def fit_ends(self) -> int:
        return 1


class Dispatching(Callback):
    """A callback that calls its methods by names of its own."""

    def run_event(self, event: Any, state: Any, logger: Any) -> None:
        getattr(self, f"on_{event.value}", lambda *_: None)(state, logger)

    def on_batch_end(self, state: Any, logger: Any) -> None: ...


def test_helpers_and_a_dispatch_of_its_own_get_no_warning() -> None:
    assert warned(Helpers(), Dispatching(), object(), lambda: None) == []


def test_a_subclass_inherits_the_warning() -> None:
    assert len(warned(type("Derived", (class_with("after_los"),), {})())) == 1


def test_no_callback_or_logger_of_the_package_gets_a_warning() -> None:
    known = [getattr(module, name) for module in (callbacks, loggers) for name in module.__all__]
    classes = [one for one in known if isinstance(one, type) and issubclass(one, Callback)]
    assert len(classes) > 20
    assert warned(*(object.__new__(one) for one in classes)) == []
