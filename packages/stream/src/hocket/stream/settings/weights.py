"""The number of samples of each stream in an epoch."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

from hocket.stream.errors import ConfigError

_POWERS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


class StreamWeights(Protocol):
    """The weights of a stream."""

    @property
    def proportion(self) -> float | None:
        """Share relative to the other streams."""

    @property
    def repeat(self) -> float | None:
        """Multiple of the stream's size."""

    @property
    def choose(self) -> int | None:
        """Number of samples."""


def parse_count(name: str, value: int | str) -> int:
    """Return a number of samples from an integer or a string such as `100k`, `64M`, `2b` or `1.5t`.

    Suffixes are powers of 1,000.

    Raises:
        ConfigError: `value` is neither, is not whole, or is below 1.
    """
    count: Fraction | int = 0
    if isinstance(value, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmbt]?)", value.strip().lower().replace(",", ""))
        if found:
            count = Fraction(found[1]) * _POWERS[found[2]]
    elif not isinstance(value, bool):
        try:
            count = operator.index(value)
        except TypeError:
            count = 0
    if count < 1 or count != int(count):
        raise ConfigError(
            f"`{name}` is {value!r}: expected a whole number of samples from 1, such as 100000 or '100k'"
        )
    return int(count)


def resolve_counts(
    weights: Sequence[StreamWeights], sizes: Sequence[int], *, epoch_size: int | None = None
) -> list[int]:
    """Return the number of samples of each stream in an epoch.

    With proportions the epoch has `epoch_size` samples, by default the total of all streams, and each count
    is within one of its exact share. With `epoch_size` and no weights, the sizes are the proportions. With
    neither, an epoch has each sample once.

    Args:
        weights: Weights of the streams.
        sizes: Number of samples in each stream.
        epoch_size: Number of samples in an epoch.

    Raises:
        ConfigError: Only some streams have a proportion, all proportions are 0, or `epoch_size` is given
            beside `repeat` or `choose`.
    """
    is_relative = [weight.proportion is not None for weight in weights]
    is_absolute = any(weight.repeat is not None or weight.choose is not None for weight in weights)
    if any(is_relative):
        if not all(is_relative):
            raise ConfigError(
                f"stream {is_relative.index(False)} has no `proportion` and stream {is_relative.index(True)} "
                "has one: expected one for all streams or for none"
            )
        shares = [_exact(weight.proportion or 0) for weight in weights]
        return _apportion(sum(sizes) if epoch_size is None else epoch_size, shares)
    if epoch_size is not None:
        if is_absolute:
            raise ConfigError(
                f"`epoch_size` is {epoch_size} beside `repeat` or `choose`, which give the epoch its size: "
                "expected one of them; use `proportion` to divide an `epoch_size`"
            )
        return _apportion(epoch_size, [Fraction(size) for size in sizes])
    return [_count(weight, size) for weight, size in zip(weights, sizes, strict=True)]


def _count(weight: StreamWeights, size: int) -> int:
    if weight.choose is not None:
        return int(weight.choose)
    return size if weight.repeat is None else int(_exact(weight.repeat) * size)


def _exact(value: float) -> Fraction:
    """Return the decimal value of a float as written: 0.7 is 7/10 and not the nearest binary number."""
    return Fraction(str(value))


def _apportion(total: int, shares: Sequence[Fraction]) -> list[int]:
    """Divide `total` in proportion to `shares`, by largest remainder; ties go to the earlier stream."""
    total_share = sum(shares)
    if not total_share:
        raise ConfigError(
            "the streams' shares add up to 0: expected at least one above 0, of a stream with samples"
        )
    exact = [total * share / total_share for share in shares]
    counts = [int(value) for value in exact]
    order = sorted(range(len(shares)), key=lambda i: counts[i] - exact[i])
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts
