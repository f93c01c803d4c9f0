"""Tables of configuration keys: which are honoured, mapped, without effect, or refused.

A table is the single source for validation and for the documentation page that `config_docs` writes.
"""

import difflib
import functools
import inspect
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, TypeVar

from hocket.dist.errors import ConfigError

T = TypeVar("T")

_log = logging.getLogger("hocket.dist")
_logged: set[tuple[str, str]] = set()
_MISSPELLED = 0.7
"""Likeness to a known key from which on an unknown key counts as a misspelling of it."""


class Outcome(Enum):
    """The treatment of a configuration key."""

    HONOURED = "honoured"
    """The key has the meaning it had."""
    MAPPED = "mapped"
    """The key is translated to the nearest counterpart."""
    NO_EFFECT = "no effect"
    """The key is accepted, and logged once unless its value asks for nothing."""
    REFUSED = "refused"
    """The key raises `ConfigError`, unless its value asks for nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigKey:
    """One row of a table.

    Attributes:
        outcome: The treatment of the key.
        meaning: Its effect; for a refused key the alternative, for one without effect the reason.
        silent: Values that ask for nothing, accepted without a log message.
        accepted: Values that a key without effect may have; None for any.
    """

    outcome: Outcome
    meaning: str
    silent: tuple[Any, ...] = (None,)
    accepted: tuple[Any, ...] | None = None

    @property
    def reason(self) -> str:
        """The meaning at the end of a message, which has no full stop; the table in the documentation has."""
        return self.meaning.removesuffix(".")


def honoured(meaning: str) -> ConfigKey:
    """Return the row of a key that keeps its meaning."""
    return ConfigKey(outcome=Outcome.HONOURED, meaning=meaning)


def names_keys(cls: type[T]) -> type[T]:
    """Make a dataclass of settings refuse an unknown keyword argument as it does an unknown key of a dict."""
    init: Any = inspect.getattr_static(cls, "__init__")
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # a dataclass

    @functools.wraps(init)
    def checked(self: T, /, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                raise TypeError(unknown_key(name, known, cls.__name__))
        init(self, *args, **given)

    setattr(cls, "__init__", checked)  # noqa: B010 - mypy refuses the assignment
    return cls


def mapped(meaning: str) -> ConfigKey:
    """Return the row of a key that is translated."""
    return ConfigKey(outcome=Outcome.MAPPED, meaning=meaning)


def no_effect(
    reason: str, *, silent: tuple[Any, ...] = (None,), accepted: tuple[Any, ...] | None = None
) -> ConfigKey:
    """Return the row of a key that is accepted and ignored."""
    return ConfigKey(outcome=Outcome.NO_EFFECT, meaning=reason, silent=silent, accepted=accepted)


def refused(alternative: str, *, silent: tuple[Any, ...] = (None, False)) -> ConfigKey:
    """Return the row of a key that cannot be honoured."""
    return ConfigKey(outcome=Outcome.REFUSED, meaning=alternative, silent=silent)


def _is_misspelled(key: str, known: Collection[str]) -> bool:
    """Return whether an unknown key resembles a known one, or abbreviates it, as `zero_opt` does."""
    is_short = len(key) > 3 and any(one.startswith(key) for one in known)
    return is_short or bool(difflib.get_close_matches(key, known, n=1, cutoff=_MISSPELLED))


def resolve_keys(
    config: Mapping[str, Any],
    table: Mapping[str, ConfigKey],
    known: Collection[str],
    where: str,
    *,
    other: ConfigKey | None = None,
) -> dict[str, Any]:
    """Return the keys of `config` that a dataclass takes, in its spelling; log or refuse all others.

    Args:
        config: The user's config, with keys in any letter case.
        table: Rows of every key that is known.
        known: The keys that the caller takes.
        where: The argument's name, for messages.
        other: The row of all keys in no table that are not a misspelling of a known key; None to refuse them.

    Raises:
        ConfigError: The config is no mapping, or a key is unknown, given twice, or cannot be honoured.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"`{where}` is a {type(config).__name__}, expected a dict")
    resolved: dict[str, Any] = {}
    spellings: dict[str, str] = {}
    for raw_key, value in config.items():
        key = str(raw_key).lower()
        if key in spellings:
            raise ConfigError(
                f"`{where}` has the key `{key}` twice, as `{spellings[key]}` and as `{raw_key}`"
            )
        spellings[key] = str(raw_key)
        row = table.get(key)
        if row is None and not _is_misspelled(key, known):
            row = other
        if key in known:
            resolved[key] = value
        elif row is None:
            raise ConfigError(unknown_key(raw_key, {*table, *known}, where))
        else:
            _settle(key, value, row, where)
    return resolved


def _settle(key: str, value: Any, row: ConfigKey, where: str) -> None:
    if _is_one_of(value, row.silent):
        return
    if row.outcome is Outcome.REFUSED:
        raise ConfigError(f"`{where}['{key}']` is {value!r} and cannot be honoured: {row.reason}")
    if row.accepted is not None and not _is_one_of(value, row.accepted):
        expected = " or ".join(map(repr, row.accepted))
        raise ConfigError(f"`{where}['{key}']` is {value!r}, expected {expected}: {row.reason}")
    if (where, key) not in _logged and os.environ.get("RANK", "0") == "0":
        _logged.add((where, key))
        _log.warning("`%s['%s'] = %r` has no effect: %s", where, key, value, row.reason)


def _is_one_of(value: Any, values: Iterable[Any]) -> bool:
    if isinstance(value, str):
        return any(isinstance(option, str) and option.lower() == value.lower() for option in values)
    return any(value is option or (type(value) is type(option) and value == option) for option in values)


def unknown_key(key: object, known: Iterable[str], where: str) -> str:
    """Return the message for an unknown key, with the nearest known one."""
    names = sorted(known)
    nearest = difflib.get_close_matches(str(key).lower(), names, n=1, cutoff=0.5)
    hint = (
        f"Did you mean `{nearest[0]}`?"
        if nearest
        else f"Known are {', '.join(f'`{name}`' for name in names)}"
    )
    return f"`{where}` has no key `{key}`. {hint}"
