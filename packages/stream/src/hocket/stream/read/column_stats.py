"""Statistics of the sizes of a data set's values, by column."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.stream.encodings import resolve_encoding
from hocket.stream.encodings.arrays import SCALARS
from hocket.stream.errors import ConfigError
from hocket.stream.read.columns import RawColumn
from hocket.stream.read.dataset_index import DatasetIndex, IndexEntry

_NUM_BINS = 33


@dataclass(kw_only=True, slots=True)
class ColumnSizes:
    """Statistics of one column."""

    name: str
    encoding: str
    num_values: int = 0

    num_bytes: int = 0
    """Uncompressed bytes of all values."""

    least_bytes: int = 0
    most_bytes: int = 0

    bins: list[int] = field(default_factory=lambda: [0] * _NUM_BINS)
    """Histogram of sizes in bytes: bin 0 counts empty values, bin `b` those from `2^(b-1)` to below `2^b`."""

    least: float | None = None
    """Smallest finite number, if the column has numbers."""

    most: float | None = None

    def add(self, other: ColumnSizes) -> None:
        """Add the statistics of another shard for the same column."""
        if not other.num_values:
            return
        smaller = min(self.least_bytes, other.least_bytes)
        self.least_bytes = smaller if self.num_values else other.least_bytes
        self.most_bytes = max(self.most_bytes, other.most_bytes)
        self.num_values += other.num_values
        self.num_bytes += other.num_bytes
        self.bins = [a + b for a, b in zip(self.bins, other.bins, strict=True)]
        self.least = min((n for n in (self.least, other.least) if n is not None), default=None)
        self.most = max((n for n in (self.most, other.most) if n is not None), default=None)


def measure(
    uri: str | os.PathLike[str],
    *,
    split: str | None = None,
    config: str | None = None,
    num_shards: int | None = None,
    on_shard: Callable[[IndexEntry], None] | None = None,
) -> tuple[list[ColumnSizes], list[IndexEntry]]:
    """Return statistics of each column, and the shards that were read.

    Only numbers are decoded. A column has several entries if shards differ in its encoding.

    Args:
        uri: Path or URI of the data set's folder.
        split: Subfolder of it; or a split by the names of Parquet files, as in `StreamingDataset`.
        config: Name of the configuration of a data set on a hub.
        num_shards: Number of shards to read, evenly spaced; by default all.
        on_shard: Called after each shard.

    Raises:
        ConfigError: `num_shards` is below 1, or the data set uses an unsupported feature.
        IndexNotFoundError: There is no index.
        IndexCorruptError: The index is not valid.
        ShardNotFoundError: A shard does not exist.
        ShardCorruptError: A shard does not match the index.
        StoreError: The object store failed.
    """
    if num_shards is not None and num_shards < 1:
        raise ConfigError(f"`num_shards` is {num_shards}: expected at least 1")
    dataset_index = DatasetIndex(uri, split=split, config=config)
    total = len(dataset_index.shards)
    count = total if num_shards is None else min(num_shards, total)
    selected = [dataset_index.shards[i * total // count] for i in range(count)]
    totals: dict[tuple[str, str], ColumnSizes] = {}
    for shard, columns in zip(
        selected,
        dataset_index.each(lambda shard: _measure_shard(dataset_index, shard), selected),
        strict=True,
    ):
        for column in columns:
            key = (column.name, column.encoding)
            totals.setdefault(key, ColumnSizes(name=column.name, encoding=column.encoding)).add(column)
        if on_shard is not None:
            on_shard(shard)
    return list(totals.values()), selected


def _measure_shard(dataset_index: DatasetIndex, shard: IndexEntry) -> list[ColumnSizes]:
    with dataset_index.open(shard) as opened:
        sums = [ColumnSizes(name=name, encoding=kind) for name, kind, _ in opened.columns]
        for samples, columns in opened.read():
            for total, raw in zip(sums, columns, strict=True):
                total.add(_measure_column(total.name, total.encoding, raw, len(samples)))
    return sums


def _measure_column(name: str, encoding: str, raw: RawColumn, count: int) -> ColumnSizes:
    data, offsets, _ = raw
    if offsets is None:
        lengths: NDArray[Any] = np.full(count, data.nbytes // count, np.uint64)
    else:
        lengths = np.diff(np.frombuffer(offsets, np.uint64))
    # The exponent of a float is the number's bit length; sizes are below 2^32, which doubles hold exactly.
    bits = np.frexp(lengths.astype(np.float64))[1]
    sizes = ColumnSizes(
        name=name,
        encoding=encoding,
        num_values=count,
        num_bytes=int(lengths.sum()),
        least_bytes=int(lengths.min()),
        most_bytes=int(lengths.max()),
        bins=np.bincount(bits, minlength=_NUM_BINS).tolist(),
    )
    if encoding == "int" or encoding in SCALARS:
        numbers = np.asarray(resolve_encoding(encoding).decode(data, None))
        finite = numbers[np.isfinite(numbers)]
        if finite.size:
            sizes.least, sizes.most = finite.min().item(), finite.max().item()
    return sizes
