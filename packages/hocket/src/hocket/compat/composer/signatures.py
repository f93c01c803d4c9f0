"""Hocket's functions and classes with the order, and the names, of Composer's arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any


def in_order(function: Callable[..., Any], names: str, **renamed: str) -> Any:
    """Return a function that takes its arguments in Composer's order.

    Args:
        function: The function; takes all arguments by name.
        names: Composer's names in their order, separated by spaces.
        **renamed: Names of `function` by Composer's, where they differ.
    """

    @functools.wraps(function)
    def call(*args: Any, **arguments: Any) -> Any:
        return function(**_by_name(function.__name__, names, args, arguments, renamed))

    return call


def class_in_order(base: type, names: str, module: str, **renamed: str) -> Any:
    """Return a subclass of the same name whose arguments are in Composer's order.

    Args:
        base: The class; takes all arguments by name.
        names: Composer's names in their order, separated by spaces.
        module: Name of the module that holds the subclass, for pickles.
        **renamed: Names of `base` by Composer's, where they differ.
    """

    def init(self: Any, *args: Any, **arguments: Any) -> None:
        base.__init__(self, **_by_name(base.__name__, names, args, arguments, renamed))  # type: ignore[misc]

    content = {"__init__": init, "__doc__": base.__doc__, "__module__": module}
    return type(base)(base.__name__, (base,), content)


def _by_name(
    function: str, names: str, args: tuple[Any, ...], arguments: Mapping[str, Any], renamed: Mapping[str, str]
) -> dict[str, Any]:
    order = names.split()
    if len(args) > len(order):
        raise TypeError(f"`{function}` takes {len(order)} arguments by position, and {len(args)} were given")
    positional = dict(zip(order, args, strict=False))
    if twice := sorted(positional.keys() & arguments.keys()):
        raise TypeError(f"`{function}` got `{twice[0]}` by position and by name; leave one of them out")
    return {renamed.get(name, name): value for name, value in {**positional, **arguments}.items()}


__all__ = ["class_in_order", "in_order"]
