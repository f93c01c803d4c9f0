"""Units in which callbacks report wall-clock times."""

from __future__ import annotations

from hocket.trainer.errors import TrainerConfigError

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
