"""The snippets of the README and of the stubs run, and errors have the documented builtin bases."""

import ast
import doctest
import re
from pathlib import Path

import pytest

from hocket import native
from hocket.native import errors

PACKAGE = Path(__file__).resolve().parents[1]


def test_the_snippets_of_the_readme_run() -> None:
    snippets = re.findall(r"^```python\n(.*?)^```", (PACKAGE / "README.md").read_text(), re.M | re.S)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {})


def test_the_examples_of_the_stubs_run() -> None:
    stubs = sorted((PACKAGE / "src/hocket/native").glob("*.pyi"))
    nodes = [node for stub in stubs for node in ast.walk(ast.parse(stub.read_text()))]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    pages = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
    parser, names = doctest.DocTestParser(), vars(native)
    examples = [parser.get_doctest(page, dict(names), "_native.pyi", None, None) for page in pages]
    assert any(example.examples for example in examples)
    for example in examples:
        assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("StoreNotFoundError", FileNotFoundError),
        ("StoreExistsError", FileExistsError),
        ("StorePermissionError", PermissionError),
        ("StoreConfigError", ValueError),
        ("StoreTransientError", ConnectionError),
        ("StoreIOError", OSError),
        ("StoreChangedError", errors.StoreError),
    ],
)
def test_errors_derive_from_the_matching_builtin(name: str, builtin: type[Exception]) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, builtin)
    assert issubclass(kind, errors.StoreError)
    assert issubclass(kind, errors.HocketError)
    assert str(kind("the message")) == "the message"
