"""Messages and comments are whole: no line is left short by a re-wrap."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
WIDTH = 110
# A line this short, in the middle of a sentence, with room for the next word.
SHORT = 45

_STRING = re.compile(r'[rRbBfFuU]*"(.*)"', re.S)
_COMMENT = re.compile(r"(\s*)(#|//[/!]?) (?=\S)(.*)")


def sources(suffix: str) -> list[Path]:
    """Return the source files of packages or crates."""
    return sorted(
        path for top in ("packages", "crates", "tools") for path in (ROOT / top).rglob(f"src/**/*{suffix}")
    )


def strings(code: str) -> Iterator[list[tokenize.TokenInfo]]:
    """Yield the groups of strings on consecutive lines that Python joins."""
    group: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.STRING and group and token.start[0] == group[-1].start[0] + 1:
            group.append(token)
        elif token.type != tokenize.NL:
            if len(group) > 1:
                yield group
            group = [token] if token.type == tokenize.STRING and token.start[0] == token.end[0] else []


def broken_strings(code: str) -> list[int]:
    """Return the lines of messages that a re-wrap left short."""
    lines, found = code.splitlines(), []
    for group in strings(code):
        for one, other in pairwise(group):
            ours, theirs = _STRING.fullmatch(one.string), _STRING.fullmatch(other.string)
            if ours is None or theirs is None or not ours[1].endswith(" ") or len(ours[1]) >= SHORT:
                continue
            word = re.match(r"\S+ ?", theirs[1])
            if word and len(lines[one.start[0] - 1].rstrip()) + len(word[0]) <= WIDTH:
                found.append(one.start[0])
    return found


def broken_comments(code: str) -> list[int]:
    """Return the lines of comments that a re-wrap left short: the sentence goes on in the next line."""
    found = []
    lines = [_COMMENT.fullmatch(line) for line in code.splitlines()]
    for number, (before, line, after) in enumerate(
        zip([None, *lines], lines, [*lines[1:], None], strict=False), 1
    ):
        if line is None or after is None or before is None or before[1] != line[1] != after[1]:
            continue
        if len(line[3]) < SHORT and re.match(r"[a-z]+ ", after[3]) and re.search(r"[a-z,]$", line[3]):
            found.append(number)
    return found


def test_no_message_is_broken_by_a_re_wrap() -> None:
    found = {path: lines for path in sources(".py") if (lines := broken_strings(path.read_text()))}
    assert not found


def test_no_comment_is_broken_by_a_re_wrap() -> None:
    paths = [*sources(".py"), *sources(".rs")]
    found = {path: lines for path in paths if (lines := broken_comments(path.read_text()))}
    assert not found


def test_broken_lines_are_found() -> None:
    assert broken_strings('x = (\n    "a cat sat "\n    "on "\n    "the mat"\n)\n') == [2, 3]
    assert broken_strings('x = (\n    "' + "word " * 18 + '"\n    "on the mat"\n)\n') == []
    assert broken_comments(
        "# A long line that was full once,\n# and a\n# short line that the re-wrap left.\n"
    ) == [2]
