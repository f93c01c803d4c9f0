"""Spans of training time with their units: "10ep", "100ba", "3e4tok", "0.5dur", "1h30m10s"."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from types import GenericAlias
from typing import Any, ClassVar, TypeAlias

from hocket.trainer.errors import TimeUnitError, TimeValueError


class TimeUnit(StrEnum):
    """The unit of a `Time`; its value is the suffix of a time string."""

    ITERATION = "iter"
    EPOCH = "ep"
    BATCH = "ba"
    SAMPLE = "sp"
    TOKEN = "tok"
    DURATION = "dur"
    SECOND = "sec"


TimeInput: TypeAlias = "Time | int | float | str"

_UNIT_BY_SUFFIX = {unit.value: unit for unit in TimeUnit}
_NUMBER_AND_SUFFIX = re.compile(
    r"([+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?) *(iter|ep|ba|sp|tok|dur|sec)", re.ASCII
)
_CLOCK = re.compile(r"(?=\d)(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)


@dataclass(frozen=True, slots=True, init=False, eq=False)
class Time:
    """A number of one `TimeUnit`.

    Values are whole numbers, except in `TimeUnit.DURATION`, whose value is a fraction of the training
    duration. Order, `+`, `-` and `%` need the same unit on both sides; on the other side, an `int` or `float`
    is read in this time's unit, and a string in its own unit. Times of different units are never equal. A
    `Time` multiplied by a number or by a `dur` rounds down to a whole number of its unit.

    Attributes:
        value: The number.
        unit: The unit of the number.

    Example:
        >>> Time.from_timestring("3e4tok")
        Time(30000, TimeUnit.TOKEN)
        >>> Time(10, "ep") * 0.25
        Time(2, TimeUnit.EPOCH)
        >>> Time(10, "ba") >= "9ba"
        True
    """

    value: int | float
    unit: TimeUnit

    def __init__(self, value: float, unit: TimeUnit | str) -> None:
        if type(unit) is not TimeUnit:
            unit = parse_unit(unit)
        if type(value) is not int or unit is TimeUnit.DURATION:
            value = _check_value(value, unit)
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "unit", unit)

    # For annotations such as `Time[int]`, as Composer's are written; every `Time` is the same class.
    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)

    @classmethod
    def from_iteration(cls, iteration: int) -> Time:
        """Make a time in `iter`."""
        return cls(iteration, TimeUnit.ITERATION)

    @classmethod
    def from_epoch(cls, epoch: int) -> Time:
        """Make a time in `ep`."""
        return cls(epoch, TimeUnit.EPOCH)

    @classmethod
    def from_batch(cls, batch: int) -> Time:
        """Make a time in `ba`."""
        return cls(batch, TimeUnit.BATCH)

    @classmethod
    def from_sample(cls, sample: int) -> Time:
        """Make a time in `sp`."""
        return cls(sample, TimeUnit.SAMPLE)

    @classmethod
    def from_token(cls, token: int) -> Time:
        """Make a time in `tok`."""
        return cls(token, TimeUnit.TOKEN)

    @classmethod
    def from_duration(cls, duration: float) -> Time:
        """Make a time in `dur`."""
        return cls(duration, TimeUnit.DURATION)

    @classmethod
    def from_timestring(cls, text: str) -> Time:
        """Read `"10ep"`, `"3e4tok"`, `"0.5dur"`, `"90sec"` or a clock span such as `"1h30m10s"`.

        Raises:
            TimeValueError: If the text is none of these, or has a fraction of a unit other than `dur`.
        """
        plain = text.strip().lower()
        if found := _NUMBER_AND_SUFFIX.fullmatch(plain):
            unit = _UNIT_BY_SUFFIX[found[2]]
            if unit is TimeUnit.DURATION:
                return cls(float(found[1]), unit)
            # Decimal keeps "3e4" and counts beyond 2**53 exact, which float would not.
            number = Decimal(found[1])
            if number != number.to_integral_value():
                raise TimeValueError(
                    f"`{text}` is not a whole number of `{unit.value}`, and only `dur` takes fractions; "
                    "state it in a smaller unit, or as a fraction of the training such as `0.5dur`"
                )
            return cls(int(number), unit)
        if found := _CLOCK.fullmatch(plain):
            hours, minutes, seconds = (int(part or 0) for part in found.groups())
            return cls(hours * 3600 + minutes * 60 + seconds, TimeUnit.SECOND)
        raise TimeValueError(
            f"`{text}` is no time; expected a number and one of the units "
            f"{', '.join(f'`{suffix}`' for suffix in _UNIT_BY_SUFFIX)}, such as `10ep`, "
            "or a span such as `1h30m10s`"
        )

    @classmethod
    def from_input(cls, given: TimeInput, default_unit: TimeUnit | str | None = None) -> Time:
        """Make a `Time` from a `Time`, a time string, or a bare number in `default_unit`.

        Raises:
            TimeValueError: If `given` is not a time, or is a bare number without a default unit.
        """
        if isinstance(given, Time):
            return given
        if isinstance(given, str):
            return cls.from_timestring(given)
        if default_unit is None:
            raise TimeValueError(f"`{given}` has no unit; expected a time such as `10ep` or `100ba`")
        return cls(given, default_unit)

    def to_timestring(self) -> str:
        """Return this time as text that `from_timestring` reads back to an equal `Time`."""
        return f"{self.value!r}{self.unit.value}"

    def _number_of(self, other: object) -> int | float:
        """Return the value of `other`, which must be a time in this unit."""
        try:
            time = Time.from_input(other, self.unit)  # type: ignore[arg-type]  # checked by what follows
        except (TimeValueError, AttributeError) as error:
            raise TimeValueError(f"`{other!r}` is no time in `{self.unit.value}`: {error}") from None
        if time.unit is not self.unit:
            raise TimeUnitError(
                f"`{self}` and `{time}` are in different units; state both in `{self.unit.value}`, "
                f"or compare with `Timestamp.get({time.unit.value!r})`"
            )
        return time.value

    def __eq__(self, other: object) -> bool:
        kind = type(other)
        if kind is Time:
            return self.unit is other.unit and self.value == other.value  # type: ignore[attr-defined]
        if kind is int or kind is float:
            return self.value == other
        if isinstance(other, str):
            return self == Time.from_timestring(other)
        return NotImplemented

    def __hash__(self) -> int:
        # The hash of the number, since a time equals a bare number of its own unit.
        return hash(self.value)

    def __lt__(self, other: TimeInput) -> bool:
        return self.value < self._number_of(other)

    def __le__(self, other: TimeInput) -> bool:
        return self.value <= self._number_of(other)

    def __gt__(self, other: TimeInput) -> bool:
        return self.value > self._number_of(other)

    def __ge__(self, other: TimeInput) -> bool:
        return self.value >= self._number_of(other)

    def __add__(self, other: TimeInput) -> Time:
        return Time(self.value + self._number_of(other), self.unit)

    __radd__ = __add__

    def __sub__(self, other: TimeInput) -> Time:
        return Time(self.value - self._number_of(other), self.unit)

    def __rsub__(self, other: TimeInput) -> Time:
        return Time(self._number_of(other) - self.value, self.unit)

    def __neg__(self) -> Time:
        return Time(-self.value, self.unit)

    def __mod__(self, other: TimeInput) -> Time:
        return Time(self.value % self._number_of(other), self.unit)

    def __mul__(self, other: Time | float) -> Time:
        if isinstance(other, Time):
            if TimeUnit.DURATION not in (self.unit, other.unit):
                raise TimeUnitError(
                    f"`{self}` × `{other}` means nothing; one of the two must be a number or a `dur`"
                )
            if self.unit is TimeUnit.DURATION:
                self, other = other, self  # the product has the unit of the other factor
            other = other.value
        product = self.value * other
        return Time(product if self.unit is TimeUnit.DURATION else floor_of_product(product), self.unit)

    __rmul__ = __mul__

    def __truediv__(self, other: TimeInput) -> Time:
        """Return the ratio to a time of the same unit, as a `dur`; or divide by a number, rounded down."""
        if isinstance(other, (int, float)):
            return self * (1 / other)
        return Time(self.value / self._number_of(other), TimeUnit.DURATION)

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)  # type: ignore[arg-type]  # raises for a fraction, as it should

    def __float__(self) -> float:
        return float(self.value)

    def __bool__(self) -> bool:
        return self.value != 0

    def describe(self) -> str:
        """Return the time in words: `"3 epochs"`, `"1,000 batches"`, `"2 h 5 min"`."""
        if self.unit is TimeUnit.SECOND:
            return describe_seconds(self.value)
        if self.unit is TimeUnit.DURATION:
            return f"{self.value * 100:g} % of the training"
        name = self.unit.name.lower()
        plural = name if self.value == 1 else "batches" if self.unit is TimeUnit.BATCH else f"{name}s"
        return f"{self.value:,} {plural}"

    def __str__(self) -> str:
        return self.to_timestring()

    def __repr__(self) -> str:
        return f"Time({self.value!r}, TimeUnit.{self.unit.name})"


def describe_seconds(seconds: float) -> str:
    """Return a time in words, in its two largest units: `"3.2 s"`, `"4 min 10 s"`, `"2 d 3 h"`."""
    if seconds < 59.95:
        return f"{round(seconds, 1):g} s" if seconds >= 0.1 or not seconds else f"{seconds:.1g} s"
    left, parts = round(seconds), list[str]()
    for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        number, left = divmod(left, size)
        if number or parts:
            parts.append(f"{number} {name}" if number else "")
    return " ".join(part for part in parts[:2] if part)


def ensure_time(given: TimeInput, default_unit: TimeUnit | str | None = None) -> Time:
    """Make a `Time` from a user's input: a `Time`, a time string, or a number in `default_unit`.

    Raises:
        TimeValueError: If `given` is not a time, or is a bare number without a default unit.
    """
    return Time.from_input(given, default_unit)


def floor_of_product(product: float) -> int:
    """Round down, with a tolerance for float errors: 0.29 × 100 is 28.999999999999996, and 29 here."""
    nearest = round(product)
    return nearest if abs(product - nearest) <= 4 * math.ulp(product) else math.floor(product)


def parse_unit(unit: str) -> TimeUnit:
    """Return the unit with a suffix.

    Raises:
        TimeValueError: If no unit has the suffix; the message lists the known suffixes.
    """
    try:
        return TimeUnit(unit)
    except ValueError:
        known = ", ".join(f"`{suffix}`" for suffix in _UNIT_BY_SUFFIX)
        raise TimeValueError(f"`{unit}` is no unit of time; expected one of {known}") from None


def _check_value(value: object, unit: TimeUnit) -> int | float:
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TimeValueError(f"`{value!r}` is no number of `{unit.value}`; expected a number")
    if unit is TimeUnit.DURATION:
        fraction = float(value)
        if not math.isfinite(fraction):
            raise TimeValueError(
                f"`{value!r}` is no part of a training; expected a finite number, such as `0.5`"
            )
        return fraction
    try:
        return operator.index(value)  # type: ignore[arg-type]  # an integer of any library; else TypeError
    except TypeError:
        raise TimeValueError(
            f"`{value!r}` is not a whole number of `{unit.value}`; expected an `int`, "
            "since only `dur` takes fractions"
        ) from None
