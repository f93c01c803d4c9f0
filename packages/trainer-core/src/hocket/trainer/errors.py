"""The errors of `hocket.trainer`; each name says what the one who catches it should do."""

from __future__ import annotations


class TrainerError(Exception):
    """Root of every error that `hocket.trainer` raises on purpose."""


class TimeValueError(TrainerError, ValueError, TypeError):
    """A text or number is no time in the unit asked for; correct the value.

    It is a `ValueError` for whoever parses text, and a `TypeError`, as in Composer, for a fraction of a whole
    unit.
    """


class TimeUnitError(TrainerError, RuntimeError):
    """Two times of different units met, or a unit means nothing here; state the time in another unit."""
