"""`LocalDataset`: random access to a data set on local disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from hocket.stream import Stream
from hocket.stream.read.dataset_reader import DatasetReader
from hocket.stream.read.lookup import find_samples
from hocket.stream.read.streams import resolve_sources
from hocket.stream.settings.reading import ReadSettings, SourceSettings


class LocalDataset:
    """A local data set as a map-style torch data set, independent of ranks, order and cursor.

    Args:
        local: Folder of the data set.
        split: A folder within `local`.

    Raises:
        IndexNotFoundError: There is no data set.
    """

    def __init__(self, local: str | os.PathLike[str], split: str | None = None) -> None:
        sources = resolve_sources([Stream(local=local, split=split)], SourceSettings())
        self._reader = DatasetReader(sources, ReadSettings(), weigh=list)

    @property
    def size(self) -> int:
        """Number of samples."""
        return sum(self._reader.sizes)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.size

    @overload
    def __getitem__(self, at: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, at: slice | list[int] | NDArray[np.integer[Any]]) -> list[dict[str, Any]]: ...
    def __getitem__(self, at: Any) -> Any:
        """Return a sample, or a list of samples, by number.

        Raises:
            IndexError: A number is out of range.
        """
        found = find_samples(self._reader, at)
        return found[0] if isinstance(at, (int, np.integer)) else found

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        """Return several samples; called by torch's fetchers."""
        return find_samples(self._reader, numbers)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield all samples in storage order."""
        return (self[number] for number in range(len(self)))
