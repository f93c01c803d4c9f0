"""Numbers of every rank, gathered asynchronously during training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hocket.trainer.log.deferred_value import capture_tensor

if TYPE_CHECKING:
    from hocket.trainer.state import State


class RankValues:
    """A few numbers of each rank, gathered to all ranks by an asynchronous all-reduce.

    Every rank adds its numbers to zeros in its own row, and one asynchronous sum gives all rows to all
    ranks. Collective: every rank must construct this object at the same event. A read one batch later does
    not wait.

    Args:
        state: The state of the run, whose parallelism computes the sum.
        values: This rank's numbers: plain ones, or a tensor `(n,)` on the device, which is not read here.
    """

    def __init__(self, state: State, values: Sequence[float] | Tensor) -> None:
        rank, self._size = state.parallelism.data_parallel
        row = (
            values.detach() if isinstance(values, Tensor) else torch.tensor(list(values), dtype=torch.float64)
        )
        dtype = torch.float32 if row.device.type == "mps" else torch.float64
        rows = torch.zeros(self._size, row.numel(), dtype=dtype, device=row.device)
        rows[rank] = row
        self._work = state.parallelism.reduce_async(rows.flatten())
        self._reader: Callable[[], Tensor] | None = None
        self._on_device = row.device.type != "cpu"
        # Several loggers' threads may read the same numbers.
        self._lock = threading.Lock()
        self._rows: list[list[float]] | None = None

    def start_copy(self) -> None:
        """Start the copy of the sum to the host, if it is on a device. Does not wait for the device."""
        if self._reader is None and self._on_device:
            self._reader = capture_tensor(self._work.wait())

    def read(self) -> list[list[float]]:
        """Return the numbers of every rank, in the order of the ranks. Blocks until they have arrived."""
        with self._lock:
            if self._rows is None:
                self.start_copy()
                summed = self._reader() if self._reader is not None else self._work.wait()
                self._rows = summed.reshape(self._size, -1).tolist()
            return self._rows


class Delayed:
    """Passes each gathered value to a function one batch later, when the value has arrived.

    Args:
        then: A function of the rows of `RankValues.read` and the batch they belong to.
    """

    def __init__(self, then: Callable[[list[list[float]], int], None]) -> None:
        self._then = then
        self._pending: tuple[RankValues, int] | None = None

    def push(self, values: RankValues, batch: int) -> None:
        """Pass on the values of the previous call, and keep these. Collective, as `RankValues` is."""
        values.start_copy()
        self.flush()
        self._pending = values, batch

    def flush(self) -> None:
        """Pass on the values of the last `push`. Blocks until they have arrived."""
        pending, self._pending = self._pending, None
        if pending is not None:
            values, batch = pending
            self._then(values.read(), batch)
