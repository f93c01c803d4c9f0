"""Writers of data sets. Shards are stored concurrently, and the index is written last."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from hocket.native import _native
from hocket.stream.encodings import SampleEncoder, resolve_encoding
from hocket.stream.errors import ConfigError
from hocket.stream.settings.defaults import HASHES, SIZE_LIMIT
from hocket.stream.settings.sizes import parse_bytes
from hocket.stream.write.output import DatasetOutput, Place

if TYPE_CHECKING:
    from hocket.stream.write.progress import ShardProgress

_MAX_WORKERS = 4
_MAX_CAPACITY_BYTES = 1 << 28

_File: TypeAlias = tuple[str, int, dict[str, str]]
"""Base name, size and digests of a stored file."""


class Writer:
    """Base class of the writers of all formats. Use a writer as a context manager.

    A shard is closed before the sample that would exceed `size_limit`. Threads then compress, hash and
    store it while the next shard is filled. At most `max_workers` shards are being stored; `write` waits
    for a free thread, so memory holds at most `max_workers + 2` raw shards, and the compressed form of
    those being stored. Files get their final names when they are complete, and `index.json` is written
    last, so a writer that dies, or an exception in the `with` block, leaves no data set that looks
    complete. An error in storing a shard is raised by the next `write` or `finish`; the writer cannot be
    used after that.

    Args:
        columns: Type by column name.
        out: A local path, a URI such as `s3://bucket/prefix`, or both as `(local, remote)`.
        keep_local: If `out` is both, also write the local side. Otherwise shards go from memory to the store.
        compression: None, or `br`, `bz2`, `gz`, `snappy`, `zstd` with an optional level, such as `zstd:7`.
        hashes: Digests for the index, such as `["sha1", "xxh3_64"]`; None for none. With a digest, readers
            detect a shard with wrong bytes, and a shard of a later writing of the data set.
        size_limit: Maximum size of a raw shard, such as `1 << 26` or `"64mb"`; None for one shard, held in
            memory.
        progress_bar: Show shards and bytes on standard error.
        max_workers: Number of shards compressed and stored concurrently; 4 by default.
        retry: Number of retries of a request to the store; 10 by default.
        exist_ok: Replace an existing data set. Its index is deleted first, then the shards that the index
            lists in the data set's own folder. Nothing else is deleted.
        append: Add shards to an existing data set with the same columns; other settings may differ. The
            index is replaced atomically at the end. If two writers append at the same time, one fails and
            nothing is lost.

    Raises:
        ConfigError: An argument is not valid, or the data set to append to has other columns.
        DatasetExistsError: A data set exists, and neither `exist_ok` nor `append` is given.
        IndexNotFoundError: There is no data set to append to.
        StoreError: The object store failed.
        StreamIOError: The local folder cannot be created or written to.
    """

    _format = ""

    def __init__(
        self,
        *,
        columns: Mapping[str, str],
        out: Place,
        keep_local: bool = False,
        compression: str | None = None,
        hashes: Sequence[str] | None = HASHES,
        size_limit: int | str | None = SIZE_LIMIT,
        progress_bar: bool = False,
        max_workers: int | None = None,
        retry: int | None = None,
        exist_ok: bool = False,
        append: bool = False,
    ) -> None:
        if not columns:
            raise ConfigError("`columns` is empty: expected types by name, such as `{'text': 'str'}`")
        for name in columns:
            _check_column_name(name)
        if max_workers is not None and max_workers < 1:
            raise ConfigError(f"`max_workers` is {max_workers}: expected at least 1")
        if append and exist_ok:
            raise ConfigError(
                "`append` and `exist_ok` are both given: expected one of them; `append` adds to a data set, "
                "and `exist_ok` replaces it"
            )
        self._columns = dict(sorted(columns.items()))
        self._size_limit = _parse_size_limit(size_limit)
        self._config: dict[str, Any] = {
            "compression": compression,
            "format": self._format,
            "hashes": _check_hashes(hashes),
            "size_limit": self._size_limit,
            "version": 2,
            **self._describe_columns(),
        }
        self._header = json.dumps(self._config, sort_keys=True).encode()
        self._samples = self._make_buffer()
        self._size = self._empty_bytes()
        self._counts: list[int] = []
        self._old_shards: list[dict[str, Any]] = []
        self._first_number = 0
        self._output = DatasetOutput(out, keep_local=keep_local, retry=retry)
        self._output.check_writable()
        # Checks the names of hashes and compression, so it comes before any change at the output location.
        self._shards = _native.ShardWriter(
            local=self._output.folder,
            remote=self._output.store,
            compression=compression,
            hashes=self._config["hashes"],
            only_new=append,
            threads=max_workers or _MAX_WORKERS,
        )
        self._is_finished = False
        self._progress: ShardProgress | None = None
        try:
            self._open(exist_ok=exist_ok, append=append)
        except BaseException:
            self._close()
            raise
        if progress_bar:
            from hocket.stream.write.progress import ShardProgress

            self._progress = ShardProgress(self._output.uri)

    def __repr__(self) -> str:
        columns = ", ".join(self._columns)
        return f"<{type(self).__name__} to {self._output.uri!r}: {len(self._counts)} shards of {columns:.80}>"

    def _open(self, *, exist_ok: bool, append: bool) -> None:
        if not append:
            self._output.make_room(exist_ok=exist_ok)
            return
        self._old_shards, self._first_number = self._output.open_existing()
        for number, shard in enumerate(self._old_shards):
            columns = shard.get("columns") or dict(
                zip(shard["column_names"], shard["column_encodings"], strict=True)
            )
            if columns != self._columns:
                raise ConfigError(
                    f"shard {number} of `{self._output.uri}` has the columns {columns}: expected those of "
                    f"this writer, {self._columns}; write another data set and merge the two"
                )

    def _describe_columns(self) -> dict[str, Any]:
        """Check the columns and return their entry in the index."""
        raise NotImplementedError

    def _make_buffer(self) -> _native.SampleBuffer:
        """Return a buffer for the samples of a shard."""
        return _native.SampleBuffer([])

    def _empty_bytes(self) -> int:
        """Return the bytes of a shard without samples that count towards its limit."""
        return 0

    def _push(self, sample: Mapping[str, Any]) -> int:
        """Append an encoded sample to the shard; return the bytes that it adds towards the limit."""
        raise NotImplementedError

    def _head(self) -> bytes | None:
        """Return the bytes before a shard's samples, if offsets are stored in a separate file."""
        return None

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add a sample. Its values are encoded immediately; keys that are not columns are ignored.

        Raises:
            SampleError: A column is missing, or a value does not fit its column's type.
            ConfigError: The writer is finished, or the shard would have 4 GiB or more.
            StreamIOError: An earlier shard could not be written to disk.
            StoreError: An earlier shard could not be written to the store.
        """
        if self._is_finished:
            raise ConfigError("the writer is finished: create a new writer to write more")
        added = self._push(sample)
        # Also if the shard is empty: mosaicml-streaming then writes an empty shard, so file names agree.
        if self._size_limit is not None and self._size + added > self._size_limit:
            self._flush(keep=1)
        self._size += added

    def finish(self) -> None:
        """Write the last shard, wait for all shards, then write the index. A second call does nothing.

        Raises:
            As `write`; also `StoreChangedError` if another writer has appended since.
        """
        if self._is_finished:
            return
        try:
            if len(self._samples):
                self._flush()
            new_shards = [
                self._entry(count, files)
                for count, files in zip(self._counts, self._shards.finish(), strict=True)
            ]
            self._publish([*self._old_shards, *new_shards])
        finally:
            self._close()

    def _publish(self, shards: list[dict[str, Any]]) -> None:
        """Write the index over all shards, whose files are stored."""
        self._output.publish(shards)

    def _flush(self, *, keep: int = 0) -> None:
        """Submit all samples but the last `keep` as a shard."""
        name = f"shard.{self._first_number + len(self._counts):05d}.{self._format}"
        count = len(self._samples) - keep
        try:
            self._shards.submit(name, self._header, self._samples, keep=keep, header=self._head())
        except BaseException:
            self._close()
            raise
        self._counts.append(count)
        if self._progress is not None:
            self._progress.update(self._shards.num_written, len(self._counts), self._size)
        self._size = self._empty_bytes()

    def _entry(self, count: int, files: list[tuple[_File, _File | None]]) -> dict[str, Any]:
        entry = self._config | {"samples": count}
        for kind, (raw, packed) in zip(("data", "meta"), files, strict=False):
            entry[f"raw_{kind}"] = _describe(raw)
            entry[f"zip_{kind}"] = packed and _describe(packed)
        return entry

    def _close(self) -> None:
        self._is_finished = True
        self._samples = _native.SampleBuffer([])
        self._shards.close()
        if self._progress is not None:
            self._progress.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self._close()


class MDSWriter(Writer):
    """A writer of MDS shards, which mosaicml-streaming can read too.

    Arguments, errors and crash safety are those of `Writer`. `columns` are encodings by name;
    `hocket.stream.encodings` lists them. A value of type `bytes` is stored unchanged in a column of any
    encoding that can read it, such as the file of an image in a column of `jpeg`; other bytes raise.

    Example:
        >>> with MDSWriter(columns={"tokens": "ndarray:uint16:1024"}, out="data/train") as writer:
        ...     writer.write({"tokens": tokens})
    """

    _format = "mds"

    def _describe_columns(self) -> dict[str, Any]:
        # Writing `pkl` is safe; readers have to allow it.
        encodings = {
            name: resolve_encoding(kind, allow_unsafe_types=True) for name, kind in self._columns.items()
        }
        self._encoder = SampleEncoder(list(encodings.items()))
        return {
            "column_encodings": list(self._columns.values()),
            "column_names": list(self._columns),
            "column_sizes": [encoding.width for encoding in encodings.values()],
        }

    def _make_buffer(self) -> _native.SampleBuffer:
        columns = zip(self._columns, self._columns.values(), self._config["column_sizes"], strict=True)
        # Memory that is never written costs nothing; the bound is for limits that are never reached.
        return _native.SampleBuffer(
            list(columns), capacity_bytes=min(self._size_limit or 0, _MAX_CAPACITY_BYTES)
        )

    def _empty_bytes(self) -> int:
        return 8 + len(self._header)

    def _push(self, sample: Mapping[str, Any]) -> int:
        added = self._samples.push(sample)
        if added is None:
            added = self._samples.push_bytes(self._encoder.encode(sample))
        return added + 4


def _describe(file: _File) -> dict[str, Any]:
    name, size, hashes = file
    return {"basename": name, "bytes": size, "hashes": hashes}


def _check_column_name(name: Any) -> None:
    """Raise if a column's name is not text that an index can hold.

    Raises:
        ConfigError: It is not a string, or has a surrogate, as text of undecodable bytes has.
    """
    try:
        name.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise ConfigError(
            f"a name in `columns` is {name!r}: expected a string of Unicode characters; rename the column"
        ) from error


def _check_hashes(hashes: Sequence[str] | None) -> list[str]:
    if hashes is None:
        return []
    if isinstance(hashes, str):
        raise ConfigError(f"`hashes` is {hashes!r}: expected a list of names, such as `[{hashes!r}]`")
    names = sorted(set(hashes))
    if len(names) != len(hashes):
        raise ConfigError(f"`hashes` is {hashes!r}: expected each name once")
    return names


def _parse_size_limit(size_limit: int | str | None) -> int | None:
    if size_limit is None:
        return None
    limit = parse_bytes("size_limit", size_limit)
    if limit >= 1 << 32:
        raise ConfigError(f"`size_limit` must be less than 2^32 bytes, and is {size_limit!r}")
    return limit
