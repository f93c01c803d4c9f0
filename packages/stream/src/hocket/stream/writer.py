"""Writing a data set as MDS shards."""

from __future__ import annotations

import json
import re
from types import TracebackType
from typing import Any, Self

from hocket.native import _native
from hocket.stream.encodings import encode_sample, resolve_encoding
from hocket.stream.errors import ConfigError
from hocket.stream.output import INDEX_NAME, Output, Place

_SUFFIXES = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


class MDSWriter:
    """Write samples into MDS shards that mosaicml-streaming reads too.

    A shard is closed before the sample that would take it past `size_limit`. Nothing stands under a final
    name until it is whole, and `index.json` comes last: a writer that died leaves no data set that seems
    complete. Use it as a context manager; an exception inside leaves it unfinished.

    Args:
        columns: Encoding by column name; `hocket.stream.encodings` lists them.
        out: A local path, a URI such as `s3://bucket/prefix`, or both as `(local, remote)`.
        keep_local: Keep local files that were uploaded. A plain local path keeps them always.
        compression: None, or `zstd` with an optional level, such as `zstd:7`.
        hashes: Digests for the index, such as `["xxh3_64", "sha1"]`. Readers check the first they know.
        size_limit: Bytes of a raw shard, such as `1 << 26` or `"64mb"`; None for one shard, held in memory.
        exist_ok: Replace the data set that is there.

    Raises:
        ConfigError: An argument does not work.
        DatasetExistsError: There is a data set, and `exist_ok` is false.

    Example:
        >>> with MDSWriter(columns={"tokens": "ndarray:uint16:1024"}, out="data/train") as writer:
        ...     writer.write({"tokens": tokens})
    """

    def __init__(
        self,
        *,
        columns: dict[str, str],
        out: Place,
        keep_local: bool = False,
        compression: str | None = None,
        hashes: list[str] | None = None,
        size_limit: int | str | None = 1 << 26,
        exist_ok: bool = False,
    ) -> None:
        if not columns:
            raise ConfigError("`columns` is empty: expected encodings by name, such as `{'text': 'str'}`")
        names = sorted(columns)
        self._columns = [(name, resolve_encoding(columns[name])) for name in names]
        self._compression = compression
        self._zstd_level = _parse_compression(compression)
        self._hashes = sorted(set(hashes or []))
        if len(self._hashes) != len(hashes or []):
            raise ConfigError(f"`hashes` is {hashes!r}: expected each name once")
        for name in self._hashes:
            if name not in _native.hash_names():
                raise ConfigError(f"hash `{name}` is not supported: expected one of {_native.hash_names()}")
        # Everything of the index that the shards themselves repeat, in the reference's own key order.
        self._config: dict[str, Any] = {
            "column_encodings": [columns[name] for name in names],
            "column_names": names,
            "column_sizes": [encoding.width for _, encoding in self._columns],
            "compression": compression,
            "format": "mds",
            "hashes": self._hashes,
            "size_limit": _parse_size_limit(size_limit),
            "version": 2,
        }
        self._header = json.dumps(self._config, sort_keys=True).encode()
        self._samples: list[bytes] = []
        self._size = self._empty_size
        self._shards: list[dict[str, Any]] = []
        self._is_finished = False
        self._output = Output(out, keep_local=keep_local, exist_ok=exist_ok)

    @property
    def _empty_size(self) -> int:
        """Bytes of a shard without samples."""
        return 8 + len(self._header)

    def write(self, sample: dict[str, Any]) -> None:
        """Add a sample. Values are encoded at once; keys that are no columns are left out.

        Raises:
            SampleError: A column is missing, or a value is not of its column's type.
            ConfigError: The writer is finished.
        """
        if self._is_finished:
            raise ConfigError("the writer is finished: start another one to write more")
        encoded = encode_sample(self._columns, sample)
        limit = self._config["size_limit"]
        # Also when the shard is still empty: the reference then writes an empty shard, and names agree.
        if limit is not None and self._size + len(encoded) + 4 > limit:
            self._flush()
        self._samples.append(encoded)
        self._size += len(encoded) + 4

    def finish(self) -> None:
        """Write the last shard, then the index. Twice is once.

        Raises:
            StreamIOError: The disk refuses.
            StoreError: The store does.
        """
        if self._is_finished:
            return
        if self._samples:
            self._flush()
        index = {"shards": self._shards, "version": 2}
        _native.write_whole(self._output.folder / INDEX_NAME, json.dumps(index, sort_keys=True).encode())
        self._output.publish(INDEX_NAME)
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self._close()

    def _flush(self) -> None:
        name = f"shard.{len(self._shards):05d}.mds"
        raw, packed = _native.seal_shard(
            self._output.folder,
            name,
            self._header,
            self._samples,
            zstd_level=self._zstd_level,
            hashes=self._hashes,
        )
        self._output.publish((packed or raw)[0])
        described = {"samples": len(self._samples), "raw_data": _describe(raw)}
        self._shards.append(self._config | described | {"zip_data": packed and _describe(packed)})
        self._samples = []
        self._size = self._empty_size

    def _close(self) -> None:
        self._is_finished = True
        self._samples = []
        self._output.close()


def _describe(file: tuple[str, int, dict[str, str]]) -> dict[str, Any]:
    name, size, hashes = file
    return {"basename": name, "bytes": size, "hashes": hashes}


def _parse_compression(compression: str | None) -> int | None:
    if compression is None:
        return None
    name, _, level = compression.partition(":")
    if name != "zstd" or not re.fullmatch(r"|[1-9]|1\d|2[0-2]", level) or compression.endswith(":"):
        raise ConfigError(f"`compression` is `{compression}`: expected None, `zstd` or `zstd:1` to `zstd:22`")
    return int(level) if level else 3


def _parse_size_limit(size_limit: int | str | None) -> int | None:
    if size_limit is None:
        return None
    limit = size_limit
    if isinstance(limit, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?b?)", limit.strip().lower())
        if match is None or match[2] not in _SUFFIXES:
            raise ConfigError(f"`size_limit` is `{size_limit}`: expected bytes, such as 67108864 or `64mb`")
        limit = int(float(match[1]) * _SUFFIXES[match[2]])
    if not 0 < limit < 1 << 32:
        raise ConfigError(f"`size_limit` is {size_limit!r}: expected more than 0 and less than 2^32 bytes")
    return limit
