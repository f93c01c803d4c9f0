"""The page of the trainer's arguments, drawn from the classes that state them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SETUP = Path(__file__).resolve().parents[2] / "packages/trainer-core/src/hocket/trainer/setup"
TABLES = (
    ("Arguments of `Trainer`", "settings.py", "TrainerSettings"),
    ("Fields of `loop=`", "settings.py", "LoopSettings"),
    ("Fields of `checkpointing=`", "settings.py", "CheckpointingSettings"),
    ("Arguments of `Trainer.fit`", "fit_setup.py", "FitSettings"),
)
_GROUP = re.compile(r"^\w+Settings\(\)$")
_HEAD = """\
# The trainer's arguments

The tables are made from the classes that state and check the arguments
(`packages/trainer-core/src/hocket/trainer/setup/settings.py`). Every argument is passed by its name. A name
that does not exist is an error that names the nearest.

<div class="filter-tables"></div>
"""


def fields_of(source: str, name: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, default and text of each field of a dataclass.

    Args:
        source: The module's code.
        name: The name of the class.
    """
    (found,) = (
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    for node, after in zip(found.body, found.body[1:], strict=False):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = " ".join(str(after.value.value).split())
        yield node.target.id, ast.unparse(node.annotation), _default(node.value), text


def _default(value: ast.expr | None) -> str:
    if value is None:
        return "required"
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        value = next((word.value for word in value.keywords if word.arg == "default"), ast.Constant(...))
    return f"`{_GROUP.sub('{}', ast.unparse(value))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def render() -> str:
    """Return the page."""
    parts = [_HEAD]
    for title, file, name in TABLES:
        parts.append(f"## {title}\n")
        parts.append("| argument | type | default | meaning |\n|---|---|---|---|")
        rows = fields_of((SETUP / file).read_text("utf-8"), name)
        parts.append(
            "\n".join(
                f"| `{argument}` | `{_cell(kind)}` | {_cell(default)} | {_cell(text)} |"
                for argument, kind, default, text in rows
            )
        )
        parts.append("")
    return "\n".join(parts)
