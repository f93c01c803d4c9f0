"""The Python snippets of this package's pages run, and print what the pages say."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.snippets import check_page

NEEDS = {"models": ["transformers"], "coming_from": ["lightning", "accelerate"]}
PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning", "ignore::UserWarning:lightning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_snippets_run(page, tmp_path, monkeypatch):
    for package in NEEDS.get(page.stem, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    variables = check_page(page)
    if page.stem == "metrics":
        assert variables["memory"].get_timeseries("norm/weight")["step"] == list(range(1, 17))
        assert len((tmp_path / "logs" / "first.jsonl").read_text().splitlines()) == 4 * 16
