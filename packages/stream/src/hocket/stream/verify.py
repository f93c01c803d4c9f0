"""Verification of the shards of a data set against its index."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from hocket.native.errors import StoreNotFoundError
from hocket.stream.errors import ShardCorruptError, ShardNotFoundError
from hocket.stream.read.dataset_index import DatasetIndex, IndexEntry


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedShard:
    """The result for one shard."""

    number: int
    """Position in the index."""

    name: str
    """File name of the raw data."""

    num_bytes: int
    """Stored bytes according to the index."""

    problem: str | None
    """The problem: missing, wrong size, digest, offsets or value. None if the shard is intact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """The result for all shards of a data set."""

    uri: str
    shards: tuple[CheckedShard, ...]

    @property
    def bad(self) -> list[CheckedShard]:
        """The shards with a problem."""
        return [shard for shard in self.shards if shard.problem is not None]


def verify(
    uri: str | os.PathLike[str],
    *,
    split: str | None = None,
    config: str | None = None,
    on_shard: Callable[[CheckedShard], None] | None = None,
) -> VerifyReport:
    """Read and check every shard of a data set.

    Checks sizes, the fastest digest in the index, the table of offsets, and that every value can be decoded,
    including all pixels of images; pickled values are not decoded. Uncompressed shards of a local folder are
    read in place; others are fetched, four at a time, into a temporary folder and removed again. Nothing is
    written to the data set.

    Args:
        uri: Path or URI of the data set's folder.
        split: Subfolder of it; or a split by the names of Parquet files, as in `StreamingDataset`.
        config: Name of the configuration of a data set on a hub.
        on_shard: Called after each shard, in the order of the index.

    Raises:
        IndexNotFoundError: There is no index.
        IndexCorruptError: The index is not valid.
        ConfigError: A column's encoding is unknown, or needs a library that is not installed; or no temporary
            folder can be created for shards that need one.
        StoreError: The object store failed. A missing shard does not raise; it is a problem of that shard.
    """
    dataset_index = DatasetIndex(uri, split=split, config=config)
    checked = []
    for shard in dataset_index.each(lambda shard: _check(dataset_index, shard)):
        checked.append(shard)
        if on_shard is not None:
            on_shard(shard)
    return VerifyReport(uri=dataset_index.uri, shards=tuple(checked))


def _check(dataset_index: DatasetIndex, shard: IndexEntry) -> CheckedShard:
    try:
        problem = _sizes(dataset_index, shard) if shard.num_samples == 0 else _values(dataset_index, shard)
    except (ShardNotFoundError, ShardCorruptError) as error:
        problem = str(error)
    return CheckedShard(number=shard.number, name=shard.name, num_bytes=shard.stored_bytes, problem=problem)


def _values(dataset_index: DatasetIndex, shard: IndexEntry) -> str | None:
    with dataset_index.open(shard) as opened:
        decoder = opened.decoder(loads_images=True)
        for samples, columns in opened.read():
            try:
                decoder.decode(columns, len(samples))
            except ShardCorruptError as error:
                return f"in samples {samples[0]} to {samples[-1]}, {error}"
    return None


def _sizes(dataset_index: DatasetIndex, shard: IndexEntry) -> str | None:
    """Return the problem of an empty shard, whose files are checked by size only."""
    if (group := shard.entry.get("row_group")) is not None:
        files = [{"basename": group["file"], "bytes": group["file_bytes"]}]
    else:
        files = shard.stored_files
    for file in files:
        try:
            size = dataset_index.store.head(file["basename"]).size
        except StoreNotFoundError:
            return f"`{file['basename']}` does not exist"
        if size != file["bytes"]:
            return f"`{file['basename']}` has {size} bytes, expected {file['bytes']} bytes"
    return None
