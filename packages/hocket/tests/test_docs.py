"""The snippets of the site's pages run, and print what the pages say."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.snippets import check_page

DOCS = Path(__file__).parents[1] / "docs"
# This page is written by code, and has a test beside it.
PAGES = sorted(page for page in DOCS.rglob("*.md") if page.name != "coming_from_composer.md")
NEEDS = {"fine_tune": ["transformers"], "transformers_trainer": ["transformers"]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).with_suffix("").as_posix())
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS.get(page.stem, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    check_page(page)
