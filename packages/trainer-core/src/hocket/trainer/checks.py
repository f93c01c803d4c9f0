"""The arguments that a user passes: conversions, checks of their values and names, and their `repr`."""

from __future__ import annotations

import contextlib
import difflib
import enum
import inspect
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial, wraps
from numbers import Real
from pathlib import Path
from typing import Any

from hocket.trainer.errors import TimeValueError, TrainerConfigError, UnknownArgumentError
from hocket.trainer.time import Time


def as_list(given: Any) -> list[Any]:
    """Return a list of the given objects: none, one or several."""
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) else [given]


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
_LOST_SLASH = "which has one slash after `{}:`, as `pathlib.Path` leaves it, and is no URI"


def _shown_uri(uri: str, scheme: re.Match[str]) -> str:
    """Return a URI for a message; the part before an `@` may be a password."""
    return f"{scheme[0]}…" if "@" in uri else uri


def check_uri(name: str, given: str | os.PathLike[str]) -> None:
    """Refuse a path or URI that is a URI which has lost a slash, as in `Path("s3://bucket/run")`.

    Raises:
        TrainerConfigError: If it is one.
    """
    path = os.fspath(given)
    found = _SCHEME.match(path)
    if found is not None and found[0].endswith(":/"):
        whole = f"{found[0]}//" if found[1] == "file" else f"{found[0]}/"
        shown, rest = _shown_uri(path, found), "…" if "@" in path else path[found.end() :]
        raise TrainerConfigError(
            f"`{name}` is `{shown}`, {_LOST_SLASH.format(found[1])}; pass the text `{whole}{rest}`, or "
            f"`./{shown}` for a local path of that name"
        )


def local_path(name: str, given: str | os.PathLike[str]) -> str:
    """Return the path of a local file or folder as text, with `~/` as the user's home folder.

    Raises:
        TrainerConfigError: If it is a URI, also one that has lost a slash, as in `Path("s3://bucket/run")`,
            or begins with `~` and is not below this user's home folder.
    """
    path = os.fspath(given)
    found = _SCHEME.match(path)
    if found is not None:
        shown = _shown_uri(path, found)
        reason = _LOST_SLASH.format(found[1]) if found[0].endswith(":/") else "which is a URI"
        raise TrainerConfigError(
            f"`{name}` is `{shown}`, {reason}; the files are written to a local disk: expected a path, or "
            f"`./{shown}` for a local folder of that name"
        )
    if not path.startswith("~"):
        return path
    home = Path(os.path.expanduser("~")) if path == "~" or path.startswith("~/") else None
    if home is None or not home.is_absolute():
        raise TrainerConfigError(
            f"`{name}` is `{path}`; only `~/` is expanded, for a user with a home folder: write that folder "
            f"out, or `./{path}` for a local folder of that name"
        )
    return str(home / path[1:].lstrip("/"))


def refuse_class(name: str, given: Any) -> None:
    """Refuse a class, or a `functools.partial` of one, where an instance is expected.

    Raises:
        TrainerConfigError: If `given` is a class or such a partial.
    """
    cls, what = (given.func, "a partial of the class") if isinstance(given, partial) else (given, "the class")
    if isinstance(cls, type):
        raise TrainerConfigError(
            f"`{name}` has {what} `{cls.__name__}`; pass an instance: `{cls.__name__}(…)`"
        )


def refuse_classes(name: str, given: Any) -> None:
    """Refuse a class where an instance is expected, also among several in a list or tuple.

    Raises:
        TrainerConfigError: If there is a class.
    """
    for item in given if isinstance(given, (list, tuple)) else [given]:
        refuse_class(name, item)


def check_part(name: str, given: Any, *methods: str, expected: str) -> None:
    """Refuse an object without the methods of a part of the trainer.

    Raises:
        TrainerConfigError: If it lacks one of `methods`.
    """
    if missing := [method for method in methods if not hasattr(given, method)]:
        raise TrainerConfigError(
            f"`{name}` is a `{type(given).__name__}`, which has no `{missing[0]}`; expected {expected}"
        )


def check_instances(name: str, given: Any, *methods: str) -> None:
    """Refuse classes and texts where instances are expected, and instances without a method.

    Raises:
        TrainerConfigError: If an object is not an instance, or lacks one of `methods`.
    """
    if isinstance(given, Iterator):
        return  # reading it would use it up
    for item in [given] if isinstance(given, (str, type)) else as_list(given):
        refuse_class(name, item)
        missing = [method for method in methods if not hasattr(item, method)]
        if missing or isinstance(item, str):
            reason = f", which has no `{missing[0]}`" if missing else ""
            raise TrainerConfigError(
                f"`{name}` has a `{type(item).__name__}`{reason}; pass an instance, or a list of instances"
            )


def check_keys(name: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse a dict of arguments with an unknown key.

    Raises:
        TrainerConfigError: If it has an unknown key.
    """
    known = list(known)
    for key in given:
        if key not in known:
            matches = difflib.get_close_matches(str(key), known, n=1)
            answer = f"did you mean `{matches[0]}`?" if matches else f"expected some of {', '.join(known)}"
            raise TrainerConfigError(f"`{name}` has the unknown key `{key}`; {answer}")


def number_to_keep(number: Any) -> int | None:
    """Return the number of checkpoints to keep; None for all of them, given as -1.

    Raises:
        TrainerConfigError: If it is neither -1 nor positive.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < -1 or number == 0:
        raise TrainerConfigError(
            f"`save_num_checkpoints_to_keep` is {number!r}; expected a number from 1 on, or -1 to keep all"
        )
    return None if number == -1 else number


def check_choice(
    name: str, value: Any, choices: Iterable[Any], *, error: type[Exception] = TrainerConfigError
) -> None:
    """Refuse a value that is none of the choices; True is not 1, nor False 0.

    Raises:
        TrainerConfigError: If it is none of them; or the given `error`.
    """
    known = list(choices)
    if not any(value is one or (_is_of_type(value, one) and value == one) for one in known):
        expected = ", ".join(f"`{one}`" for one in known)
        raise error(f"`{name}` is {value!r}; expected one of {expected}")


def _is_of_type(value: Any, choice: Any) -> bool:
    return isinstance(value, type(choice)) and isinstance(value, bool) == isinstance(choice, bool)


def check_count(
    name: str, value: Any, *, least: int = 1, error: type[Exception] = TrainerConfigError
) -> None:
    """Refuse a value that is not a whole number of at least `least`.

    Raises:
        TrainerConfigError: If it is not such a number; or the given `error`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        # Of another library, such as NumPy, it may be one.
        kind = f", an `int` and no `{type(value).__name__}`" if hasattr(value, "__index__") else ""
        is_int = isinstance(value, int)
        raise error(f"`{name}` is {value!r}; expected a whole number from {least} on{'' if is_int else kind}")


def check_number(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    error: type[Exception] = TrainerConfigError,
) -> None:
    """Refuse a value that is not a number from `least` to `most`, as NaN is none.

    Raises:
        TrainerConfigError: If it is not such a number; or the given `error`.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= float(value) <= most:
        expected = f" from {least} on" if most == math.inf else f" from {least} to {most}"
        raise error(f"`{name}` is {value!r}; expected a number{'' if least == -math.inf else expected}")


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

    @wraps(init)
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


_OWN = "hocket."
_MAX_CHARS = 60
_MAX_ITEMS = 4
_MAX_DEPTH = 2
_MAX_BITS = 128
_SECRET = re.compile(r"key|token|secret|password|credential|auth|uri|url|header|kwargs", re.IGNORECASE)
"""Names of arguments whose texts are not shown: they may hold a secret."""


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
        text = _text_of(value, shows_text=shows_text and _SECRET.search(name) is None)
        if text is not None and text != _text_of(default):
            yield f"{name}={text}"


def _text_of(value: Any, *, shows_text: bool = True, depth: int = _MAX_DEPTH) -> str | None:
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
        items = [_text_of(item, shows_text=shows_text, depth=depth - 1) for item in value]
        return None if None in items else f"[{', '.join(map(str, items))}]"
    if not shows_text:
        return None
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    return repr(text) if type(text) is str and len(text) <= _MAX_CHARS and "://" not in text else None
