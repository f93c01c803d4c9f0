"""Files of a crate import each other in one way, and maps name all rooms; import-linter checks Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CRATES = sorted(path.parent.name for path in (ROOT / "crates").glob("*/Cargo.toml"))
PACKAGES = sorted(path.parent for path in (ROOT / "packages").glob("*/src/hocket/*/__init__.py"))

# The layers of a crate from the top: its rooms, and the files beside them.
LAYERS = {
    "hocket-store": (
        ("handles and verbs", "crate store object upload connect"),
        ("implementations", "local remote"),
        ("their interface", "backend"),
        ("clients", "client"),
        ("values", "values"),
        ("this process", "process"),
        ("durable files", "durable"),
        ("errors", "error service"),
    ),
    "hocket-ckpt": (
        ("handles and verbs", "crate upkeep"),
        ("open checkpoints", "checkpoint"),
        ("saves", "save"),
        ("other formats", "foreign"),
        ("places", "place"),
        ("reads of blocks", "read"),
        ("bytes of data files", "write"),
        ("manifest", "manifest"),
        ("format", "format"),
        ("threads and errors", "workers error"),
    ),
    "hocket-stream": (
        ("threads", "crate reader writer"),
        ("local disk", "cache"),
        ("lists and order", "index order"),
        ("row groups of Parquet", "parquet"),
        ("shard files", "shard"),
        ("errors and limits", "error semaphore"),
    ),
}

_PATH = re.compile(r"(?<![\w:])([a-z_]\w*)((?:::\w+)+)")
_GROUP = re.compile(r"((?:\w+::)+)\{([^{}]*)\}")


def rust_imports(source: Path) -> dict[str, set[str]]:
    """Return the modules that each module of a crate names, without tests; `crate` is lib.rs."""
    paths = [
        path for path in source.rglob("*.rs") if "tests" not in path.relative_to(source).with_suffix("").parts
    ]
    modules = {_rust_module(path.relative_to(source)): path for path in paths}
    return {module: _named_in(path.read_text(), module, modules) for module, path in modules.items()}


def _rust_module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return "::".join(("crate", *(parts[:-1] if parts[-1] in ("mod", "lib") else parts)))


def _named_in(code: str, module: str, modules: Mapping[str, Path]) -> set[str]:
    # Unit tests at the end of a file.
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
def test_the_map_of_a_crate_names_its_rooms(crate):
    source = ROOT / "crates" / crate / "src"
    text = "\n".join(re.findall("^//!(.*)", (source / "lib.rs").read_text(), re.M))
    rooms = {path.stem for path in source.iterdir()} - {"lib"}
    missing = {room for room in rooms if not re.search(rf"`{room}(?:`|::)", text)}
    assert not missing, f"the map in {crate}'s lib.rs lacks {missing}"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_the_map_of_a_package_names_its_rooms(package):
    code = (package / "__init__.py").read_text()
    text = ast.get_docstring(ast.parse(code)) or ""
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    if package.name == "algos":
        rooms = {"surgery"}  # beside the methods
        assert "a folder for each method" in text
    missing = {room for room in rooms if not re.search(rf"\b{room}\b", text)}
    assert rooms
    assert not missing, f"the map of hocket.{package.name} lacks {missing}"


@pytest.mark.parametrize("crate", CRATES)
def test_the_files_of_a_crate_import_each_other_without_circles(crate):
    imports = rust_imports(ROOT / "crates" / crate / "src")
    assert any(imports.values()), "no import was found"
    check_one_way(imports)


def room_of(module: str) -> str:
    """Return the room or the file beside the rooms that a module belongs to."""
    return module.removeprefix("crate::").partition("::")[0]


def imports_of_rooms(imports: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the rooms that each room imports."""
    rooms: dict[str, set[str]] = {room_of(module): set() for module in imports}
    for module, others in imports.items():
        rooms[room_of(module)] |= {room_of(other) for other in others} - {room_of(module)}
    return rooms


def layer_numbers(layers: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Return the layer of each module that a table of layers names, 0 for the top."""
    return {module: number for number, (_, modules) in enumerate(layers) for module in modules.split()}


def imports_up(imports: Mapping[str, set[str]], layers: Sequence[tuple[str, str]]) -> list[str]:
    """Return the imports that run from a lower layer to a higher one."""
    numbers = layer_numbers(layers)

    def layer(module: str) -> int:
        return numbers[room_of(module)]

    return [
        f"{module} -> {other}"
        for module, others in sorted(imports.items())
        for other in sorted(others)
        if layer(other) < layer(module)
    ]


@pytest.mark.parametrize("crate", LAYERS)
def test_no_room_of_a_crate_imports_from_a_higher_layer(crate):
    imports = rust_imports(ROOT / "crates" / crate / "src")
    rooms = imports_of_rooms(imports)
    assert set(rooms) == set(layer_numbers(LAYERS[crate])), (
        "a room without a layer, or a layer without its room"
    )
    assert imports_up(imports, LAYERS[crate]) == []
    check_one_way(rooms)


def test_imports_from_a_higher_layer_are_found():
    imports = {"crate::a": {"crate::b"}, "crate::b": {"crate::b::c"}, "crate::b::c": {"crate::a"}}
    assert imports_up(imports, [("top", "a"), ("ground", "b")]) == ["crate::b::c -> crate::a"]


def test_circles_between_rooms_are_found():
    imports = {
        "crate::a::x": {"crate::b::x"},
        "crate::b::x": set(),
        "crate::b::y": {"crate::a::y"},
        "crate::a::y": set(),
    }
    check_one_way(imports)
    with pytest.raises(pytest.fail.Exception, match=r"a -> b -> a|b -> a -> b"):
        check_one_way(imports_of_rooms(imports))


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
