"""Samples by number, outside of any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.stream.encodings import Column
from hocket.stream.engine import Engine, RankBatch

#: What a data set can be asked for: a number, or several.
Numbers = int | slice | list[int] | NDArray[np.integer[Any]]


def find_samples(engine: Engine, at: Numbers) -> list[dict[str, Any]]:
    """Return samples by number in storage order, the streams one after the other.

    Negative numbers count from the end. Of a raw shard that is not here the ranges of samples alone are read,
    near ones together, and not kept, unless much of it is asked for, or often: then it is fetched whole.

    Raises:
        IndexError: There is no such sample.
        TypeError: It is no integer, or no list of them.
        ShardNotFoundError: And the others of `StreamingDataset.read_batches`.
    """
    size = sum(engine.sizes)
    numbers = range(size)[at] if isinstance(at, slice) else _integers(at)
    for number in numbers:
        if not -size <= number < size:
            raise IndexError(f"sample {number}: expected a number from {-size} to {size - 1}")
    if not numbers:
        return []
    ids = [number % size for number in numbers]
    return _split(engine, engine.look_up(ids), len(ids))


def _integers(at: object) -> list[int]:
    try:
        found = np.atleast_1d(np.asarray(at))
    except ValueError:  # lists of differing lengths
        found = np.empty(0, object)
    is_empty_list = isinstance(at, Sequence) and len(at) == 0
    if found.ndim > 1 or not (found.dtype.kind in "iu" or is_empty_list):
        raise TypeError(
            f"samples {at!r:.100}: expected an integer, a slice, or a list or array of integers; of a mask "
            "`np.flatnonzero(mask)` gives those"
        )
    numbers: list[int] = found.tolist()
    return numbers


def split_batch(engine: Engine, batch: RankBatch) -> list[dict[str, Any]]:
    """Return a batch's samples, each a value by column; one that does not count among them."""
    return _split(engine, batch.columns, max(batch.local, 1))


def _split(engine: Engine, columns: dict[str, Column], count: int) -> list[dict[str, Any]]:
    items = [(name, engine.encodings[name].item, column) for name, column in columns.items()]
    return [{name: item(column, place) for name, item, column in items} for place in range(count)]
