"""Runs the code of a page of the documentation, and compares what it prints.

- A fence `python` runs; the fences of a page share their names. One with `title="train.py"` is written to
  that file.
- What a fence prints is in a fence `text` right after it, with `...` for what differs from run to run.
- In a fence `console`, `$ python train.py`, `$ hocket …` and the commands in `COMMANDS` run, and the lines
  below a command are its output. Other commands are only shown.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMANDS = ("hocket-ckpt", "hocket-stream")
_FENCE = re.compile(r"^```(?P<kind>\w+)(?P<options>[^\n]*)\n(?P<body>.*?)^```$", re.M | re.S)
_COMMAND = re.compile(r"^\$ (.*(?:\\\n.*)*)\n((?:(?!\$ ).*\n)*)", re.M)


def _check(page: Path, code: str, printed: str, expected: str) -> None:
    checker = doctest.OutputChecker()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert checker.check_output(expected, printed, flags), (
        f"{page.name}: prints\n{printed}\nand the page says\n{expected}\nfor\n{code}"
    )


def _run_command(command: str) -> str | None:
    """Return what a command prints, or None if it is only shown."""
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    if words[0] == "python" and len(words) == 2 and words[1].endswith(".py"):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(words[1], run_name="__main__")
        return printed.getvalue()
    if words[0] == "hocket":
        return _run_here("hocket.recipes", words[1:])
    if words[0] not in COMMANDS:
        return None
    # Wide enough that no line of a table is folded.
    env = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1", "PYTHONWARNINGS": "ignore"}
    program = str(Path(sys.executable).parent / words[0])
    done = subprocess.run(
        [program, *words[1:]], capture_output=True, text=True, env=env, timeout=60, check=False
    )
    assert done.returncode == 0, f"`{command}` ended with {done.returncode}: {done.stderr}"
    return done.stdout


def _run_here(module: str, arguments: list[str]) -> str:
    """Return what a command prints that loads torch, which this process has loaded already."""
    argv, path, code = sys.argv, sys.path.copy(), None
    sys.argv = [module, *arguments]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_module(module, run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv, sys.path[:] = argv, path
    assert not code, f"`{module} {' '.join(arguments)}` ended with {code}: {printed.getvalue()}"
    return printed.getvalue()


def check_page(page: Path, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run a page's snippets and commands in the current folder, and assert that they print what it says.

    Args:
        page: The page.
        names: What its snippets may use.

    Returns:
        The names after the last snippet.
    """
    names = {"__name__": "snippet", **(names or {})}
    text = page.read_text("utf-8")
    fences = list(_FENCE.finditer(text))
    for fence, after in itertools.zip_longest(fences, fences[1:]):
        code = fence["body"]
        if fence["kind"] == "python" and (title := re.search(r'title="([^"]+)"', fence["options"])):
            Path(title[1]).write_text(code)
        elif fence["kind"] == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(code, str(page), "exec"), names)  # the repository's own page
            is_output = after and after["kind"] == "text" and not text[fence.end() : after.start()].strip()
            _check(page, code, printed.getvalue(), after["body"] if after and is_output else "")
        elif fence["kind"] == "console":
            for command, output in _COMMAND.findall(code):
                if (found := _run_command(command)) is not None and output.strip():
                    _check(page, command, found, output)
    return names
