"""Patterns of file names, as `datasets.data_files` resolves them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import PurePosixPath

from hocket.stream.errors import ConfigError

#: Files that describe a data set, and are read only if a pattern names them.
_IGNORED = {
    "README.md",
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dummy_data.zip",
    "dataset_dict.json",
}


def match(pattern: str, keys: Iterable[str]) -> list[str]:
    """Return the files that a pattern names, without hidden ones that it does not ask for.

    `*` and `?` stand for characters within the name of a file or folder, `[…]` for one of them, and `**` for
    any folders.

    Args:
        pattern: Path below the data set's folder.
        keys: Paths of all files below it.

    Raises:
        ConfigError: The pattern is of another place, or `**` is only a part of a name.
    """
    if "://" in pattern or pattern.startswith("/") or ".." in pattern.split("/"):
        raise ConfigError(
            f"the pattern of files `{pattern}` is of another place: expected a path within the data set; "
            "read that place by its own URI"
        )
    pattern = pattern.removeprefix("./")
    expression, name = _translate(pattern), pattern.rpartition("/")[2]
    is_hidden = {mark: _count(pattern, mark, has_name=mark == ".") for mark in (".", "__")}
    found = []
    for key in keys:
        base = key.rpartition("/")[2]
        if not expression.fullmatch(key) or (base in _IGNORED and base != name):
            continue
        if all(_count(key, mark, has_name=mark == ".") == count for mark, count in is_hidden.items()):
            found.append(key)
    return found


def _count(path: str, mark: str, *, has_name: bool) -> int:
    """Return how many folders in a path, and its last part if `has_name`, begin with `mark`."""
    parts = PurePosixPath(path).parts
    return sum(part.startswith(mark) for part in (parts if has_name else parts[:-1]))


@lru_cache(maxsize=256)
def _translate(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern."""
    parts = pattern.split("/")
    text = ""
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        if part == "**":
            text += ".+" if is_last else "(?:.+/)?"
            continue
        if "**" in part:
            raise ConfigError(
                f"the pattern of files `{pattern}` has `**` as a part of a name: expected it as a whole part"
            )
        text += ("[^/]+" if part == "*" else _translate_part(part)) + ("" if is_last else "/")
    return re.compile(text, re.DOTALL)


def _translate_part(part: str) -> str:
    text, rest = "", part
    while rest:
        char, rest = rest[0], rest[1:]
        end = rest.find("]", 2 if rest[:1] == "!" else 1) if char == "[" else -1
        if char == "*":
            text += "[^/]*"
        elif char == "?":
            text += "[^/]"
        elif end >= 0:
            chars, rest = rest[:end], rest[end + 1 :]
            negated, chars = ("^", chars[1:]) if chars[0] == "!" else ("", chars)
            escaped = chars.replace("\\", "\\\\").replace("[", "\\[").replace("^", "\\^")
            text += f"(?!/)[{negated}{_with_literal_hyphens(escaped)}]"
        else:
            text += re.escape(char)
    return text


def _with_literal_hyphens(chars: str) -> str:
    """Escape a hyphen at the start of a class of characters, which is no range."""
    return "\\" + chars if chars.startswith("-") else chars
