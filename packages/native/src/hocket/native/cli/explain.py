"""The sections on errors in the `errors.md` of each package, found by code without importing the package."""

import difflib
import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

__all__ = ["PACKAGES", "Section", "explain", "sections"]

PACKAGES = (
    "hocket.native",
    "hocket.ckpt",
    "hocket.stream",
    "hocket.trainer",
    "hocket.dist",
    "hocket.algos",
    "hocket.compat",
)
"""The packages that may carry `errors.md`."""

_HEADING = re.compile(r"^## (HKT-\w+): `(\w+)`$", re.MULTILINE)
_USAGE = 2


@dataclass(frozen=True, slots=True)
class Section:
    """The section on one class of errors.

    Attributes:
        code: Its code, such as `HKT-CK03`.
        name: The name of the class.
        package: The module that has it.
        text: Why it is raised and what to do, in Markdown.
    """

    code: str
    name: str
    package: str
    text: str


def sections(packages: Sequence[str] = PACKAGES) -> list[Section]:
    """Return the sections of those packages that are installed."""
    found = []
    for package in packages:
        spec = importlib.util.find_spec(package)
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        for path in (Path(folder) / "errors.md" for folder in folders):
            if path.is_file():
                _, *parts = _HEADING.split(path.read_text(encoding="utf-8"))
                for code, name, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
                    found.append(Section(code, name, package, text.strip()))
    return found


def explain(command: str, code: str | None, packages: Sequence[str] = PACKAGES) -> None:
    """Print the section with a code or a class's name, or list all.

    Args:
        command: Name of the command, before a message.
        code: The code, in upper or lower case, with or without `HKT-`, or the class's name; None for a list.
        packages: The packages that are looked through.

    Raises:
        typer.Exit: There is no such code; a line on stderr names the nearest.
    """
    known = sections(packages)
    if code is None:
        for section in known:
            print(f"{section.code}  {section.package}: {section.name}")
        return
    wanted = code.strip("[]` ").lower()
    found = [one for one in known if wanted in (one.code.lower(), one.code[4:].lower(), one.name.lower())]
    if not found:
        names = [one.code for one in known] + [one.name for one in known]
        nearest = {name.lower(): name for name in names}
        near = difflib.get_close_matches(wanted, nearest, 1, 0.5)
        hint = f"did you mean `{nearest[near[0]]}`?" if near else f"`{command} explain` lists all"
        print(f"{command}: there is no error `{code}` in the installed packages; {hint}", file=sys.stderr)
        raise typer.Exit(_USAGE)
    for section in found:
        print(f"{section.code}: {section.package}: {section.name}\n\n{section.text.replace('**', '')}")
