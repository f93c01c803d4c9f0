"""Formatting of output for terminals and files."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

__all__ = ["console", "count", "print_json", "print_table", "size", "visible"]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise, so that `exit_on_error` chooses the exit code instead of rich."""
        raise BrokenPipeError


def console() -> Console:
    """Return standard output, with colours on a terminal. Lines are never wrapped or cut."""
    return _Console(highlight=False, soft_wrap=True)


def visible(text: str) -> str:
    r"""Return a text with control characters escaped, such as `\x1b`, so that a terminal ignores them."""
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in text)


def size(num_bytes: float) -> str:
    """Return a size in readable form, such as `34.2 MiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def count(number: int, noun: str) -> str:
    """Return a number with a noun: `1 file`, `2 files`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def print_table(
    out: Console, head: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()
) -> None:
    """Print rows in aligned columns, two spaces apart; columns in `right` are right-aligned."""
    lines = [
        [Text(title, "bold") for title in head],
        *([Text(visible(cell)) for cell in row] for row in rows),
    ]
    widths = [max(line[place].cell_len for line in lines) for place in range(len(head))]
    for line in lines:
        shown = Text()
        for place, cell in enumerate(line):
            gap = Text(" " * (widths[place] - cell.cell_len))
            shown.append_text(gap + cell if place in right else cell + gap)
            shown.append("  ")
        shown.rstrip()
        out.print(shown)


def print_json(document: Mapping[str, Any] | list[Any]) -> None:
    """Print a document as JSON."""
    json.dump(document, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")
    sys.stdout.flush()
