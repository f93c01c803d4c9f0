"""Data sets for this package's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.stream import MDSWriter

COLUMNS = {"id": "int", "text": "str", "tokens": "ndarray:uint16:8"}


def make_sample(number: int) -> dict[str, Any]:
    """Sample `number`: three columns that all follow from it."""
    return {"id": number, "text": "x" * (number % 50), "tokens": np.full(8, number % 65536, np.uint16)}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """`write(count, name="data", **options)`: a data set of so many samples; returns its path."""

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
    """`sample(number)`: what `write` wrote as that sample."""
    return make_sample
