"""The page of all configuration keys, written from their tables: `python -m hocket.dist.config.docs`."""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from hocket.dist.config.deepspeed_keys import DEEPSPEED_TABLES, REFUSED_KEYS
from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.config.fsdp_keys import FSDP_KEYS
from hocket.dist.config.key_table import ConfigKey, Outcome

_HEAD = """\
# Configuration keys

This page is generated from the tables that validate the keys (`python -m hocket.dist.config.docs FILE`).
The keys of `fsdp_config` and `deepspeed_config` are listed with their defaults and what becomes of each.
Keys may be written in any letter case. A key is *honoured* (it means what it meant), *mapped* (to the nearest
counterpart), has *no effect* (accepted, and logged once unless its value asks for nothing), or is
*refused* (an error that names the alternative). A key of `fsdp_config` in no table is an error that suggests
the nearest one.
"""


def render() -> str:
    """Return the page as Markdown."""
    defaults = {field.name: field.default for field in dataclasses.fields(FSDPConfig)}
    lines = [_HEAD, "## `fsdp_config`", "", "| key | default | treatment | meaning |", "|---|---|---|---|"]
    lines += _rows(FSDP_KEYS, defaults)
    rest = (
        "Every key but `stage` may have the value `auto`, which counts as absent. A key in none of these "
        "tables tunes DeepSpeed's own engine: it has no effect, and is logged once unless its value is "
        "`null` or `false`. A key that resembles one of its block is an error that suggests that one."
    )
    lines += ["", "## `deepspeed_config`", "", rest]
    for block, table in DEEPSPEED_TABLES.items():
        title = "Top level" if block == "deepspeed_config" else f"Block `{block.replace(' and ', '` and `')}`"
        lines += ["", f"### {title}", "", "| key | treatment | meaning |", "|---|---|---|", *_rows(table)]
    lines += ["", "### Refused in every block", "", "| key | treatment | alternative |", "|---|---|---|"]
    lines += _rows(REFUSED_KEYS)
    return "\n".join(lines) + "\n"


def _rows(table: Mapping[str, ConfigKey], defaults: Mapping[str, object] | None = None) -> Iterator[str]:
    for outcome in Outcome:
        for key, row in table.items():
            if row.outcome is outcome:
                default = "" if defaults is None else f" {_shown(defaults, key)} |"
                yield f"| `{key}` |{default} {outcome.value} | {row.meaning[0].upper()}{row.meaning[1:]} |"


def _shown(defaults: Mapping[str, object], key: str) -> str:
    return f"`{defaults[key]!r}`" if key in defaults else "–"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render())
