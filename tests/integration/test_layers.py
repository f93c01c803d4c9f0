"""The files of a crate import each other without circles; import-linter checks the Python packages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CRATES = sorted(path.parent.name for path in (ROOT / "crates").glob("*/Cargo.toml"))

# The layers of hocket-store from the top, as in architecture.md; `client` includes the files below it.
STORE_LAYERS = (
    ("handles and verbs", "crate store connect object upload"),
    ("implementations", "local remote read parts list uploads requests staged backend"),
    ("retry", "retry"),
    ("clients", "client credentials http handle"),
    ("runtime, budget and process table", "runtime budget counters process"),
    ("durable files, cancellation and workers", "durable execution"),
    ("options, URIs and values", "options uri env meta pin local_meta ranges memory"),
    ("errors", "error service"),
)

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
    # Unit tests at the end of a file may import from any layer.
    code = code.partition("\n#[cfg(test)]\nmod tests {")[0]
    code = "\n".join(line.partition("//")[0] for line in code.splitlines())
    while match := _GROUP.search(code):
        names = [match[1] + name.strip() for name in match[2].split(",") if name.strip()]
        code = code[: match.start()] + ", ".join(names) + code[match.end() :]
    found = set()
    for first, rest in _PATH.findall(code):
        # A path starts at the crate, at the parent module, or at a module declared here.
        base = {"crate": "crate", "super": module.rpartition("::")[0]}.get(first, f"{module}::{first}")
        if base not in modules:
            continue
        name = base + rest
        while name not in modules:
            name = name.rpartition("::")[0]
        found.add(name)
    return found - {module}


def check_one_way(imports: Mapping[str, set[str]]) -> None:
    """Fail with the circle if there is one."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail("a circle of imports: " + " -> ".join(reversed(error.args[1])))


@pytest.mark.parametrize("crate", CRATES)
def test_the_files_of_a_crate_import_each_other_without_circles(crate):
    imports = rust_imports(ROOT / "crates" / crate / "src")
    assert any(imports.values()), "no import was found"
    check_one_way(imports)


def layer_numbers(layers: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Return the layer of each module that a table of layers names, 0 for the top."""
    return {module: number for number, (_, modules) in enumerate(layers) for module in modules.split()}


def imports_up(imports: Mapping[str, set[str]], layers: Sequence[tuple[str, str]]) -> list[str]:
    """Return the imports that run from a lower layer to a higher one."""
    numbers = layer_numbers(layers)

    def layer(module: str) -> int:
        return numbers[module.removeprefix("crate::").partition("::")[0]]

    return [
        f"{module} -> {other}"
        for module, others in sorted(imports.items())
        for other in sorted(others)
        if layer(other) < layer(module)
    ]


def test_no_file_of_hocket_store_imports_from_a_higher_layer():
    imports = rust_imports(ROOT / "crates/hocket-store/src")
    assert {module.removeprefix("crate::").partition("::")[0] for module in imports} == set(
        layer_numbers(STORE_LAYERS)
    ), "a module without a layer, or a layer without its module"
    assert imports_up(imports, STORE_LAYERS) == []


def test_imports_from_a_higher_layer_are_found():
    imports = {"crate::a": {"crate::b"}, "crate::b": {"crate::b::c"}, "crate::b::c": {"crate::a"}}
    assert imports_up(imports, [("top", "a"), ("ground", "b")]) == ["crate::b::c -> crate::a"]


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
