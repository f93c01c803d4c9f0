"""Checks of configured values against the types that the signatures of the parts declare."""

from __future__ import annotations

import inspect
import types
import typing
from typing import Any

from hocket.trainer.errors import TrainerConfigError

# The types of YAML's values without parts, and the words for them in messages.
_WORDS: dict[type[Any], str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    types.NoneType: "null",
}


def as_declared(value: Any, parameter: inspect.Parameter, owner: Any, where: str) -> Any:
    """Return a value of a configuration as its parameter takes it: where that is text, `123` becomes text.

    A parameter whose annotation has other types than None, bool, int, float and str takes any value, and so
    does one without an annotation. An object that YAML cannot express is not checked.

    Args:
        value: The value.
        parameter: The parameter of the value.
        owner: The class or function that has the parameter.
        where: The value's name in the configuration, for the message.

    Raises:
        TrainerConfigError: If the value has another type than the parameter.
    """
    kinds = _plain_types(parameter, owner)
    if not kinds or value is parameter.default or not isinstance(value, (*_WORDS, list, dict)):
        return value
    if isinstance(value, bool):
        is_fit = bool in kinds
    else:
        is_fit = isinstance(value, kinds) or (isinstance(value, int) and float in kinds)
    if is_fit:
        return value
    if type(value) is int and str in kinds:
        return str(value)
    hint = "; put it in quotes" if str in kinds and isinstance(value, float) else ""
    expected = " or ".join(word for kind, word in _WORDS.items() if kind in kinds)
    raise TrainerConfigError(f"`{where}` is `{value!r}`; expected {expected}{hint}")


def _plain_types(parameter: inspect.Parameter, owner: Any) -> tuple[Any, ...]:
    """Return the types of a parameter; none if they are unknown, or not all are in `_WORDS`."""
    annotation = parameter.annotation
    if isinstance(annotation, str):
        function = inspect.unwrap(owner.__init__ if inspect.isclass(owner) else owner)
        try:
            annotation = eval(annotation, getattr(function, "__globals__", {}))
        except (AttributeError, NameError, SyntaxError, TypeError):
            return ()
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = typing.get_args(annotation) if is_union else (annotation,)
    return kinds if all(kind in list(_WORDS) for kind in kinds) else ()
