"""Rules that let each package be installed alone: namespace, versions, and imports without torch."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
NAMES = {
    "algos": "hocket-algos",
    "ckpt": "hocket-ckpt",
    "dist": "hocket-dist",
    "hocket": "hocket",
    "native": "hocket-native",
    "stream": "hocket-stream",
    "trainer-core": "hocket-trainer-core",
}

WITHOUT_TORCH = ["hocket.ckpt", "hocket.native", "hocket.stream"]

in_each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)


def _project(package: Path) -> dict[str, Any]:
    return tomllib.loads((package / "pyproject.toml").read_text())["project"]


def _cargo(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def _requirements(project: dict[str, Any]) -> list[str]:
    extras = project.get("optional-dependencies", {}).values()
    return [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]


def test_the_packages_have_the_names_in_the_architecture() -> None:
    assert {package.name: _project(package)["name"] for package in PACKAGES} == NAMES


def test_all_packages_and_crates_have_one_version() -> None:
    versions = {package.name: _project(package)["version"] for package in PACKAGES}
    workspace = _cargo(ROOT / "Cargo.toml")["workspace"]["package"]["version"]
    versions["Cargo.toml"] = workspace
    for manifest in ROOT.glob("crates/*/Cargo.toml"):
        version = _cargo(manifest)["package"]["version"]
        versions[manifest.parent.name] = workspace if version == {"workspace": True} else version
    assert set(versions.values()) == {workspace}, versions


@in_each_package
def test_sibling_packages_are_pinned_to_the_same_version(package: Path) -> None:
    project = _project(package)
    for requirement in _requirements(project):
        name, rest = re.fullmatch(r"([\w.-]+)(?:\[[\w,-]+\])?(.*)", requirement.strip()).groups()
        if name in NAMES.values():
            expected = f"=={project['version']}"
            assert rest == expected, f"{requirement}: a sibling of another version would be taken"


def test_packages_depend_on_siblings_as_in_the_architecture() -> None:
    found = {}
    for package in PACKAGES:
        requirements = _requirements(_project(package))
        names = {re.match(r"[\w.-]+", requirement).group() for requirement in requirements}
        found[package.name] = (names & set(NAMES.values())) - {NAMES[package.name]}
    everything = set(NAMES.values()) - {"hocket"}
    assert found == {
        "algos": {"hocket-trainer-core"},
        "ckpt": {"hocket-native"},
        "dist": {"hocket-native"},  # of the extra `stores`, for `initial_weights` in a store
        "hocket": everything,
        "native": set(),
        "stream": {"hocket-native"},
        "trainer-core": set(),
    }


@in_each_package
def test_no_package_has_an_init_file_in_the_hocket_namespace(package: Path) -> None:
    inits = [path for path in package.rglob("hocket/__init__.py") if ".venv" not in path.parts]
    assert not inits, f"{inits} would hide the other packages"


def test_the_installed_hocket_namespace_has_no_file() -> None:
    code = "import hocket; print(getattr(hocket, '__file__', None), len(list(hocket.__path__)) > 1)"
    assert _python(code) == "None True"


@in_each_package
def test_each_package_has_py_typed_and_a_readme(package: Path) -> None:
    assert (package / "README.md").read_text().startswith("# ")
    folders = [path for path in (package / "src" / "hocket").iterdir() if path.is_dir()]
    modules = [path for path in folders if not path.name.startswith("_")]
    assert modules
    for module in modules:
        assert (module / "py.typed").is_file(), f"{module} has no py.typed: checkers would not look into it"
        assert (module / "__init__.py").is_file()


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_torch_is_not_imported_by(module: str) -> None:
    code = f"import sys, {module}; print([name for name in sys.modules if name.split('.')[0] == 'torch'])"
    assert _python(code) == "[]"


def test_openssl_is_not_imported_by_the_checkpoint_package() -> None:
    # It takes 3 MB of each process, and comes with `secrets` and `hashlib`.
    assert _python("import sys, hocket.ckpt; print('_hashlib' in sys.modules)") == "False"


@pytest.mark.parametrize("module", sorted({"hocket.algos", "hocket.dist", "hocket.trainer", *WITHOUT_TORCH}))
def test_importing_a_package_has_no_side_effects_and_imports_no_sibling(module: str) -> None:
    allowed = {module, "hocket.native"} | ({"hocket.trainer"} if module == "hocket.algos" else set())
    code = f"""
import os, signal, sys, threading
handlers = [signal.getsignal(number) for number in signal.valid_signals()]
import {module}
assert handlers == [signal.getsignal(number) for number in signal.valid_signals()], "signal handlers were set"
assert threading.active_count() == 1, "a thread was started"
torch = sys.modules.get("torch")
assert torch is None or not torch.cuda.is_initialized(), "CUDA was initialised"
assert torch is None or not torch.distributed.is_initialized(), "a process group was made"
print(sorted({{".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("hocket.")}}))
"""
    assert set(eval(_python(code))) <= allowed


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
