"""Files of a crate or a package import each other in one direction: no circles."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CRATES = ["hocket-ckpt", "hocket-py"]
PACKAGES = {"hocket.ckpt": ROOT / "packages/ckpt/src/hocket/ckpt"}

_PATH = re.compile(r"(?<![\w:])([a-z_]\w*)((?:::\w+)+)")
_GROUP = re.compile(r"((?:\w+::)+)\{([^{}]*)\}")


def rust_imports(source: Path) -> dict[str, set[str]]:
    """Return the modules that each module of a crate names; `crate` is lib.rs."""
    modules = {_rust_module(path.relative_to(source)): path for path in source.rglob("*.rs")}
    return {module: _named_in(path.read_text(), module, modules) for module, path in modules.items()}


def _rust_module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return "::".join(("crate", *(parts[:-1] if parts[-1] in ("mod", "lib") else parts)))


def _named_in(code: str, module: str, modules: Mapping[str, Path]) -> set[str]:
    # A file's own tests come last, and may use anything.
    code = code.partition("\n#[cfg(test)]\nmod tests")[0]
    code = "\n".join(line.partition("//")[0] for line in code.splitlines())
    while match := _GROUP.search(code):
        names = [match[1] + name.strip() for name in match[2].split(",") if name.strip()]
        code = code[: match.start()] + ", ".join(names) + code[match.end() :]
    found = set()
    for first, rest in _PATH.findall(code):
        # A path begins at the crate, at the parent, or at a module that this one declares.
        base = {"crate": "crate", "super": module.rpartition("::")[0]}.get(first, f"{module}::{first}")
        if base not in modules:
            continue
        name = base + rest
        while name not in modules:
            name = name.rpartition("::")[0]
        found.add(name)
    return found - {module}


def python_imports(source: Path, package: str) -> dict[str, set[str]]:
    """Return the modules of a package that each of its modules imports, late imports and types included."""
    paths = {_python_module(path.relative_to(source), package): path for path in source.rglob("*.py")}
    return {module: _imported_by(path, paths) - {module} for module, path in paths.items()}


def _python_module(path: Path, package: str) -> str:
    parts = path.with_suffix("").parts
    return ".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _imported_by(path: Path, modules: Mapping[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & modules.keys()) or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & modules.keys()
    return found


def check_one_way(imports: Mapping[str, set[str]]) -> None:
    """Fail with the circle if there is one."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail("a circle of imports: " + " -> ".join(reversed(error.args[1])))


@pytest.mark.parametrize("crate", CRATES)
def test_the_files_of_a_crate_form_no_circle(crate):
    imports = rust_imports(ROOT / "crates" / crate / "src")
    assert any(imports.values()), "no import was found"
    check_one_way(imports)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_files_of_a_package_form_no_circle(package):
    imports = python_imports(PACKAGES[package], package)
    assert any(imports.values()), "no import was found"
    check_one_way(imports)


def test_circles_are_found(tmp_path):
    (tmp_path / "lib.rs").write_text("mod a;\nmod b;\npub use a::A;\n")
    (tmp_path / "a.rs").write_text("use crate::b::{self, B};\npub struct A(B);\n")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/mod.rs").write_text("mod c;\npub use c::C;\n")
    (tmp_path / "b/c.rs").write_text("pub struct C;\n")
    assert rust_imports(tmp_path) == {
        "crate": {"crate::a"},
        "crate::a": {"crate::b"},
        "crate::b": {"crate::b::c"},
        "crate::b::c": set(),
    }
    check_one_way(rust_imports(tmp_path))
    (tmp_path / "b/c.rs").write_text(
        "fn c() -> crate::a::A {}\n#[cfg(test)]\nmod tests {\n    use super::*;\n}\n"
    )
    with pytest.raises(pytest.fail.Exception, match=r"crate::a -> crate::b -> crate::b::c"):
        check_one_way(rust_imports(tmp_path))
