"""The metadata that all packages share, kept in one place, and the checks before a release.

The version stands in the root's `pyproject.toml`, what else packages share in `CLASSIFIERS` and `KEYWORDS`.
The addresses (`[project.urls]` there) are empty until a maintainer who publishes fills them in; `PAGE` lists
everything that only a maintainer can fill in.

```console
$ python tools/release.py version 0.2.0
$ python tools/release.py write
$ python tools/release.py check --tag v0.2.0
$ python tools/release.py notes
```

`version` sets it and writes the packages, `write` writes them, `check` compares them, and with a tag asks for
what a release needs; `notes` prints the section of the changelog.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHANGELOG = Path("packages/hocket/CHANGELOG.md")
CLASSIFIERS = (
    "Development Status :: 4 - Beta",
    "Environment :: Console",
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3",
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
)
ADDRESSES = ("Repository", "Documentation", "Changelog", "Issues")
"""The addresses that PyPI shows beside a release."""
PAGE = Path("packages/hocket/docs/project/platforms.md")
HEADING = "What a maintainer fills in before the first release"
"""The page and its section on what no script can know."""
KEYWORDS = ("checkpoint", "distributed", "fsdp", "pytorch", "streaming", "training")


def version(root: Path) -> str:
    """Return the version of all packages."""
    found = re.search(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        sys.exit("pyproject.toml has no line `version = …`")
    return found[1]


def addresses(root: Path) -> dict[str, str]:
    """Return the addresses that all packages have, by their titles."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return dict(project.get("urls", {}))


def expected(root: Path) -> dict[Path, str]:
    """Return the text of each file that has shared metadata, as it should be."""
    number = version(root)
    projects = sorted(root.glob("packages/*/pyproject.toml"))
    urls = addresses(root)
    packages = {path: _package(path.read_text(), number, urls) for path in projects}
    cargo, lock = root / "Cargo.toml", root / "Cargo.lock"
    head = re.compile(r'(\[workspace\.package\]\nversion = )".*"')
    own = "|".join(path.parent.name for path in sorted(root.glob("crates/*/Cargo.toml")))
    locked = re.compile(rf'(name = "(?:{own}|s3d)"\nversion = )".*"')
    return packages | {
        cargo: head.sub(rf'\1"{number}"', cargo.read_text()),
        lock: locked.sub(rf'\1"{number}"', lock.read_text()),
    }


def _package(text: str, number: str, urls: dict[str, str]) -> str:
    text = re.sub(r'^version = ".*"$', f'version = "{number}"', text, count=1, flags=re.MULTILINE)
    text = re.sub(r'"(hocket-[a-z-]+(?:\[[a-z0-9,]+\])?)==[^"]*"', rf'"\1=={number}"', text)
    shared = f"classifiers = {_array(CLASSIFIERS)}\nkeywords = {_array(KEYWORDS)}\n"
    text = re.sub(r"^(?:classifiers|keywords) = \[\n(?:    .*\n)*\]\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^(license-files = .*\n)", rf"\1{shared}", text, count=1, flags=re.MULTILINE)
    text = re.sub(r"^\[project\.urls\]\n(?:.+\n)*\n", "", text, flags=re.MULTILINE)
    lines = "".join(f'{title} = "{address}"\n' for title, address in urls.items())
    return text.replace("[build-system]\n", f"[project.urls]\n{lines}\n[build-system]\n") if urls else text


def _array(values: tuple[str, ...]) -> str:
    return "[\n" + "".join(f'    "{value}",\n' for value in values) + "]"


def notes(root: Path, number: str) -> str:
    """Return the section of the changelog on a version, or on what is unreleased."""
    text = (root / CHANGELOG).read_text()
    for title in (number, "Unreleased"):
        found = re.search(rf"^## {re.escape(title)}\b.*?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        if found is not None:
            return found[1].strip()
    sys.exit(f"{CHANGELOG} has a section neither on {number} nor on `Unreleased`")


def missing_for_release(root: Path, tag: str) -> list[str]:
    """Return a line for each thing that keeps a tag from being released."""
    lines = []
    if tag != f"v{version(root)}":
        lines.append(f"the tag is `{tag}`, expected `v{version(root)}`")
    if lacking := [title for title in ADDRESSES if title not in addresses(root)]:
        lines.append(
            f"pyproject.toml has no {', '.join(lacking)} under `[project.urls]`, which PyPI shows: a "
            f"maintainer fills them in ({PAGE}, `{HEADING}`), then runs `python tools/release.py write`"
        )
    return lines


def main() -> int:
    """Run a command; `check` returns 1 if something differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("version", help="set the version of all packages").add_argument("number")
    commands.add_parser("write", help="write the shared metadata into the packages")
    commands.add_parser("check", help="compare it").add_argument("--tag", help="the tag that is released")
    commands.add_parser("notes", help="print the changelog of this version")
    arguments = parser.parse_args()
    if arguments.command == "notes":
        print(notes(ROOT, version(ROOT)))
        return 0
    if arguments.command == "version":
        path = ROOT / "pyproject.toml"
        set_line = f'version = "{arguments.number}"'
        path.write_text(re.sub(r'^version = ".*"$', set_line, path.read_text(), count=1, flags=re.MULTILINE))
    if arguments.command in ("version", "write"):
        for path, text in expected(ROOT).items():
            path.write_text(text)
        return 0
    wrong = [path for path, text in expected(ROOT).items() if path.read_text() != text]
    for path in wrong:
        print(f"{path.relative_to(ROOT)} differs; run `python tools/release.py write`", file=sys.stderr)
    missing = [] if arguments.tag is None else missing_for_release(ROOT, arguments.tag)
    for line in missing:
        print(line, file=sys.stderr)
    return bool(wrong or missing)


if __name__ == "__main__":
    sys.exit(main())
