"""Arguments of public classes: unknown names are refused with the nearest known one; `repr` shows values."""

from __future__ import annotations

import contextlib
import difflib
import enum
import functools
import inspect
import os
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from hocket.trainer.errors import TimeValueError, UnknownArgumentError
from hocket.trainer.time import Time

_OWN = "hocket."
_MAX_CHARS = 60
_MAX_ITEMS = 4
_MAX_DEPTH = 2
_MAX_BITS = 128
_SECRET = re.compile(r"key|token|secret|password|credential|auth|uri|url|header|kwargs", re.IGNORECASE)
"""Names of arguments whose texts are not shown: they may hold a secret."""


def check_arguments(classes: Iterable[Any], *, passed_on: Iterable[str] = ()) -> None:
    """Make the constructors of classes refuse unknown keyword arguments by their names.

    A package calls this for the classes that it exports, among `classes` of any other kind of object. The
    constructor checks before it runs. One that takes any name (`**`), without a constructor of Hocket's
    that it passes them to and without `passed_on`, is left to check them itself.

    Args:
        classes: The objects that a package exports.
        passed_on: Names that the constructors take by `**`.
    """
    for cls in classes:
        if not inspect.isclass(cls) or issubclass(cls, BaseException):
            continue
        owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
        names = _parameters(cls, frozenset(passed_on))
        if names and _is_ours(owner) and not hasattr(vars(owner)["__init__"], "_checks_arguments"):
            setattr(owner, "__init__", _checking(owner, names))  # noqa: B010 - mypy refuses the assignment


def unknown_argument(owner: str, name: str, known: Collection[str]) -> str:
    """Return the message on a name that is no argument, with the nearest that is."""
    near = nearest_name(name, known)
    hint = f"did you mean `{near}`?" if near else f"`help({owner})` lists the arguments"
    return f"`{owner}` has no argument `{name}`; {hint}"


def nearest_name(name: str, known: Collection[str]) -> str | None:
    """Return the known name that is meant: a misspelling, or one with the same words and others."""
    words = set(name.lower().split("_"))
    wider = [other for other in known if words <= (parts := set(other.split("_"))) or parts <= words]
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    if close and difflib.SequenceMatcher(None, name.lower(), close[0]).ratio() >= 0.8:
        return close[0]
    return next(iter([*sorted(wider, key=len), *close]), None)


def _checking(owner: Any, names: frozenset[str]) -> Any:
    init = owner.__init__

    @functools.wraps(init)
    def checked(self: Any, /, *args: Any, **given: Any) -> None:
        if not given.keys() <= names:
            called = next(base for base in type(self).__mro__ if base.__init__ is checked)  # type: ignore[misc]
            name = next(name for name in given if name not in names)
            raise UnknownArgumentError(unknown_argument(called.__name__, name, sorted(names)))
        init(self, *args, **given)

    checked._checks_arguments = True  # type: ignore[attr-defined]
    return checked


def _parameters(cls: Any, passed_on: frozenset[str]) -> frozenset[str]:
    """Return the names that a constructor takes, itself or by passing them on; none if it takes any."""
    names = set(passed_on)
    for base in cls.__mro__:
        if "__init__" not in vars(base) or not _is_ours(base):
            continue
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]
        names |= {one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}
        if passed_on or all(one.kind is not one.VAR_KEYWORD for one in parameters):
            return frozenset(names)
    return frozenset()


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("hocket.")


class Described:
    """A base of objects whose `repr` shows the arguments that differ from their defaults.

    Shown are the numbers, times and short texts that the object keeps under the argument's name, with or
    without an underscore. Tensors and other objects are left out, and so are texts of classes that Hocket
    does not know and of arguments that may hold a secret. Nothing is computed, so it cannot fail or wait.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(_shown_arguments(self))})"


def _shown_arguments(thing: object) -> Iterator[str]:
    kept = getattr(thing, "__dict__", {})
    try:
        parameters = inspect.signature(type(thing)).parameters
    except (TypeError, ValueError):
        return
    shows_text = type(thing).__module__.startswith(_OWN)
    for name, parameter in parameters.items():
        default = parameter.default
        value = kept.get(name, kept.get(f"_{name}", default))
        if isinstance(value, Time) and isinstance(default, str):
            with contextlib.suppress(TimeValueError):
                default = Time.from_timestring(default)
        if value is default:
            continue
        text = _shown(value, shows_text=shows_text and _SECRET.search(name) is None)
        if text is not None and text != _shown(default):
            yield f"{name}={text}"


def _shown(value: Any, *, shows_text: bool = True, depth: int = _MAX_DEPTH) -> str | None:
    """Return a plain value as text; None for any other."""
    if type(value) is int and value.bit_length() > _MAX_BITS:
        return None  # Python refuses to print the largest
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    if isinstance(value, Time):
        return repr(str(value))
    if isinstance(value, enum.Enum):
        return str(value)
    if type(value) in (list, tuple) and len(value) <= _MAX_ITEMS:
        if not depth:
            return None
        items = [_shown(item, shows_text=shows_text, depth=depth - 1) for item in value]
        return None if None in items else f"[{', '.join(map(str, items))}]"
    if not shows_text:
        return None
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    return repr(text) if type(text) is str and len(text) <= _MAX_CHARS and "://" not in text else None
