"""Capturing a value to be logged without waiting for the device, and reading it later on another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

Number: TypeAlias = float | int | bool | str | list[Any]
"""A logged value: a number, text, or nested lists for a tensor that is not a scalar."""


class Handle(Protocol):
    """A value that is not ready yet, such as the result of an asynchronous reduction."""

    def wait(self) -> Any:
        """Wait for the value and return it: a tensor or a number."""


Reader: TypeAlias = Callable[[], Number]
"""A function that waits for a captured value and reads it; any thread may call it, and more than once."""

Captured: TypeAlias = Number | Reader

_PLAIN = frozenset({float, int, bool, str})


def capture(values: Mapping[str, Any]) -> dict[str, Captured]:
    """Capture values as they are now; the caller may change its tensors at once. Waits for no device.

    A number, and a scalar tensor in host memory, is read now. A tensor on a CUDA device is copied to pinned
    memory in the order of the current stream; any other tensor is cloned. Scalars of one device and dtype are
    copied together. A handle is kept, and the reader waits for it.

    Args:
        values: By name: numbers, text, tensors, or handles with `wait()`.

    Raises:
        TypeError: If a value is none of these, or a `DTensor`, whose reading would be a collective.
    """
    captured: dict[str, Captured] = {}
    scalars: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, value in values.items():
        if type(value) in _PLAIN:
            captured[name] = value
        elif type(value) is Tensor and not value.ndim:
            if value.is_cpu:
                # A host scalar is ready. `tolist` reads it in half the time of `item`.
                captured[name] = value.tolist()
            else:
                captured[name] = 0.0  # keeps the order of the names
                scalars.setdefault((value.device, value.dtype), {})[name] = value
        else:
            captured[name] = _capture_one(name, value)
    for group in scalars.values():
        captured.update(capture_scalars(group))
    return captured


def capture_scalars(scalars: Mapping[str, Tensor]) -> dict[str, Reader]:
    """Copy scalar tensors of one device and dtype to the host, in one copy; does not wait for it.

    Args:
        scalars: By name, each `()`.
    """
    if len(scalars) == 1:
        return {name: partial(_read_plain, capture_tensor(value)) for name, value in scalars.items()}
    reader = capture_tensor(torch.stack([value.detach() for value in scalars.values()]))
    return {name: partial(_read_plain, reader, index) for index, name in enumerate(scalars)}


def read(captured: Captured) -> Number:
    """Return a captured value; wait for it if it is not ready."""
    return captured() if callable(captured) else captured


def _capture_one(name: str, value: Any) -> Captured:
    if isinstance(value, Tensor):
        if hasattr(value, "full_tensor"):
            raise TypeError(
                f"`{name}` is a `DTensor`, and reading it is a collective, which a logger may not start; "
                "log `value.full_tensor()`, or the part that this rank has, `value.to_local()`"
            )
        return (
            partial(_read_plain, capture_tensor(value)) if value.ndim or not value.is_cpu else _plain(value)
        )
    if hasattr(value, "item"):  # a NumPy scalar, or an array of one
        return _plain(value)
    if callable(getattr(value, "wait", None)):
        return _WaitOnce(value)
    if hasattr(value, "__float__"):
        return float(value)
    raise TypeError(
        f"`{name}` is a `{type(value).__name__}`; expected a number, a tensor, or a handle with `wait()`"
    )


def capture_tensor(tensor: Tensor) -> Callable[[], Tensor]:
    """Copy a tensor as it is now and return a reader of the copy. Does not wait for the device.

    On CUDA the copy goes to pinned host memory in the order of the current stream, and the reader waits for
    it; a CPU tensor is cloned. Any thread may call the reader, more than once.
    """
    tensor = tensor.detach()
    if tensor.device.type == "cuda":
        landing = torch.empty_like(tensor, device="cpu", pin_memory=True)
        landing.copy_(tensor, non_blocking=True)
        # Blocking, so that the reading thread sleeps while it waits; spinning would take a core.
        arrival = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        arrival.record(torch.cuda.current_stream(tensor.device))

        def read_landing() -> Tensor:
            arrival.synchronize()
            return landing

        return read_landing
    copy = tensor.clone()
    return lambda: copy


def _read_plain(reader: Callable[[], Tensor], index: int | None = None) -> Number:
    tensor = reader()
    return _plain(tensor if index is None else tensor[index])


def _plain(value: Any) -> Number:
    if isinstance(value, Tensor) and value.requires_grad:
        value = value.detach()
    if getattr(value, "ndim", 0) == 0:
        return value.item() if hasattr(value, "item") else value  # type: ignore[no-any-return]
    return value.tolist()  # type: ignore[no-any-return]


class _WaitOnce:
    """A reader that waits for a handle once; later calls get the same value or the same error."""

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
