"""Taking a value to be logged without waiting for it, and reading it later on another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

Number: TypeAlias = float | int | bool | str | list[Any]
"""What a logger is given: a number, text, or nested lists of a tensor that is no scalar."""


@runtime_checkable
class Handle(Protocol):
    """A value on its way, such as an asynchronous reduction."""

    def wait(self) -> Any:
        """Wait for the value and return it: a tensor or a number."""


Reader: TypeAlias = Callable[[], Number]
"""Waits for a captured value and reads it; any thread may call it, and more than once."""

Captured: TypeAlias = Number | Reader

_PLAIN = frozenset({float, int, bool, str})


def capture(values: Mapping[str, Any]) -> dict[str, Captured]:
    """Take values as they are now; the caller may change its tensors at once. Waits for no device.

    A number, and a scalar tensor in host memory, is read now. A tensor on a CUDA device is copied to pinned
    memory in its stream's order, other devices' tensors to a tensor of their own. A handle is kept, and
    waited for by the reader.

    Args:
        values: By name: numbers, text, tensors, or handles with `wait()`.

    Raises:
        TypeError: If a value is none of these, or a `DTensor`, whose reading would be a collective.
    """
    return {
        name: value if type(value) in _PLAIN else _capture_one(name, value) for name, value in values.items()
    }


def read(captured: Captured) -> Number:
    """The value of what `capture` took; waits for it if it must."""
    return captured() if callable(captured) else captured


def _capture_one(name: str, value: Any) -> Captured:
    if isinstance(value, Tensor):
        if hasattr(value, "full_tensor"):
            raise TypeError(
                f"`{name}` is a `DTensor`, and reading it is a collective, which a logger may not start; "
                "log `value.full_tensor()`, or the part that this rank has, `value.to_local()`"
            )
        return _capture_tensor(value.detach())
    if hasattr(value, "item"):  # a NumPy scalar, or an array of one
        return _plain(value)
    if isinstance(value, Handle):
        return _WaitOnce(value)
    if hasattr(value, "__float__"):
        return float(value)
    raise TypeError(
        f"`{name}` is a `{type(value).__name__}`; expected a number, a tensor, or a handle with `wait()`"
    )


def _capture_tensor(tensor: Tensor) -> Captured:
    if tensor.device.type == "cpu":
        # A host scalar is ready: reading it costs less than a copy of it.
        return tensor.item() if tensor.dim() == 0 else tensor.clone().tolist
    if tensor.device.type == "cuda":
        landing = torch.empty_like(tensor, device="cpu", pin_memory=True)
        landing.copy_(tensor, non_blocking=True)
        # Blocking: the thread that reads sleeps until then; one that spins would take a core.
        arrival = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        arrival.record(torch.cuda.current_stream(tensor.device))

        def read_landing() -> Number:
            arrival.synchronize()
            return _plain(landing)

        return read_landing
    copy = tensor.clone()
    return lambda: _plain(copy)


def _plain(value: Any) -> Number:
    if isinstance(value, Tensor) and value.requires_grad:
        value = value.detach()
    if getattr(value, "ndim", 0) == 0:
        return value.item() if hasattr(value, "item") else value  # type: ignore[no-any-return]
    return value.tolist()  # type: ignore[no-any-return]


class _WaitOnce:
    """Waits for a handle once, whoever asks first; the others get the same value or the same error."""

    def __init__(self, handle: Handle) -> None:
        self._handle: Handle | None = handle
        self._lock = threading.Lock()
        self._value: Number = 0
        self._error: Exception | None = None

    def __call__(self) -> Number:
        with self._lock:
            if self._handle is not None:
                try:
                    self._value = _plain(self._handle.wait())
                except Exception as error:  # noqa: BLE001 - raised below, for everyone who reads
                    self._error = error
                self._handle = None
            if self._error is not None:
                raise self._error
            return self._value
