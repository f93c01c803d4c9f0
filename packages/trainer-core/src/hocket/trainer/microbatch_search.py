"""The search for a microbatch size that fits: its settings, its meter, and its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hocket.trainer.errors import TrainerConfigError

AUTO = "auto"


class MemoryMeter(Protocol):
    """Measures the memory that this process uses on its device."""

    def start(self) -> None:
        """Forget the peak so far."""

    def peak_bytes(self) -> int:
        """Return the most bytes in use at once since `start`."""

    def limit_bytes(self) -> int:
        """Return the bytes that this process can use in all."""


class CudaMeter:
    """The counters of torch's CUDA allocator.

    Args:
        device: The device of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """See `MemoryMeter`; cached blocks go back to the driver."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """See `MemoryMeter`."""
        return torch.cuda.max_memory_allocated(self._device)

    def limit_bytes(self) -> int:
        """See `MemoryMeter`; what other processes hold on the device is not counted."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchSearch:
    """How `device_train_microbatch_size="auto"` finds its size; pass it in place of `"auto"` to change it.

    Example:
        >>> Trainer(model=model, device_train_microbatch_size=MicrobatchSearch(headroom=0.2), ...)
    """

    headroom: float = 0.1
    """The share of the memory that stays free, for fragmentation and for larger batches."""
    largest_batch: Any = None
    """A batch of the largest shape that occurs (the longest sequences), on the device; the first batch of
    training by default."""
    meter: MemoryMeter | None = None
    """Measures the memory; the counters of CUDA's allocator by default."""

    def __post_init__(self) -> None:
        if not 0 <= self.headroom < 1:
            raise TrainerConfigError(
                f"`headroom` of `MicrobatchSearch` is {self.headroom!r}; expected a share from 0 up to 1"
            )

    @classmethod
    def of(cls, given: Any) -> MicrobatchSearch | None:
        """Return the search that `device_train_microbatch_size` asks for; None for a stated size."""
        if isinstance(given, cls):
            return given
        return cls() if isinstance(given, str) and given == AUTO else None

    def meter_of(self, device: torch.device) -> MemoryMeter:
        """Return the meter.

        Raises:
            TrainerConfigError: If the device has no counter of its memory.
        """
        if self.meter is not None:
            return self.meter
        if device.type != "cuda":
            raise TrainerConfigError(
                f"`device_train_microbatch_size='auto'` measures the memory of a CUDA device, and the device "
                f"is `{device}`; state a number of samples, or a `MicrobatchSearch(meter=…)`"
            )
        return CudaMeter(device)


def samples_that_fit(points: tuple[tuple[int, int], tuple[int, int]], limit_bytes: float, most: int) -> int:
    """Return how many samples fit, from two measurements, on the line fixed + per-sample cost.

    Args:
        points: Two pairs (samples, peak bytes).
        limit_bytes: The bytes to stay within.
        most: The largest answer; also the answer where memory does not grow with the samples.
    """
    (few, small), (many, large) = points
    per_sample = (large - small) / (many - few)
    if per_sample <= 0:
        return most
    fixed = small - few * per_sample
    return max(1, min(most, int((limit_bytes - fixed) / per_sample)))


def even_share(size: int, samples: int) -> int:
    """Return the size, at most `size`, that divides a batch into as many microbatches most evenly."""
    num = -(-samples // size)
    return -(-samples // num)
