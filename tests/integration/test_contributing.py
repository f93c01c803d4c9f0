"""The contributors' pages are correct: files and names exist, snippets run, CI runs `poe check`."""

import re
import tomllib
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hocket.trainer.testing import check_callback
from support.training import make, parameters

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / ".github/CONTRIBUTING.md", ROOT / ".github/architecture.md"]
PLACE = re.compile(r"`((?:packages|tests|crates|tools|pyproject)[\w./-]*)`(?::\s+`([^`]+)`)?")


def _snippet(heading: str) -> dict[str, Any]:
    """Run the snippet under a heading and return its names."""
    text = PAGES[0].read_text()
    section = text[text.index(f"## {heading}") :]
    (code,) = re.findall(r"^```python\n(.*?)^```", section.split("\n## ")[0], re.M | re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_names_in_the_pages_exist(page: Path) -> None:
    places = PLACE.findall(page.read_text())
    assert len(places) > 10
    for path, name in places:
        assert (ROOT / path).exists(), f"{page.name} names `{path}`, which does not exist"
        if name:
            assert name in (ROOT / path).read_text(), f"{page.name}: `{path}` has no `{name}`"


def test_commands_name_tests_and_tasks_that_exist() -> None:
    commands = re.findall(r"^\$ (.*)$", PAGES[0].read_text(), re.M)
    tasks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["poe"]["tasks"]
    for command in commands:
        for path in re.findall(r"packages/\S+\.py", command):
            assert (ROOT / path).is_file(), command
        if task := re.search(r"poe (\S+)", command):
            assert task[1] in tasks


def test_ci_runs_the_steps_of_poe_check() -> None:
    tasks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["poe"]["tasks"]
    (steps,) = re.findall(r"^for name in (.*); do$", (ROOT / ".ci/run").read_text(), re.M)
    assert steps.split() == tasks["check"]["sequence"]
    assert set(steps.split()) <= tasks.keys()


def test_the_pages_algorithm_changes_the_trained_weights() -> None:
    algorithm = _snippet("Add an algorithm")["LossScale"]
    found = []
    for algorithms in ([], [algorithm(3.0)]):
        with make(max_duration="2ba", algorithms=algorithms) as trainer:
            trainer.fit()
            found.append(parameters(trainer))
    assert any(not torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_the_pages_callback_passes_the_conformance_suite() -> None:
    callback = _snippet("Add a callback")["StepCounter"]
    check_callback(callback)
    own = callback()
    with make(max_duration="3ba", callbacks=own) as trainer:
        trainer.fit()
    assert own.steps == 3


def test_the_pages_column_encoding_round_trips() -> None:
    encoding = _snippet("Add a column encoding")["Uuid"]()
    values = [uuid.UUID(int=7), uuid.UUID(int=2**100)]
    data = b"".join(map(encoding.encode, values))
    column = encoding.decode(memoryview(data), np.array([0, 16, 32], dtype=np.uint64))
    assert [encoding.item(column, place) for place in range(2)] == values
    with pytest.raises(Exception, match="expected a UUID"):
        encoding.encode("7")
