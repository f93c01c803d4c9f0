"""Keyword arguments of public classes: an unknown name is refused with the nearest known one."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Collection, Iterable
from typing import Any


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


def refuse_unknown(cls: type, given: Iterable[str]) -> None:
    """Refuse the first name that a class of the extension was given and does not take.

    Raises:
        TypeError: There is such a name; the message has the nearest argument.
    """
    for name in given:
        raise TypeError(unknown_argument(cls.__name__, name, sorted(inspect.signature(cls).parameters)))


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
            raise TypeError(unknown_argument(called.__name__, name, sorted(names)))
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
