"""Text output of the commands, for terminals and files."""

import functools
import io
import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

__all__ = [
    "Cell",
    "Line",
    "OutputConsole",
    "columns",
    "console",
    "count",
    "print_json",
    "print_table",
    "shown",
    "size",
]

_COMMANDS = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, line ends, and characters that change the direction of text."""


def shown(text: str) -> str:
    """Return text on one line, with terminal control characters replaced by Python escapes."""
    if text.isprintable():
        return text
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Line:
    """A line, or a cell of one, of differently styled parts; for tables of many rows, cheaper than `Text`."""

    __slots__ = ("parts",)

    def __init__(self, *parts: tuple[str, str] | str) -> None:
        self.parts = [(part, "") if isinstance(part, str) else part for part in parts]

    @property
    def plain(self) -> str:
        """The text without styles."""
        return "".join([text for text, _ in self.parts])

    def __rich__(self) -> Text:
        """Return the line with its styles, for a terminal."""
        return Text.assemble(*((shown(text), style) for text, style in self.parts))


Cell = Line | Text | str


class OutputConsole(Console):
    """A console that prints line by line and escapes control characters from data."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print a line; plain text goes to a file or pipe without rich, which is quicker."""
        if not self.is_terminal and not options and all(isinstance(it, Cell) for it in objects):
            self.file.write(" ".join(map(_shown, objects)) + "\n")
            return
        lines = [
            _escaped(it) if isinstance(it, Text) else shown(it) if isinstance(it, str) else it
            for it in objects
        ]
        super().print(*lines, **options)

    def lines(self, lines: Sequence[Cell]) -> None:
        """Print many lines."""
        if self.is_terminal:
            for line in lines:
                self.print(line)
        elif lines:
            self.file.write("\n".join(map(_shown, lines)) + "\n")


def console() -> OutputConsole:
    """Return standard output: coloured on a terminal, plain elsewhere; lines are never wrapped or cut.

    A character that the terminal's encoding does not have is shown as a Python escape.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return OutputConsole(highlight=False, markup=False, soft_wrap=True)


def size(num_bytes: float) -> str:
    """Return a size for display: `34.2 MiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 file`, `2 files`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def columns(rows: Sequence[Sequence[Cell]], *, right: frozenset[int] = frozenset()) -> list[Line]:
    """Return rows as aligned lines with two spaces between columns; `right` lists right-aligned columns."""
    if not rows:
        return []
    cells = [[_measured(cell) for cell in row] for row in rows]
    widths = [max([row[i][1] for row in cells]) for i in range(len(rows[0]))]
    lines = []
    for row in cells:
        line = Line()
        gap = ""
        for i, (parts, width) in enumerate(row):
            space = " " * (widths[i] - width)
            if i in right:
                gap += space
            if width:
                line.parts += [(gap, ""), *parts]
                gap = ""
            gap += "  " if i in right else space + "  "
        lines.append(line)
    return lines


def print_table(
    out: OutputConsole,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: frozenset[int] = frozenset(),
) -> None:
    """Print rows under a head in aligned columns; `right` lists right-aligned columns."""
    out.lines(columns([[Text(title, "bold") for title in head], *rows], right=right))


def _shown(cell: Cell) -> str:
    return shown(cell if isinstance(cell, str) else cell.plain)


def _measured(cell: Cell) -> tuple[list[tuple[str, str]], int]:
    """Return a cell's text as parts with one style each, and the columns of a terminal that it takes."""
    if isinstance(cell, str):
        return [(cell, "")], _num_cells(cell)
    parts = cell.parts if isinstance(cell, Line) else _parts(cell)
    return parts, sum([_num_cells(text) for text, _ in parts])


def _parts(text: Text) -> list[tuple[str, str]]:
    ends = sorted({0, len(text), *(end for span in text.spans for end in (span.start, span.end))})
    return [
        (
            text.plain[start:end],
            next((str(s.style) for s in text.spans if s.start <= start < s.end), str(text.style)),
        )
        for start, end in itertools.pairwise(ends)
    ]


def _escaped(text: Text) -> Text:
    return Text(shown(text.plain), text.style) if _COMMANDS.search(text.plain) else text


@functools.lru_cache(1024)  # Rows share the guides and marks in them, and often types and sizes.
def _num_cells(text: str) -> int:
    text = shown(text)
    return len(text) if text.isascii() else cell_len(text)


def print_json(document: Mapping[str, Any] | list[Any]) -> None:
    """Print JSON, and nothing else."""
    # JSON escapes characters below the space, but not the other control characters.
    text = re.sub("[\x7f-\x9f]", _json_escape, _json(document, levels=2))
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = re.sub("[^\x00-\x7e]", _json_escape, text)
    print(text, flush=True)


def _json_escape(found: re.Match[str]) -> str:
    """Return a character as JSON writes it in ASCII: one escape, or two beyond the 65,536 first."""
    return json.dumps(found[0])[1:-1] if found[0] > "\x7f" else f"\\u{ord(found[0]):04x}"


def _json(value: Any, *, levels: int, indent: str = "") -> str:
    """Return JSON whose first levels have a line for each entry.

    Deeper ones stay on their entry's line: with `indent`, Python's encoder is not the native one and takes
    five times as long.
    """
    if levels == 0 or not value or not isinstance(value, Mapping | list):
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    inner = indent + "  "
    if isinstance(value, list):
        entries = [_json(entry, levels=levels - 1, indent=inner) for entry in value]
        return f"[\n{inner}" + f",\n{inner}".join(entries) + f"\n{indent}]"
    entries = [
        f"{json.dumps(str(key), ensure_ascii=False)}: {_json(entry, levels=levels - 1, indent=inner)}"
        for key, entry in value.items()
    ]
    return f"{{\n{inner}" + f",\n{inner}".join(entries) + f"\n{indent}}}"
