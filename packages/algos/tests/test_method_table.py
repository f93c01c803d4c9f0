"""The table of methods in the README is the one generated from the code."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def _tool() -> Any:
    spec = importlib.util.spec_from_file_location("algos_table", ROOT / "tools/algos_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_up_to_date() -> None:
    pytest.importorskip("torchvision", reason="needs torchvision")
    tool = _tool()
    text = tool.README.read_text()
    assert tool.updated(text) == text, "run `python tools/algos_table.py`"


def test_methods_that_the_table_marks_as_compared_have_parity_tests() -> None:
    folder = Path(__file__).parent
    cases = set(re.findall(r'_case\("(\w+)"', (folder / "test_parity_batches.py").read_text()))
    surgery = (folder / "test_parity_surgery.py").read_text()
    cases |= set(re.findall(r'"(?:call|function)": "(\w+)"', surgery)) - {"surgery", "replaced"}
    assert set().union(*_tool().COMPARED.values()) == cases
