"""Times and intervals that callbacks take as arguments."""

from __future__ import annotations

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.time import TimeInput, TimeUnit, ensure_time

_SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}


def seconds_per(time_unit: str) -> float:
    """Return the seconds in a unit.

    Raises:
        TrainerConfigError: If `time_unit` is not `seconds`, `minutes`, `hours` or `days`.
    """
    if time_unit not in _SECONDS:
        units = ", ".join(f"`{unit}`" for unit in _SECONDS)
        raise TrainerConfigError(f"`time_unit` is `{time_unit}`; expected one of {units}")
    return _SECONDS[time_unit]


def batches_between(interval: TimeInput) -> int:
    """Return an interval as a number of batches, which a bare number counts, too.

    Raises:
        TrainerConfigError: If it is not in batches, or below 1.
    """
    given = ensure_time(interval, TimeUnit.BATCH)
    if given.unit is not TimeUnit.BATCH or given.value < 1:
        raise TrainerConfigError(f"`interval` is `{given}`; expected batches, such as `25ba`")
    return int(given.value)
