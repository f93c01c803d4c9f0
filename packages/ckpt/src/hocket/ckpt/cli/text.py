"""Lines that read well on a terminal and in a file."""

import json
import re
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

__all__ = ["SHARD_MARKS", "columns", "console", "count", "print_json", "shown", "size"]

SHARD_MARKS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""A letter for each data file, in the manifest's order; beyond them, `+`."""


_COMMANDS = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, line ends, and what turns the direction of the text behind it."""


def shown(text: str) -> str:
    """Text in one line, without what a terminal would obey: in its place stands how Python writes it."""
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _cell(text: Text) -> Text:
    return Text(shown(text.plain), text.style) if _COMMANDS.search(text.plain) else text


class _Console(Console):
    """Prints line by line; what a checkpoint says comes to a terminal as text, never as a command."""

    def print(self, *objects: Any, **options: Any) -> None:
        lines = [
            _cell(it) if isinstance(it, Text) else shown(it) if isinstance(it, str) else it for it in objects
        ]
        super().print(*lines, **options)

    def on_broken_pipe(self) -> None:
        """Not rich's exit code: `told` says what becomes of it, as for all that is printed."""
        raise BrokenPipeError


def console() -> Console:
    """Standard output: with colours on a terminal, plain elsewhere; lines are never broken or cut."""
    return _Console(highlight=False, markup=False, soft_wrap=True)


def size(num_bytes: int) -> str:
    """Bytes for people: `34.2 MiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def count(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def columns(rows: list[list[Text]], *, right: frozenset[int] = frozenset()) -> list[Text]:
    """Rows as lines whose columns stand under each other, two spaces apart; `right` are flush right."""
    if not rows:
        return []
    rows = [list(map(_cell, row)) for row in rows]
    widths = [max(row[i].cell_len for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        line = Text()
        for i, cell in enumerate(row):
            gap = Text(" " * (widths[i] - cell.cell_len))
            line.append_text(gap + cell if i in right else cell + gap)
            line.append("  ")
        line.rstrip()
        lines.append(line)
    return lines


def print_json(document: Mapping[str, Any] | list[Any]) -> None:
    """Prints JSON, and nothing else."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    # JSON escapes what stands before the space, and leaves the other commands to a terminal as they are.
    print(re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text), flush=True)
