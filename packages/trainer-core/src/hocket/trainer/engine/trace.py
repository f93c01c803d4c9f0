"""`Trace`: a record of the calls at each event, with their changes and durations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import torch

from hocket.trainer.data.batch_tree import children_of
from hocket.trainer.engine.engine import Engine, Listener
from hocket.trainer.event import Event
from hocket.trainer.log.notices import print_line

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State

_WATCHED = (
    "batch", "outputs", "loss", "device_train_microbatch_size", "max_duration", "train_step", "module",
    "train_dataloader", "dataloader", "algorithms", "callbacks", "schedulers", "optimizers", "evaluators",
)  # fmt: skip


@dataclass(slots=True)
class TraceRow:
    """The calls of one algorithm, callback or logger at one event."""

    event: Event
    kind: str
    """`"algorithm"`, `"callback"` or `"logger"`."""
    name: str
    num_calls: int = 0
    num_applied: int = 0
    """Number of calls in which an algorithm matched; for callbacks and loggers, all calls."""
    seconds: float = 0.0
    changes: dict[str, int] = field(default_factory=dict)
    """Number of calls that changed an item: state attributes, `parameters`, `gradients`, `learning rate`."""


class Trace:
    """A record of every call at every event, from when it starts until `stop`.

    Times are those of the host, without waiting for work on a GPU. Changes of a tensor are detected by its
    identity and version, so a trace does not read the device. Without a trace, events have no overhead.

    Args:
        engine: The engine, which fires the events.
        state: The state of the run.
        live: An open text file that gets a line for each call which changed something or applied an
            algorithm; None for no lines.

    Attributes:
        rows: The rows, in the order of their first calls.

    Example:
        >>> trace = trainer.trace()
        >>> trainer.fit("10ba")
        >>> print(trace)
    """

    def __init__(self, engine: Engine, state: State, *, live: TextIO | None = None) -> None:
        self._engine = engine
        self._state = state
        self._live = live
        self._rows: dict[tuple[Event, str, str], TraceRow] = {}
        self._before = engine.instrument
        engine.instrument = self._wrap
        engine.prepare()

    @property
    def rows(self) -> list[TraceRow]:
        """The rows, in the order of their first calls."""
        return list(self._rows.values())

    def stop(self) -> None:
        """End the trace and keep its rows. A second call does nothing."""
        if self._engine.instrument == self._wrap:
            self._engine.instrument = self._before
            self._engine.prepare()

    def __str__(self) -> str:
        lines = [("event", "who", "calls", "applied", "ms", "changed")]
        for row in self.rows:
            changes = ", ".join(f"{name} ×{number}" for name, number in row.changes.items())
            lines.append(
                (
                    row.event.name,
                    f"{row.name} ({row.kind})",
                    str(row.num_calls),
                    str(row.num_applied),
                    f"{row.seconds * 1e3:.3f}",
                    changes or "-",
                )
            )
        widths = [max(len(line[column]) for line in lines) for column in range(6)]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )

    def _wrap(self, event: Event, kind: str, listener: Listener) -> Listener:
        inner = listener if self._before is None else self._before(event, kind, listener)
        key = event, kind, listener.name

        def call(state: State, logger: Logger) -> object:
            before, started = dict(_fingerprints(state)), time.perf_counter()
            returned = inner.call(state, logger)
            seconds = time.perf_counter() - started
            row = self._rows.get(key)
            if row is None:
                row = self._rows[key] = TraceRow(event, kind, listener.name)
            changed = [name for name, value in _fingerprints(state) if before.get(name) != value]
            row.num_calls += 1
            row.num_applied += kind != "algorithm" or returned is True
            row.seconds += seconds
            for name in changed:
                row.changes[name] = row.changes.get(name, 0) + 1
            if self._live is not None and (changed or (kind == "algorithm" and returned is True)):
                description = ", ".join(changed) or "nothing that the state shows"
                print_line(
                    f"[{state.timestamp.counts.batch}ba] {event.name}: {listener.name} ({kind}) changed "
                    f"{description}, {seconds * 1e3:.3f} ms",
                    self._live,
                )
            return returned

        return Listener(call, listener.name)


def _fingerprints(state: State) -> Iterator[tuple[str, Any]]:
    """Yield the watched names, each with a value that differs after a change, without reading the device."""
    for name in _WATCHED:
        yield name, _fingerprint(getattr(state, name, None))
    parameters = list(state.model.parameters())
    yield "model", tuple((id(module), type(module)) for module in state.model.modules())
    yield "parameters", tuple((id(parameter), parameter._version) for parameter in parameters)
    yield "gradients", tuple(_fingerprint(parameter.grad) for parameter in parameters)
    yield (
        "learning rate",
        tuple(
            float(group["lr"]) if not isinstance(group["lr"], torch.Tensor) else _fingerprint(group["lr"])
            for optimizer in state.optimizers
            for group in optimizer.param_groups
            if "lr" in group
        ),
    )
    yield "stop", state.stop.reason


def _fingerprint(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    children = children_of(value, into_objects=False)
    return id(value), *((name, _fingerprint(item)) for name, item in children or ())


def log_algorithms(engine: Engine) -> None:
    """Report each application of an algorithm to the loggers, as `algorithm_traces/<event>/<name>`."""
    before: Callable[[Event, str, Listener], Listener] | None = engine.instrument

    def wrap(event: Event, kind: str, listener: Listener) -> Listener:
        inner = listener if before is None else before(event, kind, listener)
        if kind != "algorithm":
            return inner

        def call(state: State, logger: Logger) -> object:
            if applied := inner.call(state, logger):
                logger.log_traces(
                    {f"algorithm_traces/{event.name}/{listener.name}": str(state.timestamp.batch)}
                )
            return applied

        return Listener(call, listener.name)

    engine.instrument = wrap
    engine.prepare()
