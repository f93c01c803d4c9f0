"""Numbers of every rank, gathered asynchronously during training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hocket.trainer.log.deferred_value import capture_tensor
from hocket.trainer.ranks.rank_gather import RankReducer, gather_async


class RankValues:
    """A few numbers of each rank, gathered to all ranks by an asynchronous all-reduce.

    Collective: every rank must construct this object at the same event. A read one batch later does not
    wait.

    Args:
        parallelism: The parallelism of the run, which computes the sum.
        values: This rank's numbers: plain ones, or a tensor `(n,)` on the device, which is not read here.
    """

    def __init__(self, parallelism: RankReducer, values: Sequence[float] | Tensor) -> None:
        self._on_device = isinstance(values, Tensor) and values.device.type != "cpu"
        if isinstance(values, Tensor):
            dtype = torch.float32 if values.device.type == "mps" else torch.float64
            values = values.detach().flatten().to(dtype)
        self._gathered = gather_async(values, parallelism)
        self._reader: Callable[[], Tensor] | None = None
        # Several loggers' threads may read the same numbers.
        self._lock = threading.Lock()
        self._rows: list[list[float]] | None = None

    def start_copy(self) -> None:
        """Start the copy of the sum to the host, if it is on a device. Does not wait for the device."""
        if self._reader is None and self._on_device:
            self._reader = capture_tensor(self._gathered.wait())

    def read(self) -> list[list[float]]:
        """Return the numbers of every rank, in the order of the ranks. Blocks until they have arrived."""
        with self._lock:
            if self._rows is None:
                self.start_copy()
                rows = self._reader() if self._reader is not None else self._gathered.wait()
                self._rows = rows.tolist()
            return self._rows


class DelayedRows:
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
