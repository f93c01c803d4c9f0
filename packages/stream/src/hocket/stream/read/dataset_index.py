"""The index of a data set, and access to its shards one by one, for the command's tools."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hocket.native import Store, _native
from hocket.native.errors import StoreNotFoundError
from hocket.stream.errors import ConfigError, IndexNotFoundError, ShardCorruptError
from hocket.stream.read.columns import ColumnSet, RawColumn
from hocket.stream.read.hub.layout import HubLayout
from hocket.stream.read.hub.pin import pin_source
from hocket.stream.read.location import DatasetLocation
from hocket.stream.read.parquet.files import has_parquet, is_split
from hocket.stream.read.parquet.index import make_index
from hocket.stream.settings.file_format import FileFormat
from hocket.stream.settings.places import check_path, find_folder
from hocket.stream.write.output import FILE_KEYS, INDEX_NAME

_DEADLINE_S = 120.0
_BATCH_BYTES = 16 << 20
_SHARDS_AT_ONCE = 4
# Bounds a list whose length comes from the index, which may be wrong until the shard has been opened.
_NUMBERS_AT_ONCE = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """An entry of the index."""

    number: int
    """Position in the index."""

    entry: dict[str, Any]
    """The entry as JSON values."""

    @property
    def name(self) -> str:
        """File name of the raw data, with the folder below a merged index; or a row group of a file."""
        if (group := self.entry.get("row_group")) is not None:
            return f"{group['file']}, row group {group['row_group']}"
        name: str = self.entry["raw_data"]["basename"]
        return name

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        count: int = self.entry["samples"]
        return count

    @property
    def raw_bytes(self) -> int:
        """Bytes of its files when decompressed."""
        return sum(file["bytes"] for file in self._files("raw_data", "raw_meta"))

    @property
    def stored_bytes(self) -> int:
        """Bytes of its files as they are stored; of a row group, those of its columns."""
        if (group := self.entry.get("row_group")) is not None:
            return sum(length for _, length in group["ranges"])
        return sum(file["bytes"] for file in self.stored_files)

    @property
    def stored_files(self) -> list[dict[str, Any]]:
        """Entries of the stored files: the compressed ones, if there are any."""
        return self._files("zip_data", "zip_meta") or self._files("raw_data", "raw_meta")

    @property
    def hashes(self) -> list[str]:
        """Names of the digests of the stored data."""
        return sorted(self.stored_files[0].get("hashes") or {})

    def _files(self, *keys: str) -> list[dict[str, Any]]:
        return [file for key in keys if (file := self.entry.get(key))]


def resolve_uri(uri: str | os.PathLike[str]) -> str:
    """Return the name of a data set in messages: an absolute path, or the URI without a trailing slash."""
    folder = find_folder(uri)
    return os.fspath(uri).rstrip("/") if folder is None else check_path(str(folder.absolute()))


class DatasetIndex:
    """The index of a data set, and its shards. Read-only, without a cache.

    A folder of Parquet files has no index; its row groups are the shards. A data set on a hub is read at the
    commit that its revision is now.

    Args:
        uri: Path or URI of the data set's folder.
        split: Subfolder of it; or a split by the names of Parquet files, as in `StreamingDataset`.
        config: Name of the configuration of a data set on a hub.

    Raises:
        IndexNotFoundError: There are neither an index nor Parquet files.
        IndexCorruptError: The index is not valid.
        ConfigError: The data set uses an unsupported feature.
        StoreError: The object store failed.
    """

    notice: str | None = None
    """What to tell the user about the sizes of row groups of Parquet."""

    split_by_name: str | None = None
    """The split, if it is one by the names of the Parquet files at `uri`; None if `uri` has one only."""

    def __init__(
        self, uri: str | os.PathLike[str], *, split: str | None = None, config: str | None = None
    ) -> None:
        whole = resolve_uri(uri)
        hub = pin_source(whole, config=config, split=split, deadline_s=_DEADLINE_S)
        whole = whole if hub is None else hub.uri
        self.uri = whole if split is None else resolve_uri(f"{whole}/{split}")
        self.store = Store(self.uri)
        self.origin = f"{self.uri}/{INDEX_NAME}"
        try:
            data = self.store.get(INDEX_NAME)
        except StoreNotFoundError:
            data = self._of_parquet(whole, split, None if hub is None else hub.layout)
        else:
            if hub is not None:
                hub.refuse_config(self.origin)
        self.index = _native.ShardIndex.parse(data, self.origin)
        self.shards = [IndexEntry(number, entry) for number, entry in enumerate(json.loads(data)["shards"])]

    def _of_parquet(self, whole: str, split: str | None, layout: HubLayout | None) -> bytes:
        """Return the index of the Parquet files in the folder, whose footers are read and not kept.

        Args:
            whole: Location of all splits.
            split: The split, whose folder is `uri`; if that has no files, it is one by their names.
            layout: The choice of the files on a hub.
        """
        place = _location(self.uri)
        is_found = layout is None and has_parquet(place, deadline_s=_DEADLINE_S)
        if layout is not None:
            self.uri, self.store, self.split_by_name = whole, Store(whole), split
            place, is_found = _location(whole), True
        elif not is_found and split is not None and is_split(split):
            place = _location(whole)
            if is_found := has_parquet(place, deadline_s=_DEADLINE_S):
                self.uri, self.store, self.split_by_name = whole, Store(whole), split
        if not is_found:
            raise IndexNotFoundError(
                f"there is no index at `{self.uri}`: expected a data set's folder, with its `{INDEX_NAME}`, "
                "or one of Parquet files"
            )
        with contextlib.ExitStack() as stack:
            if place.remote is not None:
                kept = stack.enter_context(temporary_folder(f"the footers of `{self.uri}`"))
                place = DatasetLocation(local=Path(kept), remote=self.uri)
            index = make_index(
                place,
                chosen=FileFormat(),
                deadline_s=_DEADLINE_S,
                split=self.split_by_name,
                layout=layout,
            )
        self.origin, self.notice = self.uri, index.notice
        return index.document

    @property
    def raw_bytes(self) -> int:
        """Bytes of all shards when decompressed."""
        return sum(shard.raw_bytes for shard in self.shards)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all shards as they are stored."""
        return sum(shard.stored_bytes for shard in self.shards)

    @contextlib.contextmanager
    def open(self, shard: IndexEntry) -> Iterator[OpenShard]:
        """Open a shard and check its size and digest.

        An uncompressed shard of a local folder is read in place. Any other is fetched into a temporary
        folder, which is removed at the end.

        Raises:
            ShardNotFoundError: The shard does not exist.
            ShardCorruptError: The shard does not match the index.
            ConfigError: The shard needs a temporary folder, and none can be created.
        """
        entry = self._without_missing_zip(shard.entry)
        document = json.dumps({"version": 2, "shards": [entry]}).encode()
        index = _native.ShardIndex.parse(document, self.origin)
        local = find_folder(self.uri)
        if local is not None and not entry.get("zip_data") and not entry.get("zip_meta"):
            yield OpenShard(shard, index, _cache(index, local, None), self.origin)
            return
        with temporary_folder(f"shard `{shard.name}` of `{self.uri}`") as folder:
            try:
                yield OpenShard(shard, index, _cache(index, folder, self.uri), self.origin)
            except ShardCorruptError as error:
                # The temporary folder is gone when the message is read.
                raise ShardCorruptError(str(error).replace(folder, self.uri)) from None

    def _without_missing_zip(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return the entry without compressed files if a local reader has decompressed and removed them."""
        folder = find_folder(self.uri)
        if entry.get("zip_data") and folder is not None:
            names = {key: entry[key]["basename"] for key in FILE_KEYS if entry.get(key)}
            existing = {key for key, name in names.items() if (folder / name).exists()}
            if not existing & {"zip_data", "zip_meta"} and "raw_data" in existing:
                return entry | {"compression": None, "zip_data": None, "zip_meta": None}
        return entry

    def each(
        self, work: Callable[[IndexEntry], T], shards: Sequence[IndexEntry] | None = None
    ) -> Iterator[T]:
        """Yield the result of `work` for each shard, in order; a few threads run concurrently."""
        pool = ThreadPoolExecutor(_SHARDS_AT_ONCE, thread_name_prefix="hocket-shard")
        try:
            yield from pool.map(work, self.shards if shards is None else shards)
        finally:
            pool.shutdown(cancel_futures=True)


def _location(uri: str) -> DatasetLocation:
    """Return the location of data without a cache."""
    folder = find_folder(uri)
    return DatasetLocation(local=folder or Path(), remote=None if folder is not None else uri)


def temporary_folder(data: str) -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder to fetch `data` into, which the message names if that fails.

    Raises:
        ConfigError: No temporary folder can be created.
    """
    try:
        return tempfile.TemporaryDirectory(prefix="hocket-stream-")
    except OSError as error:
        raise ConfigError(
            f"{data} has to be fetched into a temporary folder, and none can be created: {error}. Set "
            "`TMPDIR` to a folder that can be written to"
        ) from error


def _cache(
    index: _native.ShardIndex, local: str | os.PathLike[str], remote: str | None
) -> _native.ShardCache:
    return _native.ShardCache(
        index,
        local,
        remote,
        written_ms=0,
        deadline_s=_DEADLINE_S,
        keep_zip=False,
        keep_shards=True,
        download_retry=1,
        validate_hash=None,
        limit=None,
    )


class OpenShard:
    """The samples of a shard, as bytes of whole columns and as values."""

    def __init__(
        self, shard: IndexEntry, index: _native.ShardIndex, cache: _native.ShardCache, origin: str
    ) -> None:
        self.shard = shard
        self.columns = index.columns
        """Name, encoding and bytes per value (or None) of each column."""
        self._index = index
        self._cache = cache
        self._origin = origin

    def read(self, samples: range | None = None) -> Iterator[tuple[range, list[RawColumn]]]:
        """Yield sample numbers within the shard and their columns, about 16 MiB at a time.

        Raises:
            ShardNotFoundError: The shard does not exist.
            ShardCorruptError: The shard's size, digest, offsets or sample sizes are wrong.
            StoreError: The object store failed.
        """
        numbers = range(self.shard.num_samples) if samples is None else samples
        for begin in range(0, len(numbers), _NUMBERS_AT_ONCE):
            yield from self._read(numbers[begin : begin + _NUMBERS_AT_ONCE])

    def _read(self, numbers: range) -> Iterator[tuple[range, list[RawColumn]]]:
        count = self.shard.num_samples
        step = max(1, count * _BATCH_BYTES // max(self.shard.raw_bytes, 1))
        edges = np.array([*range(0, len(numbers), step), len(numbers)], np.uint64)
        mix = _native.StreamMix([self._index], [count])
        reader = _native.BatchReader(
            [self._cache],
            mix.listed_order(np.array(numbers, np.uint64).data, edges.data),
            None,
            rank=0,
            world_size=1,
            first=0,
            stride=1,
            prefetch_bytes=1,
            prefetch_batches=1,
            fetch_threads=1,
        )
        try:
            while (batch := reader.next()) is not None:
                number, local, _, columns = batch
                begin = number * step
                yield numbers[begin : begin + local], columns
        finally:
            reader.close()

    def decoder(self, *, loads_images: bool = False) -> ColumnSet:
        """Return a decoder of the columns. Pickled objects stay bytes, because decoding them runs code.

        Args:
            loads_images: Decode the pixels of images.

        Raises:
            ConfigError: An encoding is unknown.
            IndexCorruptError: The size of a column is not that of its encoding.
        """
        columns = [(name, "bytes" if kind == "pkl" else kind, width) for name, kind, width in self.columns]
        return ColumnSet(
            columns, (), origin=self._origin, allow_unsafe_types=False, loads_images=loads_images
        )
