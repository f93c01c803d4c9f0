"""The files for language models: `llms.txt`, and the source of each page beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_HEAD = """\
# Hocket

> PyTorch training in packages that work alone: a trainer, sharded checkpoints, streamed data, training
> methods and a launcher. Runs carry on after a crash, on any number of ranks.

Each page is also there as Markdown, at the address below.
"""
_texts: dict[str, str] = {}


def remember(texts: dict[str, str]) -> None:
    """Keep the sources of the pages until the site is written."""
    _texts.clear()
    _texts.update(texts)


def title_of(text: str) -> str:
    """Return the first heading of a page."""
    found = re.search(r"^# (.+)$", text, re.M)
    return found[1].replace("`", "") if found else "untitled"


def summary_of(text: str) -> str:
    """Return the first sentence of a page's first paragraph that says something about its subject."""
    body = re.sub(r"^---\n.*?\n---\n", "", text, flags=re.S)
    # A fenced block may have empty lines, so it goes before paragraphs are told apart.
    body = re.sub(r"^(```+).*?^\1`*[ ]*$", "", body, flags=re.S | re.M)
    for paragraph in body.split("\n\n"):
        if paragraph.strip() and paragraph.lstrip()[0] not in "#|<-:!":
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
            for sentence in re.split(r"(?<!et al\.)(?<=\.)\s(?=[A-Z`\"(*])", plain):
                if not sentence.startswith("This page is generated"):
                    return re.sub(r":$", ".", sentence)
    return ""


def _lines(entries: list[Any]) -> list[str]:
    found: list[str] = []
    for entry in entries:
        if isinstance(entry, dict):
            ((title, inner),) = entry.items()
            inside = _lines(inner if isinstance(inner, list) else [inner])
            found += [f"\n## {title}\n", *inside] if isinstance(inner, list) else inside
        elif entry in _texts:
            summary = summary_of(_texts[entry]) if not entry.startswith("reference/") else ""
            found.append(f"- [{title_of(_texts[entry])}]({entry}){': ' * bool(summary)}{summary}")
    return found


def write(site: Path, nav: list[Any]) -> None:
    """Write `llms.txt`, and each page's source."""
    (site / "llms.txt").write_text("\n".join([_HEAD, *_lines(nav)]) + "\n", "utf-8")
    for place, text in _texts.items():
        path = site / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
