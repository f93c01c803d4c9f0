"""Composer's forms of `ignore_keys`, which leave parts of a state out of a save or a load."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from hocket.trainer.checkpoint.tree_filter import LenientGlobs

IgnoreKeys: TypeAlias = "Iterable[str] | Callable[[dict[str, Any]], object] | str | None"


def as_lenient(given: IgnoreKeys, argument: str) -> Callable[[dict[str, Any]], object] | None:
    """Return a function that deletes the ignored parts from a run's state.

    Args:
        given: Globs such as `state/model/head.*`, with a warning for a glob that matches nothing; or a
            function, which is called with a dict that has the state under the key `state`.
        argument: The argument's name, for the warning.
    """
    if given is None or isinstance(given, LenientGlobs):
        return given
    if callable(given):
        change = given
        return lambda tree: change({"state": tree})

    def tell(glob: str) -> None:
        warnings.warn(f"the key `{glob}` of `{argument}` matches nothing in this run", stacklevel=2)

    return LenientGlobs([given] if isinstance(given, str) else given, tell)


def and_key(
    ignored: Callable[[dict[str, Any]], object] | None, key: str
) -> Callable[[dict[str, Any]], object]:
    """Return a function that deletes `key` and the parts that `ignored`, made by `as_lenient`, deletes."""
    if ignored is None:
        return LenientGlobs([key], lambda _: None)
    if isinstance(ignored, LenientGlobs):
        ignored.globs.append(key)
        return ignored

    def change(tree: dict[str, Any]) -> None:
        ignored(tree)
        tree.pop(key, None)

    return change


__all__ = ["IgnoreKeys", "and_key", "as_lenient"]
