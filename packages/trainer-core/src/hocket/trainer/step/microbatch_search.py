"""The search for a microbatch size that fits: its settings, its meter, and its arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from hocket.trainer.checks import check_keys
from hocket.trainer.errors import TrainerConfigError

AUTO = "auto"


class MemoryMeter(Protocol):
    """A meter of the memory that this process uses on its device."""

    def start(self) -> None:
        """Reset the peak."""

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
        """See `MemoryMeter`; also returns the allocator's cached blocks to the driver."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """See `MemoryMeter`."""
        return torch.cuda.max_memory_allocated(self._device)

    def limit_bytes(self) -> int:
        """See `MemoryMeter`; memory that other processes hold on the device is not included."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchSearch:
    """The settings of `device_train_microbatch_size="auto"`; to change them, pass one or a dict of them.

    Example:
        >>> Trainer(model=model, device_train_microbatch_size=MicrobatchSearch(headroom=0.2), ...)
    """

    headroom: float = 0.1
    """The share of the memory that stays free, for fragmentation and for larger batches."""
    largest_batch: Any = None
    """A batch of the largest shape that occurs (the longest sequences), on the device; the first batch of
    training by default."""
    meter: MemoryMeter | None = None
    """The meter of the memory; None for the counters of the CUDA allocator."""

    def __post_init__(self) -> None:
        if not 0 <= self.headroom < 1:
            raise TrainerConfigError(
                f"`headroom` of `MicrobatchSearch` is {self.headroom!r}; expected a share from 0 up to 1"
            )

    @classmethod
    def of(cls, given: Any) -> MicrobatchSearch | None:
        """Return the search that `device_train_microbatch_size` states; None for a fixed size.

        Raises:
            TrainerConfigError: If a dict of settings has an unknown key or an invalid value.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping):
            check_keys("device_train_microbatch_size", given, [field.name for field in fields(cls)])
            return cls(**given)
        return cls() if isinstance(given, str) and given == AUTO else None

    def meter_of(self, device: torch.device) -> MemoryMeter:
        """Return the meter for a device.

        Raises:
            TrainerConfigError: If no meter is given and the device is not a CUDA device.
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
    """Return the number of samples that fit, by a linear model: fixed bytes + bytes per sample.

    Args:
        points: Two measurements, as pairs (samples, peak bytes).
        limit_bytes: The most bytes to use.
        most: The largest result; also the result if memory does not grow with the samples.
    """
    (low_size, low_bytes), (high_size, high_bytes) = points
    bytes_per_sample = (high_bytes - low_bytes) / (high_size - low_size)
    if bytes_per_sample <= 0:
        return most
    fixed_bytes = low_bytes - low_size * bytes_per_sample
    return max(1, min(most, int((limit_bytes - fixed_bytes) / bytes_per_sample)))


def even_share(size: int, samples: int) -> int:
    """Return the size, at most `size`, that splits a batch most evenly into as many microbatches."""
    num = -(-samples // size)
    return -(-samples // num)
