"""The snippets of the page on layouts run on four ranks."""

import re
from pathlib import Path

from support.standing_ranks import StandingRanks

PAGE = Path(__file__).parents[2] / "packages" / "dist" / "docs" / "layouts.md"


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
