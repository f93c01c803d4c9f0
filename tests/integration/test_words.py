"""Messages have one voice, and messages and comments are whole: no line is left short by a re-wrap."""

from __future__ import annotations

import ast
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
# Names with which a message may begin.
NAMES = {"Alibi", "Slurm", "Hocket", "LoRA", "Python"}

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


def messages(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the arguments of errors that are raised or built, and of warnings, that hold text."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in {"warn", "warning", "warn_once"} or name.endswith(("Error", "Warning")):
            yield from (given for given in node.args if any(map(_text, ast.walk(given))))


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _ends(message: ast.expr) -> list[ast.expr]:
    """Return the parts with which a message can begin or end: the branches of conditional expressions."""
    if isinstance(message, ast.IfExp):
        return [*_ends(message.body), *_ends(message.orelse)]
    return [message]


def _edge(message: ast.expr, index: int) -> str:
    """Return the text at the beginning (0) or end (-1) of a message; empty if a value stands there."""
    if isinstance(message, ast.JoinedStr):
        return _text(message.values[index]) if message.values else ""
    if isinstance(message, ast.BinOp):
        return _edge(message.right if index else message.left, index)
    return _text(message)


def of_another_voice(code: str) -> list[tuple[int, str]]:
    """Return the lines of messages that end with a full stop or begin with a capital that is no name's."""
    found = []
    for message in messages(ast.parse(code)):
        for part in _ends(message):
            first, last = _edge(part, 0), _edge(part, -1)
            if last.endswith(".") and not last.endswith("..."):
                found.append((part.lineno, last))
            word = re.match(r"[A-Z][a-z]*(?=[ ,:.;]|$)|[A-Z][a-z]+(?=\\b)", first)
            if word and word[0] not in NAMES:
                found.append((part.lineno, first))
    return found


def test_messages_begin_in_lower_case_and_end_without_a_full_stop() -> None:
    paths = [path for path in sources(".py") if "compat" not in path.parts]  # there, the peer's own messages
    found = {path: lines for path in paths if (lines := of_another_voice(path.read_text()))}
    assert not found


def test_other_voices_are_found() -> None:
    code = 'raise ValueError(f"`x` is {x}. Give 1.")\nraise A.MyError("The door is shut", "Slurm ended")'
    assert [line for line, _ in of_another_voice(code)] == [1, 2]
    assert of_another_voice('warn("A" if x else "b")') == [(1, "A")]


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
