"""Lines that read well on a terminal and in a file."""

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

__all__ = ["SHARD_MARKS", "columns", "console", "count", "print_json", "size"]

SHARD_MARKS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""A letter for each data file, in the manifest's order; beyond them, `+`."""


def console() -> Console:
    """Standard output: with colours on a terminal, plain elsewhere; lines are never broken or cut."""
    return Console(highlight=False, soft_wrap=True)


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
    json.dump(document, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")
