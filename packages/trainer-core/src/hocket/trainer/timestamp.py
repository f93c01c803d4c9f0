"""`Timestamp`: the progress of training, counted in every unit.

Counts are numbers on the host, so this module never waits for a device. A step builds one tuple of `Counts`;
a `Timestamp` is built from the tuple on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from hocket.trainer.errors import TimeUnitError, TimeValueError
from hocket.trainer.time import Time, TimeUnit, ensure_time, parse_unit


class Counts(NamedTuple):
    """The plain numbers of a `Timestamp`: counts, and wall-clock times (`*_wct`) in seconds."""

    iteration: int = 0
    epoch: int = 0
    batch: int = 0
    sample: int = 0
    token: int = 0
    epoch_in_iteration: int = 0
    token_in_iteration: int = 0
    batch_in_epoch: int = 0
    sample_in_epoch: int = 0
    token_in_epoch: int = 0
    total_wct: float = 0.0
    iteration_wct: float = 0.0
    epoch_wct: float = 0.0
    batch_wct: float = 0.0


_INDEX_OF_UNIT = {
    TimeUnit.ITERATION: Counts._fields.index("iteration"),
    TimeUnit.EPOCH: Counts._fields.index("epoch"),
    TimeUnit.BATCH: Counts._fields.index("batch"),
    TimeUnit.SAMPLE: Counts._fields.index("sample"),
    TimeUnit.TOKEN: Counts._fields.index("token"),
    TimeUnit.SECOND: Counts._fields.index("total_wct"),
}


def _seconds(duration: Time | float | timedelta) -> float:
    return duration.total_seconds() if isinstance(duration, timedelta) else float(duration)


def timestamp_of(counts: Counts) -> Timestamp:
    """Return the timestamp of counts, without checking them."""
    timestamp = object.__new__(Timestamp)
    object.__setattr__(timestamp, "counts", counts)
    return timestamp


def after_batch(now: Counts, samples: int, tokens: int, seconds: float) -> Counts:
    """Return the counts after one more batch."""
    (
        iteration, epoch, batch, sample, token, epoch_in_iteration, token_in_iteration,
        batch_in_epoch, sample_in_epoch, token_in_epoch, total_wct, iteration_wct, epoch_wct, _,
    ) = now  # fmt: skip
    # `tuple.__new__` takes half the time of a named tuple's own constructor, and this runs every step.
    return tuple.__new__(
        Counts,
        (
            iteration,
            epoch,
            batch + 1,
            sample + samples,
            token + tokens,
            epoch_in_iteration,
            token_in_iteration + tokens,
            batch_in_epoch + 1,
            sample_in_epoch + samples,
            token_in_epoch + tokens,
            total_wct + seconds,
            iteration_wct + seconds,
            epoch_wct + seconds,
            seconds,
        ),
    )


def index_of(unit: TimeUnit) -> int:
    """Return the index in `Counts` of the training done in `unit`, which must not be `dur`."""
    return _INDEX_OF_UNIT[unit]


def count_in(counts: Counts, unit: TimeUnit) -> int:
    """Return the training done so far in `unit` (whole seconds for `sec`), as a plain number.

    Raises:
        TimeUnitError: If `unit` is `dur`.
    """
    if unit is TimeUnit.DURATION:
        raise TimeUnitError(
            "a timestamp alone has no `dur`: the share of the training depends on its duration; "
            "ask the state, or name a unit such as `ba`"
        )
    return int(counts[_INDEX_OF_UNIT[unit]])


class _CountAttribute:
    """An attribute of `Timestamp` that reads one count as a `Time`."""

    def __init__(self, name: str, unit: TimeUnit, doc: str) -> None:
        self._index = Counts._fields.index(name)
        self.unit = unit
        self.__doc__ = doc

    def __get__(self, timestamp: Timestamp | None, owner: type | None = None) -> Time:
        if timestamp is None:
            return self  # type: ignore[return-value]  # on the class, for documentation tools
        return Time(timestamp.counts[self._index], self.unit)


class _ClockAttribute:
    """An attribute of `Timestamp` that reads one wall-clock time as a `timedelta`."""

    def __init__(self, name: str, doc: str) -> None:
        self._index = Counts._fields.index(name)
        self.__doc__ = doc

    def __get__(self, timestamp: Timestamp | None, owner: type | None = None) -> timedelta:
        if timestamp is None:
            return self  # type: ignore[return-value]  # on the class, for documentation tools
        return timedelta(seconds=timestamp.counts[self._index])


class Timestamp:
    """A point in training: the counts of completed work in every unit. Immutable.

    Counts start at 0 and include completed work only: during the first batch, `batch` is 0. Samples and
    tokens are those of all ranks together. Attributes are `Time`s (durations `timedelta`s); code that runs
    every step takes the plain numbers from `counts`. A comparison with a `Time` or a time string uses the
    unit of that time.

    Args:
        numbers: Any of the fields of `Counts`, as numbers or `Time`s (durations as seconds or `timedelta`).

    Example:
        >>> now = Timestamp(epoch=1, batch=40, batch_in_epoch=10).to_next_batch(samples=32, duration=0.1)
        >>> now.batch, now.counts.sample, now >= "41ba"
        (Time(41, TimeUnit.BATCH), 32, True)
    """

    __slots__ = ("counts",)

    counts: Counts

    def __init__(self, **numbers: Time | float | timedelta) -> None:
        plain: dict[str, Any] = {}
        for name, number in numbers.items():
            if name not in Counts._fields:
                known = ", ".join(f"`{field}`" for field in Counts._fields)
                raise TimeValueError(f"`{name}` is no part of a timestamp; expected one of {known}")
            if name.endswith("_wct"):
                plain[name] = _seconds(number)
            else:
                unit = vars(Timestamp)[name].unit
                # The addition checks that a `Time` has the unit of its field.
                plain[name] = (Time(0, unit) + number).value  # type: ignore[operator]  # refused at runtime
        object.__setattr__(self, "counts", Counts(**plain))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"a `Timestamp` never changes; `{name}` is set in a new one: `timestamp.copy({name}=…)`"
        )

    iteration = _CountAttribute("iteration", TimeUnit.ITERATION, "Complete iterations.")
    epoch = _CountAttribute("epoch", TimeUnit.EPOCH, "Complete epochs.")
    batch = _CountAttribute("batch", TimeUnit.BATCH, "Complete batches.")
    sample = _CountAttribute("sample", TimeUnit.SAMPLE, "Samples trained on.")
    token = _CountAttribute("token", TimeUnit.TOKEN, "Tokens trained on.")
    epoch_in_iteration = _CountAttribute(
        "epoch_in_iteration", TimeUnit.EPOCH, "Complete epochs of this iteration."
    )
    token_in_iteration = _CountAttribute("token_in_iteration", TimeUnit.TOKEN, "Tokens of this iteration.")
    batch_in_epoch = _CountAttribute("batch_in_epoch", TimeUnit.BATCH, "Complete batches of this epoch.")
    sample_in_epoch = _CountAttribute("sample_in_epoch", TimeUnit.SAMPLE, "Samples of this epoch.")
    token_in_epoch = _CountAttribute("token_in_epoch", TimeUnit.TOKEN, "Tokens of this epoch.")
    total_wct = _ClockAttribute("total_wct", "Wall-clock time of training, evaluation left out.")
    iteration_wct = _ClockAttribute("iteration_wct", "Wall-clock time of this iteration.")
    epoch_wct = _ClockAttribute("epoch_wct", "Wall-clock time of this epoch.")
    batch_wct = _ClockAttribute("batch_wct", "Wall-clock time of the last batch.")

    def get(self, unit: TimeUnit | str) -> Time:
        """Return the training done so far in `unit`; in `sec`, whole seconds of wall-clock time.

        Raises:
            TimeUnitError: If `unit` is `dur`, which needs the duration; see `State.get_elapsed_duration`.
        """
        unit = unit if type(unit) is TimeUnit else parse_unit(unit)
        return Time(count_in(self.counts, unit), unit)

    def to_next_batch(
        self, samples: int = 0, tokens: int = 0, duration: float | timedelta = 0.0
    ) -> Timestamp:
        """Return the timestamp after one more batch.

        Args:
            samples: Samples in the batch, of all ranks together.
            tokens: Tokens in the batch, of all ranks together.
            duration: Time of the batch, in seconds or as a `timedelta`.
        """
        return timestamp_of(after_batch(self.counts, samples, tokens, _seconds(duration)))

    def to_next_epoch(self, *, duration: float | timedelta = 0.0) -> Timestamp:
        """Return the timestamp at the start of the next epoch.

        Args:
            duration: Time since the last batch, in seconds or as a `timedelta`.
        """
        now, seconds = self.counts, _seconds(duration)
        return timestamp_of(
            now._replace(
                total_wct=now.total_wct + seconds,
                iteration_wct=now.iteration_wct + seconds,
                epoch=now.epoch + 1,
                epoch_in_iteration=now.epoch_in_iteration + 1,
                batch_in_epoch=0,
                sample_in_epoch=0,
                token_in_epoch=0,
                epoch_wct=0.0,
                batch_wct=0.0,
            )
        )

    def to_next_iteration(self, *, duration: float | timedelta = 0.0) -> Timestamp:
        """Return the timestamp at the start of the next iteration.

        Args:
            duration: Time since the last epoch, in seconds or as a `timedelta`.
        """
        now = self.counts
        return timestamp_of(
            now._replace(
                total_wct=now.total_wct + _seconds(duration),
                iteration=now.iteration + 1,
                epoch_in_iteration=0,
                token_in_iteration=0,
                iteration_wct=0.0,
                batch_wct=0.0,
            )
        )

    def copy(self, **numbers: Time | float | timedelta) -> Timestamp:
        """Return a copy with the given numbers replaced."""
        changed = Timestamp(**numbers).counts
        return timestamp_of(self.counts._replace(**{name: getattr(changed, name) for name in numbers}))

    def state_dict(self) -> dict[str, int | float]:
        """Return the numbers by name, ready for JSON."""
        return self.counts._asdict()

    @classmethod
    def from_state_dict(cls, state: Mapping[str, int | float]) -> Timestamp:
        """Make a timestamp from the return value of `state_dict`; missing names are 0.

        Raises:
            TimeValueError: If a name is unknown or a count is no whole number.
        """
        return cls(**state)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Timestamp):
            return self.counts == other.counts
        if isinstance(other, (Time, str)):
            other = ensure_time(other)
            return self.get(other.unit) == other
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.counts)

    def __lt__(self, other: Time | str) -> bool:
        other = ensure_time(other)
        return self.get(other.unit) < other

    def __le__(self, other: Time | str) -> bool:
        other = ensure_time(other)
        return self.get(other.unit) <= other

    def __gt__(self, other: Time | str) -> bool:
        other = ensure_time(other)
        return self.get(other.unit) > other

    def __ge__(self, other: Time | str) -> bool:
        other = ensure_time(other)
        return self.get(other.unit) >= other

    def __reduce__(self) -> tuple[Callable[[Counts], Timestamp], tuple[Counts]]:
        return timestamp_of, (self.counts,)

    def describe(self) -> str:
        """Return the epoch and the batch in words: `"epoch 1, batch 7"`."""
        return f"epoch {self.counts.epoch}, batch {self.counts.batch}"

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={number!r}" for name, number in self.counts._asdict().items() if number)
        return f"Timestamp({fields})"
