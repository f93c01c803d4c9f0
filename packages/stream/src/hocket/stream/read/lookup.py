"""Random access to samples by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from hocket.stream.encodings import Column
from hocket.stream.errors import ConfigError
from hocket.stream.read.dataset_reader import DatasetReader, RankBatch

#: Accepted by `StreamingDataset.__getitem__`: one number, or several.
Numbers = int | slice | list[int] | NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class SamplePlace:
    """The place of a sample in its data set."""

    number: int
    """Number in storage order, one stream after the other."""
    origin: str
    """The data set: its URI or folder."""
    shard: str
    """File name of the shard's raw data."""
    row: int
    """Number of the sample in the shard."""


class SampleLookup:
    """The samples of a data set by number, as they are stored or as a subclass makes them.

    Independent of order, rank and cursor.
    """

    _reader: DatasetReader

    _is_known_to_torch: bool
    """Whether torch sees an `IterableDataset`."""

    _ready: tuple[int, dict[str, Any]] | None = None
    """The sample that is being made, and its number; None outside of `samples`."""

    @property
    def size(self) -> int:
        """Total number of samples in all streams."""
        return sum(self._reader.sizes)

    @overload
    def __getitem__(self, at: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, at: slice | list[int] | NDArray[np.integer[Any]]) -> list[dict[str, Any]]: ...
    def __getitem__(self, at: Numbers) -> dict[str, Any] | list[dict[str, Any]]:
        """Return a sample, or a list of samples, by number in storage order, one stream after the other.

        Negative numbers count from the end. Independent of order, rank and cursor.

        A subclass may override this method, to transform `super().__getitem__(number)`. Iteration and the
        loaders then call it for each sample that they have read.

        Raises:
            IndexError: A number is out of range.
            TypeError: `at` is not an integer, a slice, or a list or array of integers. A mask is not
                accepted.
            ShardNotFoundError: As `read_batches`, with its other errors.
        """
        if self._ready is not None and isinstance(at, (int, np.integer)) and at == self._ready[0]:
            return self._ready[1]
        found = find_samples(self._reader, at)
        return found[0] if isinstance(at, (int, np.integer)) else found

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        """Return several samples; called by torch's map-style fetchers.

        Raises:
            ConfigError: torch was imported after this data set was made, so it is not an `IterableDataset`.
        """
        if not self._is_known_to_torch:
            raise ConfigError(
                "this data set was made before torch was imported, so a DataLoader treats it as map-style "
                "and ignores ranks; import torch before making the data set"
            )
        return [self[number] for number in numbers] if self.makes_samples else self[numbers]

    def places(self, numbers: Sequence[int]) -> list[SamplePlace]:
        """Return the places of samples by number, as `sample_ids` numbers them; reads the index, and no data.

        Raises:
            IndexError: A number is out of range.
            IndexCorruptError: An index was replaced since it was opened.
        """
        return find_places(self._reader, numbers)

    @property
    def makes_samples(self) -> bool:
        """Whether a subclass overrides `__getitem__`, which then makes the samples."""
        return type(self).__getitem__ is not SampleLookup.__getitem__

    def _check_columns_are_wanted(self) -> None:
        if self.makes_samples:
            raise ConfigError(
                f"`batches()` yields stored columns, and `{type(self).__name__}` makes samples by a "
                "`__getitem__` of its own: iterate over the samples, or read them through "
                "`hocket.stream.StreamingDataLoader`; `read_batches` yields the stored columns"
            )

    def samples(self, batch: RankBatch) -> list[Any]:
        """Return the samples of a batch, with those that do not count.

        They are mappings from columns to values, or what a subclass's own `__getitem__` returns.
        """
        samples = self._split(batch)
        if batch.ids is None:
            return samples
        made = []
        try:
            for number, sample in zip(batch.ids, samples, strict=True):
                # `__getitem__` above returns this sample, which was read ahead.
                self._ready = (number, sample)
                made.append(self[number])
        finally:
            self._ready = None
        return made

    def _split(self, batch: RankBatch) -> list[dict[str, Any]]:
        return split_batch(self._reader, batch)


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


def find_places(reader: DatasetReader, numbers: Sequence[int]) -> list[SamplePlace]:
    """Return the places of samples by number; see `SampleLookup.places`.

    Raises:
        IndexError: A number is out of range.
        IndexCorruptError: An index was replaced since it was opened.
    """
    wanted = np.asarray(numbers, np.int64)
    size = sum(reader.sizes)
    for number in wanted[(wanted < 0) | (wanted >= size)][:1]:
        raise IndexError(f"sample {number}: expected a number from 0 to {size - 1}")
    places: dict[int, SamplePlace] = {}
    begin = 0
    for number, (source, num_samples) in enumerate(zip(reader.sources, reader.sizes, strict=True)):
        inside = wanted[(wanted >= begin) & (wanted < begin + num_samples)]
        if inside.size:
            shards = reader.shards_of(number)
            ends = np.cumsum([shard["samples"] for shard in shards]) + begin
            for one, at in zip(inside.tolist(), np.searchsorted(ends, inside, "right").tolist(), strict=True):
                row = one - int(ends[at]) + shards[at]["samples"]
                group = shards[at].get("row_group")
                name = shards[at]["raw_data"]["basename"]
                if group is not None:
                    name = f"{group['file']}, row group {group['row_group']}"
                places[one] = SamplePlace(one, source.location.origin, name, row)
        begin += num_samples
    return [places[int(one)] for one in wanted]


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
