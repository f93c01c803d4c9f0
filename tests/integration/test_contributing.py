"""The contributors' pages are correct: files and names exist, snippets run, CI runs `poe check`."""

import re
import sys
import tomllib
import uuid
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
import pytest
import torch

from hocket.trainer import Callback, Logger, State
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


class Calls:
    """Records the first call of each of Hocket's functions, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def note(self, frame: FrameType, kind: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if kind == "call" and module.startswith("hocket."):
            self.names.append(f"{module}.{frame.f_code.co_qualname}")

    def __enter__(self) -> Self:
        sys.setprofile(self.note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


class Turn(Callback):
    """Records the calls of two turns of the loop, from the end of a batch on."""

    def __init__(self) -> None:
        self.calls = Calls()

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.counts.batch == 2:
            self.calls.__enter__()
        elif state.counts.batch == 4:
            self.calls.__exit__()


def test_the_ways_through_the_code_are_those_that_it_takes(tmp_path: Path) -> None:
    turn = Turn()
    with make(max_duration="6ba", save_folder=str(tmp_path), save_interval="6ba", callbacks=turn) as trainer:
        trainer.fit()
        with Calls() as save:
            trainer.save_checkpoint_to_save_folder()
    with Calls() as load:
        make(max_duration="8ba", save_folder=str(tmp_path), autoresume=True).close()
    text = PAGES[0].read_text()
    for heading, calls in (("One batch", turn.calls), ("One save", save), ("One load", load)):
        section = text[text.index(f"### {heading}") :].partition("\n## ")[0].partition("\n### ")[0]
        names = re.findall(r"`(hocket\.[\w.]+)`", section)
        assert len(names) > 5
        missing = [name for name in names if name not in calls.names]
        assert not missing, f"{heading} calls none of {missing}"
        rest = iter(calls.names)
        out_of_order = [name for name in names if name not in rest]
        assert not out_of_order, f"{heading}: {out_of_order} are called before what the page names before"


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
