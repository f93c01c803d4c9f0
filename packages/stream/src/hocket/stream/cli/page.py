"""A web page of pictures in one file: inline SVG, no scripts, nothing that is loaded from elsewhere."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hocket.stream.errors import ConfigError, StreamIOError

__all__ = ["Band", "Chart", "check_page", "write_page"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 860, 240, 84, 34, 10, 12
#: Colours that differ in lightness, too (Okabe and Ito, Color Universal Design, 2008).
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#5b5b5b")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 900px; margin: 2rem auto; padding: 0 1rem }
body { color: #222; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin: 2rem 0 .2rem }
p { margin: .3rem 0 } table { border-collapse: collapse; margin: .6rem 0 }
td, th { padding: .15rem .8rem .15rem 0; text-align: right }
td:first-child, th:first-child { text-align: left }
svg { width: 100%; height: auto } text { font-size: 12px; fill: #444 }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .35em 0 0; vertical-align: baseline }
.keys span { margin-right: 1.2em; white-space: nowrap }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """A named row of values, one for each part of the horizontal axis."""

    name: str

    values: Sequence[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A picture of bands over one axis."""

    title: str

    note: str
    """A sentence that says what is drawn."""

    edges: Sequence[float]
    """The end of each part of the horizontal axis, which begins at `start`."""

    bands: Sequence[Band]

    start: float = 0

    axis: str
    """Name and unit of the horizontal axis."""

    unit: str
    """Unit of the values, such as `MB`."""

    is_stacked: bool = True
    """Whether bands are stacked areas, and not lines."""

    marks: Sequence[tuple[float, str]] = ()
    """Positions on the axis, and their labels."""


def check_page(path: str | os.PathLike[str]) -> Path:
    """Return the path of a page to be written.

    Raises:
        ConfigError: It is a folder, or in a folder that does not exist.
    """
    page = Path(path)
    if page.is_dir() or not page.parent.is_dir():
        raise ConfigError(f"`--html {path}`: expected a file in a folder that exists, such as report.html")
    return page


def write_page(
    path: Path,
    title: str,
    *,
    facts: Sequence[tuple[str, str]],
    charts: Sequence[Chart],
    table: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None,
) -> None:
    """Write the page.

    Args:
        path: The file, which is replaced.
        title: Title of the page.
        facts: Names and values that stand above the pictures.
        charts: The pictures.
        table: Head and rows of a table.

    Raises:
        StreamIOError: The file cannot be written.
    """
    text = html.escape
    parts = [f"<h1>{text(title)}</h1>"]
    parts += [f"<p>{text(name)}: <b>{text(value)}</b></p>" for name, value in facts]
    if table is not None:
        head, rows = table
        cells = "".join(f"<th>{text(cell)}</th>" for cell in head)
        lines = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
        parts.append(f"<table><tr>{cells}</tr>{lines}</table>")
    parts += [_draw(chart) for chart in charts]
    document = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )
    try:
        path.write_text(document, encoding="utf-8")
    except OSError as error:
        raise StreamIOError(f"`{path}` cannot be written: {error}") from error


def _draw(chart: Chart) -> str:
    text = html.escape
    keys = "".join(
        f'<span><i class="key" style="background:{_colour(number)}"></i>{text(band.name)}</span>'
        for number, band in enumerate(chart.bands)
    )
    return (
        f"<h2>{text(chart.title)}</h2>\n<p>{text(chart.note)}</p>\n"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(chart.title)}">\n'
        f'{_content(chart)}\n</svg>\n<p class="keys">{keys}</p>'
    )


def _content(chart: Chart) -> str:
    """Return the axes and the bands."""
    heights = [list(band.values) for band in chart.bands]
    if chart.is_stacked:
        for number in range(1, len(heights)):
            below = heights[number - 1]
            heights[number] = [one + other for one, other in zip(heights[number], below, strict=True)]
    top = _round_up(max((max(row, default=0) for row in heights), default=0))
    start, end = chart.start, chart.edges[-1] if chart.edges else chart.start + 1
    span = (end - start) or 1

    def x(value: float) -> float:
        return _LEFT + (value - start) / span * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _BOTTOM - _TOP)

    begins = [start, *chart.edges[:-1]]
    shapes = []
    # The highest area is drawn first, so that the lower ones lie upon it.
    for number in reversed(range(len(heights))):
        points = [
            f"{x(at):.1f},{y(value):.1f}"
            for begin, finish, value in zip(begins, chart.edges, heights[number], strict=True)
            for at in (begin, finish)
        ]
        if chart.is_stacked:
            points = [f"{x(start):.1f},{y(0):.1f}", *points, f"{x(end):.1f},{y(0):.1f}"]
            shapes.append(f'<polygon fill="{_colour(number)}" points="{" ".join(points)}"/>')
        else:
            line = f'fill="none" stroke="{_colour(number)}" stroke-width="1.6"'
            shapes.append(f'<polyline {line} points="{" ".join(points)}"/>')
    for step in range(5):
        value = top * step / 4
        line = f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"'
        shapes.append(f'<line {line} stroke="#000" stroke-opacity=".15"/>')
        label = f"{_number(value)} {html.escape(chart.unit)}".strip()
        shapes.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{label}</text>')
        at, place = start + span * step / 4, ("start", "middle", "middle", "middle", "end")[step]
        shapes.append(f'<text x="{x(at):.1f}" y="{_HEIGHT - 18}" text-anchor="{place}">{_number(at)}</text>')
    for at, name in chart.marks:
        line = f'x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"'
        shapes.append(f'<line {line} stroke="#000" stroke-dasharray="3 3"/>')
        shapes.append(f'<text x="{x(at) + 4:.1f}" y="{_TOP + 12}">{html.escape(name)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    shapes.append(
        f'<text x="{middle}" y="{_HEIGHT - 3}" text-anchor="middle">{html.escape(chart.axis)}</text>'
    )
    return "\n".join(shapes)


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _round_up(value: float) -> float:
    """Return the next number of 1, 2, 2.5 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0
    while power > value:
        power /= 10
    while power * 10 <= value:
        power *= 10
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= value * (1 - 1e-9))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.3g}"
