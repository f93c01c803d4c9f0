"""Fixtures that write data sets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.stream import MDSWriter

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
