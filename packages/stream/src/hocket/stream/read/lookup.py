"""Random access to samples by number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.stream.encodings import Column
from hocket.stream.read.dataset_reader import DatasetReader, RankBatch

#: Accepted by `StreamingDataset.__getitem__`: one number, or several.
Numbers = int | slice | list[int] | NDArray[np.integer[Any]]


def find_samples(reader: DatasetReader, at: Numbers) -> list[dict[str, Any]]:
    """Return samples by number in storage order, one stream after the other.

    Negative numbers count from the end. From a raw shard that is not cached, only the byte ranges of the
    samples are read, nearby ones in one request, and they are not kept. The shard is fetched whole if many
    of its samples are requested, or if it is requested often.

    Raises:
        IndexError: A number is out of range.
        TypeError: `at` is not an integer, a slice, or a list or array of integers.
        ShardNotFoundError: As `StreamingDataset.read_batches`, with its other errors.
    """
    size = sum(reader.sizes)
    numbers = range(size)[at] if isinstance(at, slice) else _integers(at)
    for number in numbers:
        if not -size <= number < size:
            raise IndexError(f"sample {number}: expected a number from {-size} to {size - 1}")
    if not numbers:
        return []
    ids = [number % size for number in numbers]
    return _split(reader, reader.look_up(ids), len(ids))


def _integers(at: object) -> list[int]:
    try:
        array = np.atleast_1d(np.asarray(at))
    except ValueError:  # nested lists of different lengths
        array = np.empty(0, object)
    is_empty_list = isinstance(at, Sequence) and len(at) == 0
    if array.ndim > 1 or not (array.dtype.kind in "iu" or is_empty_list):
        raise TypeError(
            f"samples {at!r:.100}: expected an integer, a slice, or a list or array of integers; "
            "convert a mask with `np.flatnonzero(mask)`"
        )
    numbers: list[int] = array.tolist()
    return numbers


def split_batch(reader: DatasetReader, batch: RankBatch) -> list[dict[str, Any]]:
    """Return the samples of a batch, with those that do not count, as mappings from columns to values."""
    return _split(reader, batch.columns, max(batch.local, 1))


def _split(reader: DatasetReader, columns: dict[str, Column], count: int) -> list[dict[str, Any]]:
    items = [(name, reader.encodings[name].item, column) for name, column in columns.items()]
    return [{name: item(column, place) for name, item, column in items} for place in range(count)]
