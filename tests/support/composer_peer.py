"""Runs scripts with Composer, in an environment of its own, to compare its results with Hocket's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

PEER = "mosaicml==0.32.1"


def ask(script: Path, cases: list[dict[str, Any]], folder: Path, *, more: Sequence[str] = ()) -> list[Any]:
    """Run `script cases.pt answers.pt` in Composer's environment and return the answers.

    Args:
        script: Reads a list of cases and writes a list of answers, both with `torch.save`.
        cases: Tensors, and nested containers of them.
        folder: The folder for both files.
        more: Further packages that the script needs.
    """
    torch.save(cases, folder / "cases.pt")
    run_peer(script, folder / "cases.pt", folder / "answers.pt", more=more)
    answers: list[Any] = torch.load(folder / "answers.pt", weights_only=False)
    return answers


def run_peer(script: Path, *arguments: Path, more: Sequence[str] = ()) -> None:
    """Run a script in Composer's environment, which `uv` makes.

    Args:
        script: A Python file.
        *arguments: Its arguments.
        more: Further packages that the script needs.
    """
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("`uv` was not found: it makes Composer's environment")
    python = ".".join(map(str, sys.version_info[:2]))
    packages = [argument for package in (PEER, *more) for argument in ("--with", package)]
    command = [uv, "run", "--isolated", "--no-project", "--python", python, *packages, "python", str(script)]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("UV_NO_SYNC", "VIRTUAL_ENV")
    }
    completed = subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
        env=environment,
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
