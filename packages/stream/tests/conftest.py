"""Fixtures that write data sets and run the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.stream import MDSWriter
from hocket.stream.cli.app import app

COLUMNS = {"id": "int", "text": "str", "tokens": "ndarray:uint16:8"}


def make_sample(number: int) -> dict[str, Any]:
    """Return sample `number`, whose three columns are derived from it."""
    return {"id": number, "text": "x" * (number % 50), "tokens": np.full(8, number % 65536, np.uint16)}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Return `write(count, name="data", **options)`, which writes `count` samples and returns the path."""

    def write(count: int, name: str = "data", **options: Any) -> str:
        out = str(tmp_path / name)
        settings = {"size_limit": 2000, "hashes": ["xxh3_64"]} | options
        with MDSWriter(columns=COLUMNS, out=settings.pop("out", out), **settings) as writer:
            for number in range(count):
                writer.write(make_sample(number))
        return out

    return write


@pytest.fixture
def sample() -> Callable[[int], dict[str, Any]]:
    """Return `sample(number)`, which returns the sample as `write` wrote it."""
    return make_sample


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, str, str]]:
    """Return `call(*args)`, which runs the command in this process: its exit code, stdout and stderr."""

    def call(*args: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            app([str(arg) for arg in args])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return call
