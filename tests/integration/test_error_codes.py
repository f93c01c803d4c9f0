"""Each public error class has a code of its own, shown below its message, and a section that explains it."""

from __future__ import annotations

import importlib
import json
import pickle
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from hocket.native.cli.explain import PACKAGES, Section, sections

ERRORS = (
    *(f"hocket.{name}.errors" for name in ("native", "ckpt", "stream", "trainer", "dist", "algos")),
    "hocket.compat.streaming.errors",
    "hocket.compat.composer.engine",
    "hocket.compat.composer.absent",
)
COMMANDS = {
    "hocket.ckpt": ("HKT-CK03", "CheckpointPartialError"),
    "hocket.stream": ("HKT-ST02", "IndexNotFoundError"),
    "hocket.recipes": ("HKT-TR09", "FolderInUseError"),
}


def classes() -> list[type[Exception]]:
    """Return the error classes that the packages define."""
    return [
        found
        for name in ERRORS
        for found in vars(importlib.import_module(name)).values()
        if isinstance(found, type)
        and issubclass(found, Exception)
        and not issubclass(found, Warning)
        and found.__module__ == name
    ]


CLASSES = classes()


def instance(error: type[Exception]) -> Exception:
    return error("it failed")


def test_every_class_has_a_code_of_its_own_and_a_section() -> None:
    assert len(CLASSES) > 60
    found = {(section.code, section.name) for section in sections()}
    assert {(vars(error)["code"], error.__name__) for error in CLASSES} == found
    assert len({code for code, _ in found}) == len(found) == len(sections())


def test_every_section_says_why_and_what_to_do() -> None:
    for section in sections():
        assert re.fullmatch(r"\*\*Why:\*\* [A-Z`].{20,}\.\n\n\*\*To do:\*\* [A-Z`].{10,}\.", section.text), (
            section
        )
    assert {section.package for section in sections()} == set(PACKAGES)


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: f"{error.__module__}.{error.__name__}")
def test_the_code_stands_below_the_message_and_survives_pickling(error: type[Exception]) -> None:
    for one in (instance(error), pickle.loads(pickle.dumps(instance(error)))):
        assert str(one) == "it failed"
        *_, message, code = traceback.format_exception_only(one)
        assert message.endswith("Error: it failed\n")
        assert code == f"[{error.code}]\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", COMMANDS)
def test_each_command_explains_without_torch(module: str) -> None:
    code, name = COMMANDS[module]
    script = f"""
import contextlib, io, json, runpy, sys
said = []
for arguments in ([{code!r}], [{code[4:].lower()!r}], [{name!r}], [], [{code[:-1] + "x"!r}]):
    sys.argv = ["x", "explain", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            runpy.run_module({module!r}, run_name="__main__", alter_sys=False)
        except SystemExit as error:
            said.append([out.getvalue(), error.code])
print(json.dumps([said, "torch" in sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    [by_code, by_short_code, by_name, listed, unknown], has_torch = json.loads(done.stdout)
    assert by_code == by_short_code == by_name
    assert by_code[0].startswith(f"{code}: ")
    assert "To do: " in by_code[0]
    assert by_code[1] == 0
    assert f"{code}  " in listed[0]
    assert unknown[1] == 2
    assert "did you mean `HKT-" in unknown[0]
    assert not has_torch


def test_a_message_of_a_command_ends_with_the_code(tmp_path: Path) -> None:
    for module, code in (("hocket.ckpt", "HKT-CK02"), ("hocket.stream", "HKT-ST02")):
        command = [sys.executable, "-m", module, "inspect", str(tmp_path / "none")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.stderr.rstrip().endswith(f" [{code}]"), done.stderr


def test_a_section_is_found_in_its_package() -> None:
    found = [one for one in sections(("hocket.ckpt",)) if one.code == "HKT-CK03"]
    assert [type(one) for one in found] == [Section]
    assert found[0].package == "hocket.ckpt"
