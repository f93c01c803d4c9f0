"""The module paths that the documentation names stay, wherever files move."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = {
    "hocket.trainer": (
        *("callbacks", "loggers", "optim", "models", "metrics", "loss", "profiler", "testing"),
        *("errors", "protocols", "algorithm", "loop", "step", "engine", "evaluation", "compiled_step"),
    ),
    "hocket.algos": ("surgery", "order", "alibi", "gated_linear_units"),
    "hocket.dist": (),
    "hocket.ckpt": ("torch", "dcp"),
    "hocket.stream": ("torch", "convert"),
    "hocket.recipes": (),
    "hocket.compat": ("composer", "streaming"),
    "hocket.native": ("errors",),
}
PATHS = [
    ".".join(filter(None, (package, name))) for package, names in MODULES.items() for name in ("", *names)
]
_IMPORT = re.compile(r"^(?:>>> )?from (hocket[\w.]*) import ([\w, ]+)$", re.M)


@pytest.mark.parametrize("path", PATHS)
def test_documented_modules_can_be_imported(path: str) -> None:
    module = importlib.import_module(path)
    assert module.__doc__
    for name in getattr(module, "__all__", ()):
        assert hasattr(module, name), f"`{path}.__all__` names `{name}`, which it does not have"


def test_the_imports_in_the_documentation_work() -> None:
    pages = [path for top in ("packages", ".github") for path in (ROOT / top).rglob("*.md")]
    found = {
        line
        for page in pages
        for line in _IMPORT.findall(page.read_text())
        if "node_modules" not in page.parts
    }
    assert len(found) > 50
    for module, names in sorted(found):
        for name in names.split(","):
            try:
                if not hasattr(importlib.import_module(module), name.strip()):
                    importlib.import_module(f"{module}.{name.strip()}")
            except ImportError as error:
                # A module for a library that this environment lacks names it, and the cause is its absence.
                lacks = getattr(error.__cause__, "name", None) or "hocket"
                if lacks.startswith("hocket"):
                    raise


def test_an_extra_is_quoted_in_every_command_that_installs_it() -> None:
    """zsh, the shell of macOS, takes the brackets of `hocket-dist[ray]` for a pattern of files."""
    texts = [path for top in ("packages", ".github", "README.md") for path in _texts(ROOT / top)]
    commands = [
        (path, line)
        for path in texts
        for line in re.findall(r"(?:pip|tool) install [^`\n]*\[.*", path.read_text())
    ]
    assert len(commands) > 20
    assert [one for one in commands if not re.search(r"install [^`\n]*?'[\w.-]+\[", one[1])] == []


def _texts(top: Path) -> list[Path]:
    found = [top] if top.is_file() else sorted(path for path in top.rglob("*.*") if "tests" not in path.parts)
    return [path for path in found if path.suffix in {".md", ".py"} and "node_modules" not in path.parts]
