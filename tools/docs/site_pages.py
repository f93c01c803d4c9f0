"""A hook of mkdocs that collects the pages of the site from the whole repository, and generates the others.

No copy of a page is kept: a page is read where it lies, its links are rewritten to those of the site, and a
link to a file that is no page becomes the path of that file.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import arguments_page
import benchmark_pages
import error_codes_page
import llms
import reference_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "hocket": "hocket",
    "trainer-core": "trainer",
    "algos": "algos",
    "dist": "dist",
    "ckpt": "ckpt",
    "stream": "stream",
    "native": "native",
}
PROJECT = {
    ".github/CONTRIBUTING.md": "project/contributing.md",
    ".github/architecture.md": "project/architecture.md",
    ".github/SECURITY.md": "project/security.md",
    "packages/hocket/CHANGELOG.md": "project/changelog.md",
    "tools/README.md": "project/tools.md",
}
GENERATED: dict[str, Callable[[], str]] = {
    "reference/arguments.md": arguments_page.render,
    "reference/error_codes.md": error_codes_page.render,
    "benchmarks/index.md": benchmark_pages.render,
    **reference_pages.pages(),
}
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:)([^()\s#]*)(#[^()\s]*)?\)")
_CHART = re.compile(r"^<!-- chart: (.*) -->$", re.M)
_FENCE = re.compile(r"^(```.*?^```)", re.M | re.S)


def collect() -> dict[str, str]:
    """Return the place on the site of each page of the repository, by its path in the repository."""
    found = {path: place for path, place in PROJECT.items() if (ROOT / path).exists()}
    for package, folder in FOLDERS.items():
        top = ROOT / "packages" / package
        found[f"packages/{package}/README.md"] = f"{folder}/index.md"
        for page in sorted((top / "docs").rglob("*.md")):
            # The front door's pages are those of the site: the home, starts, tasks.
            prefix = "" if package == "hocket" else f"{folder}/"
            found[_key(page)] = prefix + page.relative_to(top / "docs").as_posix()
    for page in sorted((ROOT / "packages/algos/src/hocket/algos").glob("*/README.md")):
        found[_key(page)] = f"algos/{page.parent.name}.md"
    for page in sorted((ROOT / "tests/bench/results").glob("*.md")):
        found[_key(page)] = f"benchmarks/{page.name}"
    return found


def _key(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def rewrite_links(text: str, source: str, places: dict[str, str]) -> str:
    """Return a page with its links to files of the repository as links of the site.

    Args:
        text: The page.
        source: Its path in the repository.
        places: The place on the site of each page, by its path.
    """
    here = posixpath.dirname(places[source])

    def rewritten(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if not target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        place = places.get(path) or places.get(f"{path}/README.md")
        if path == "README.md":
            place = "index.md"
        if place:
            return f"[{label}]({posixpath.relpath(place, here or '.')}{anchor})"
        if (ROOT / path).exists():
            return f"`{path}`" if label.strip("`") in path else f"{label} (`{path}`)"
        return match[0]  # to a generated page; mkdocs reports any other as broken

    text = _CHART.sub(lambda match: benchmark_pages.by_title(match[1], here), text)
    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(rewritten, part) for part in parts)


def _expanded(entries: list[Any], pages: list[str], named: set[str]) -> Iterator[Any]:
    """Yield the entries of the navigation, with the pages that a `*` stands for."""
    for entry in entries:
        if isinstance(entry, dict):
            ((title, inner),) = entry.items()
            if not isinstance(inner, list):
                yield entry
            elif found := list(_expanded(inner, pages, named)):
                yield {title: found}
        elif entry.endswith("*"):
            prefix = entry.removesuffix("*")
            rest = [page for page in pages if page.startswith(prefix) and page not in named]
            named.update(rest)
            yield from rest
        elif entry in pages:
            yield entry


def _named(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, dict):
            (inner,) = entry.values()
            yield from _named(inner if isinstance(inner, list) else [inner])
        else:
            yield entry


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the navigation with the pages that exist."""
    pages = sorted({*collect().values(), *GENERATED})
    config.nav = list(_expanded(config.nav, pages, set(_named(config.nav))))
    config.watch += [str(ROOT / "packages"), str(ROOT / ".github")]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every page of the repository, and the generated ones."""
    places = collect()
    texts = {
        place: rewrite_links((ROOT / path).read_text("utf-8"), path, places) for path, place in places.items()
    }
    texts |= {place: render() for place, render in GENERATED.items()}
    for place, text in texts.items():
        files.append(File.generated(config, place, content=text))
    llms.remember(texts)
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Write `llms.txt` and the sources of the pages beside the pages."""
    llms.write(Path(config.site_dir), config.nav)
