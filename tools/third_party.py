"""Writes `packages/native/THIRD_PARTY.txt`, the licences of all crates that the extension links.

With `--check`, the file is compared instead. The C libraries that some crates carry, such as aws-lc and zstd,
are listed under the crate that builds them.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "packages" / "native" / "THIRD_PARTY.txt"
TARGETS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin")
"""The targets of the wheels; each wheel has the licences of all."""

_LICENCE = re.compile(r"(licen[cs]e|copying|notice|unlicense)", re.IGNORECASE)
_HEAD = """\
The extension of hocket-native is linked with the crates below, each under its own licence. Where a crate may
be used under one of several licences that include Apache-2.0, it is used under Apache-2.0.

Written by tools/third_party.py.
"""


def linked_packages() -> list[dict[str, Any]]:
    """Return cargo's description of each foreign crate that the extension links on some target, by name.

    Raises:
        subprocess.CalledProcessError: cargo failed; the sources of the crates must have been fetched.
    """
    found = {package["id"]: package for target in TARGETS for package in _linked_on(target)}
    return sorted(found.values(), key=lambda package: (package["name"], package["version"]))


def _linked_on(target: str) -> list[dict[str, Any]]:
    command = ["cargo", "metadata", "--locked", "--offline", "--format-version", "1"]
    command += ["--filter-platform", target]
    stdout = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300).stdout
    metadata = json.loads(stdout)
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    open_ids = [key for key, package in packages.items() if package["name"] == "hocket-py"]
    linked_ids: set[str] = set()
    while open_ids:
        key = open_ids.pop()
        if key not in linked_ids:
            linked_ids.add(key)
            links = (
                link for link in nodes[key]["deps"] if any(kind["kind"] is None for kind in link["dep_kinds"])
            )
            open_ids += [link["pkg"] for link in links]
    return [packages[key] for key in linked_ids if packages[key]["source"] is not None]


def licence_files(package: dict[str, Any]) -> list[Path]:
    """Return the licence files of a crate and of the C library in it."""
    folder = Path(package["manifest_path"]).parent
    files = sorted(path for path in folder.iterdir() if path.is_file() and _LICENCE.match(path.name))
    alternatives = re.split(r" OR |/", package["license"] or "")
    if "AND" not in (package["license"] or "") and "Apache-2.0" in (text.strip() for text in alternatives):
        apache = [path for path in files if "apache" in path.name.lower()]
        notices = [path for path in files if "notice" in path.name.lower()]
        files = [*apache, *notices] if apache else files
    if package["links"]:
        files += sorted(path for path in folder.glob("*/*") if path.is_file() and _LICENCE.match(path.name))
    return files


def text() -> str:
    """Return the file's content; each licence text is listed once, under the crates that have it."""
    listed, holders = [], dict[str, list[str]]()
    for package in linked_packages():
        name = f"{package['name']} {package['version']}"
        listed.append(f"{name}: {package['license']}  {package['repository'] or ''}".rstrip())
        for path in licence_files(package):
            licence = "\n".join(line.rstrip() for line in path.read_text(errors="replace").splitlines())
            holders.setdefault(licence.strip("\n"), []).append(name)
    parts = [_HEAD, "\n".join(listed)]
    for licence, names in holders.items():
        parts.append(f"{'=' * 100}\n{', '.join(dict.fromkeys(names))}\n{'-' * 100}\n{licence}")
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Write the file, or with `--check` compare it and return 1 if it differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    content = text()
    if not parser.parse_args().check:
        FILE.write_text(content)
        return 0
    if not FILE.exists() or FILE.read_text() != content:
        print(f"{FILE.relative_to(ROOT)} is not current: run `python tools/third_party.py`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
