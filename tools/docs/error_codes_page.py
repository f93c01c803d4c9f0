"""The page of error codes, drawn from the sections that `hocket explain` prints."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
SOURCES = (
    "trainer-core/src/hocket/trainer",
    "algos/src/hocket/algos",
    "dist/src/hocket/dist",
    "ckpt/src/hocket/ckpt",
    "stream/src/hocket/stream",
    "native/src/hocket/native",
    "hocket/src/hocket/compat",
)
_TITLE = re.compile(r"\A# ([^\n]+)\n.*?(?=^## )", re.M | re.S)
_SECTION = re.compile(r"^## (HKT-\w+)(: .+)$", re.M)
_HEAD = """\
# Error codes

The last line of a message is a code, such as `[HKT-CK03]`. Its section is below, and `hocket explain
HKT-CK03` prints it without a network; so do `hocket-ckpt explain` and `hocket-stream explain` where those are
installed alone. The [errors that a script meets most often](../trainer/errors.md) have examples.
"""


def render() -> str:
    """Return the page; the anchor of a section is its code in small letters."""
    parts = [_HEAD]
    for source in SOURCES:
        text = (PACKAGES / source / "errors.md").read_text("utf-8")
        text = _TITLE.sub(r"## \1\n\n", text, count=1)
        parts.append(_SECTION.sub(lambda found: f"### {found[1]}{found[2]} {{#{found[1].lower()}}}", text))
    return "\n".join(parts)
