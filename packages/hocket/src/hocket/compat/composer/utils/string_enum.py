"""Enumerations of strings, as `composer.utils.StringEnum`."""

from __future__ import annotations

from enum import Enum
from typing import Any


class StringEnum(Enum):
    """An enumeration of strings; a member, made from its name or string, equals its string, in any case."""

    @classmethod
    def _missing_(cls, value: object) -> Any:
        if not isinstance(value, str):
            raise TypeError(f"`{cls.__name__}` is made of {value!r}; expected a text or one of its members")
        text = value.lower()
        return next((one for one in cls if text in (str(one.value).lower(), one.name.lower())), None)

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is this member or its string."""
        return str(self.value).lower() == str(getattr(other, "value", other)).lower()

    def __hash__(self) -> int:
        """Return the hash of the name."""
        return hash(self.name)
