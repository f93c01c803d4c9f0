"""The snippets of the page on layouts run, and each cell of its table of features is as it says."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from support import features
from support.feature_rows import FEATURES
from support.standing_ranks import StandingRanks

PAGE = Path(__file__).parents[2] / "packages" / "dist" / "docs" / "layouts.md"
SECTION = "## Features by axis"
SLOW = ("`compile_config`",)
"""Features that take seconds with each layout."""
EVERY = 5
"""Of each feature and of each axis a plain run tests one cell in so many; `-m slow` tests the others."""


class Cell(NamedTuple):
    """A cell of the page's table."""

    feature: str
    axis: str
    word: str


def _rows(section: str, corner: str) -> list[list[str]]:
    """Return the rows of the table whose first header is `corner`, the header first."""
    rows = [[one.strip() for one in line.split("|")[1:-1]] for line in section.splitlines() if "|" in line]
    start = next(index for index, row in enumerate(rows) if row[0] == corner)
    table = [rows[start]]
    for row in rows[start + 2 :]:
        if len(row) != len(table[0]):
            break
        table.append(row)
    return table


def _section() -> str:
    return PAGE.read_text().split(f"{SECTION}\n")[1].split("\n## ")[0]


def _cells() -> list[Cell]:
    header, *rows = _rows(_section(), "")
    axes = [one.strip("`") for one in header[1:]]
    return [Cell(row[0], axis, word) for row in rows for axis, word in zip(axes, row[1:], strict=True)]


def _refusals() -> dict[tuple[str, str], str]:
    """Return the words that the page quotes from the message of each refused cell."""
    _, *rows = _rows(_section(), "refused")
    return {
        (feature, axis.strip("`")): message for feature, axes, message in rows for axis in axes.split(", ")
    }


CELLS = [
    pytest.param(
        cell,
        id=f"{cell.feature} {cell.axis}".replace("`", ""),
        marks=[pytest.mark.slow(one_run_in=4)] if cell.feature in SLOW or (row + column) % EVERY else [],
    )
    for row, feature in enumerate(FEATURES)
    for column, cell in enumerate(one for one in _cells() if one.feature == feature)
]


def _run(snippets: list[str]) -> str:
    names: dict[str, object] = {}
    exec(snippets[0], names)
    drawn = names["trainer"].state.parallelism.draw_ranks()
    for snippet in snippets[1:]:
        exec(snippet, names)
    return drawn


def test_the_snippets_run_and_draw_what_the_page_shows(four_ranks: StandingRanks) -> None:
    text = PAGE.read_text()
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (picture,) = re.findall(r"```\n(dp_shard.*?)\n```", text, re.DOTALL)
    assert four_ranks.run(_run, snippets) == [picture] * 4


def test_the_page_has_a_cell_for_each_feature_and_axis_and_a_message_for_each_refusal() -> None:
    cells = _cells()
    assert [(cell.feature, cell.axis) for cell in cells] == [
        (feature, axis) for feature in FEATURES for axis in features.AXES
    ]
    assert {cell.word for cell in cells} == {"works", "refused"}
    assert {(one.feature, one.axis) for one in cells if one.word == "refused"} == _refusals().keys()


def _train(feature: str, axis: str | None, has_experts: bool) -> features.Outcome:
    return features.train(FEATURES[feature](), axis, has_experts)


def _refuse(feature: str, axis: str) -> features.Refusal:
    return features.refuse(FEATURES[feature](), axis)


@functools.cache
def _alone(feature: str, has_experts: bool) -> features.Outcome:
    return _train(feature, None, has_experts)


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_is_as_the_page_says(two_ranks: StandingRanks, cell: Cell) -> None:
    pytest.importorskip(FEATURES[cell.feature].needs, reason="needs `uv sync --group algos`")
    if cell.word == "refused":
        _check_refusal(two_ranks, cell)
        return
    has_experts = cell.axis == "ep"
    found = two_ranks.run(_train, cell.feature, cell.axis, has_experts)
    features.check(FEATURES[cell.feature](), cell.axis, found, _alone(cell.feature, has_experts))


def _check_refusal(two_ranks: StandingRanks, cell: Cell) -> None:
    first, second = two_ranks.run(_refuse, cell.feature, cell.axis)
    assert first == second, "the ranks refuse alike"
    assert first.num_updates == 0
    assert _refusals()[cell.feature, cell.axis] in first.message
