"""Validation of arguments that are lists of globs over names."""

import difflib
import fnmatch
from collections.abc import Iterable, Sequence

__all__ = ["check_globs", "taken", "unmatched", "unmatched_prefix"]


def check_globs(**arguments: Sequence[str] | None) -> None:
    """Raise `ValueError` if an argument is a single string, which would be iterated by character."""
    for name, globs in arguments.items():
        if isinstance(globs, str):
            raise ValueError(f"`{name}` is {globs!r}; expected a list of globs, such as [{globs!r}]")


def taken(names: Iterable[str], *, include: Sequence[str], exclude: Sequence[str] = ()) -> list[str]:
    """Return the names that match `include`, or all if that is empty, without those that match `exclude`."""
    return [
        name
        for name in names
        if (not include or any(fnmatch.fnmatchcase(name, glob) for glob in include))
        and not any(fnmatch.fnmatchcase(name, glob) for glob in exclude)
    ]


def unmatched(glob: str, names: Iterable[str], argument: str = "include") -> str:
    """Return a message that a glob of an argument matches none of the names, with the nearest ones."""
    steps = [name.split(".") for name in names]
    nodes = dict.fromkeys(".".join(parts[:depth]) for parts in steps for depth in range(1, len(parts) + 1))
    near = difflib.get_close_matches(glob.rstrip(".*?"), nodes, n=3)
    hint = f" (near: {', '.join(f'`{node}`' for node in near)})" if near else ""
    return f"`{argument}` has `{glob}`, which matches none of its {len(steps)} names{hint}"


def unmatched_prefix(rename: Iterable[str], names: Iterable[str]) -> str | None:
    """Return a message that no name begins with a prefix to replace; None if each has one."""
    names = list(names)
    for old in rename:
        stem = old.removesuffix(".")
        if not any(name == old or name.startswith(f"{stem}.") for name in names):
            return unmatched(stem, names, "rename")
    return None
