"""Shards as mosaicml-streaming's data sets describe them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hocket.stream.read.dataset_index import DatasetIndex


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """One shard of an index; native code reads shards, so the class has no methods that fetch or evict."""

    samples: int
    """Number of samples."""

    compression: str | None
    """Compression and level, such as `zstd:7`; None for a raw shard."""

    hashes: list[str]
    """Names of the digests in the index."""

    basename: str
    """File name of the raw data."""

    raw_bytes: int
    """Bytes of its files when decompressed."""

    stored_bytes: int
    """Bytes of its files as they are stored."""

    entry: dict[str, Any]
    """The entry of the index as JSON values."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.samples


def read_shards(uris: Iterable[str]) -> list[ShardInfo]:
    """Read the indexes of several data sets, and return their shards in order.

    Raises:
        IndexNotFoundError: There is no index.
        StoreError: The object store failed.
    """
    return [
        ShardInfo(
            samples=shard.num_samples,
            compression=shard.entry.get("compression"),
            hashes=shard.hashes,
            basename=shard.name,
            raw_bytes=shard.raw_bytes,
            stored_bytes=shard.stored_bytes,
            entry=shard.entry,
        )
        for uri in uris
        for shard in DatasetIndex(uri).shards
    ]
