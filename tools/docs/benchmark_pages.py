"""The page of measured speeds: pictures of tables in `tests/bench/results`, each with its script."""

from __future__ import annotations

import html
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "tests/bench/results"
_BLOCK = re.compile(r"^  (\S.*)\n((?:    .*\n?)+)", re.M)
_TABLE = re.compile(r"(?:^\|.*\n)+", re.M)
_ROW = re.compile(r"^    (\S+) +([\d,.]+) \[", re.M)


@dataclass(frozen=True)
class Chart:
    """A picture of one measurement: where it is in the results, and which script made it.

    A `block` is the title of a block of figures, or that of a column of the first table under the heading.
    """

    title: str
    file: str
    heading: str
    block: str
    unit: str
    script: str
    is_cost: bool = False


_STREAM, _CKPT, _TRAINER = "tests/bench/stream.py", "tests/bench/ckpt.py", "tests/bench/trainer.py"
CHARTS = (
    Chart(
        "Write a data set of tokens, raw",
        *("stream.md", "Writing, until the writer has finished", "tokens, raw", "MB/s", _STREAM),
    ),
    Chart(
        "Read a data set from S3, cold: 20 ms and 100 MB/s a connection",
        *("stream.md", "Cold from S3", "tokens", "MB/s", _STREAM),
    ),
    Chart(
        "Save a checkpoint until it is durable",
        *("ckpt.md", "Save until durable", "model", "GB/s", _CKPT),
    ),
    Chart(
        "Load a checkpoint, page cache dropped",
        *("ckpt.md", "Load, page cache dropped", "model", "GB/s", _CKPT),
    ),
    Chart("Load a checkpoint from S3", *("ckpt.md", "Load from S3", "model", "GB/s", _CKPT)),
    Chart(
        "What a step costs beyond that of a bare loop, on one process",
        *("trainer.md", "The quickest tenth of each cell", "over bare by the medians", "µs", _TRAINER),
        is_cost=True,
    ),
)
NAMES = {
    "hocket": "Hocket",
    "hocket-in-use": "Hocket, with loggers",
    "fabric": "Lightning Fabric",
    "mosaicml_streaming": "mosaicml-streaming",
    "memmap": "one plain file",
    "obstore": "obstore (keeps nothing)",
    "obstore_kept": "obstore, to files",
    "dcp": "torch DCP",
    "fio": "fio (the disk)",
    "runai": "Run:ai streamer",
}


def values(chart: Chart) -> dict[str, float]:
    """Return the median of each system in the first table under a heading of a results file."""
    text = (RESULTS / chart.file).read_text("utf-8")
    start = text.index(chart.heading)
    for block in _BLOCK.finditer(text, text.index("\n", start)):
        if block[1] == chart.block:
            rows = _ROW.findall(block[2])
            return {name: float(value.replace(",", "")) for name, value in rows if name != "hocket_unchecked"}
    for table in _TABLE.finditer(text, start):
        titles, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table[0].splitlines())
        column = next((place for place, title in enumerate(titles) if title.startswith(chart.block)), None)
        if column is not None:
            return {row[0]: float(row[column]) for row in rows[1:]}
    raise ValueError(f"{chart.file} has no block `{chart.block}` under `{chart.heading}`")


def svg(found: dict[str, float], unit: str, *, is_cost: bool) -> str:
    """Return bars as an inline picture, the best first."""
    most, height = max(found.values()), 26
    view = f'viewBox="0 0 640 {height * len(found)}" role="img"'
    lines = [f'<svg class="chart" {view} xmlns="http://www.w3.org/2000/svg">']
    ordered = sorted(found.items(), key=lambda one: one[1], reverse=not is_cost)
    for place, (name, value) in enumerate(ordered):
        top, width = place * height, max(2.0, 340 * value / most)
        colour = "#c2410c" if name.startswith("hocket") else "#64748b"
        label = html.escape(NAMES.get(name, name))
        lines.append(
            f'<text x="170" y="{top + 17}" text-anchor="end">{label}</text>'
            f'<rect x="180" y="{top + 4}" width="{width:.0f}" height="18" rx="2" fill="{colour}"/>'
            f'<text x="{186 + width:.0f}" y="{top + 17}">{value:,g} {unit}</text>'
        )
    return "".join([*lines, "</svg>"])


def picture(chart: Chart, folder: str = ".") -> str:
    """Return a chart with its title and the script that made its numbers.

    Args:
        chart: The chart.
        folder: The way from the page to the folder of the results.
    """
    faster = "shorter" if chart.is_cost else "longer"
    return (
        f"### {chart.title}\n\n{svg(values(chart), chart.unit, is_cost=chart.is_cost)}\n\n"
        f"Medians; {faster} is faster. Made by `{chart.script}`; all figures, spreads and conditions: "
        f"[{chart.file.removesuffix('.md')}]({posixpath.join(folder, chart.file)})."
    )


def by_title(title: str, place: str) -> str:
    """Return the chart of a title, for a page in a folder of the site."""
    (chart,) = (chart for chart in CHARTS if chart.title == title)
    return picture(chart, posixpath.relpath("benchmarks", place or "."))


def render() -> str:
    """Return the page."""
    head = """\
# Benchmarks

Every figure comes from a script under `tests/bench`, which runs Hocket and the others in turns on one
machine. The pictures are drawn from the files that the scripts wrote: two virtual cores, one disk, no GPU.
Read ratios, not figures. The pages of this section have all figures, also where Hocket is slower."""
    return "\n\n".join([head, *(picture(chart) for chart in CHARTS)]) + "\n"
