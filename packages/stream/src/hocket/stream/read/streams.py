"""`Stream`: one of several data sets that a run mixes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import numpy as np

from hocket.stream.errors import ConfigError
from hocket.stream.read.hub.pin import pin_source
from hocket.stream.read.location import DatasetLocation, resolve_location
from hocket.stream.read.parquet.files import is_split
from hocket.stream.read.stream_source import StreamSource
from hocket.stream.settings.file_format import FileFormat
from hocket.stream.settings.reading import SourceSettings
from hocket.stream.settings.row_filter import Filters
from hocket.stream.settings.validation import seconds, whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """One of several data sets, and its share of an epoch.

    Give at most one of `proportion`, `repeat` and `choose`; without them, an epoch has each sample once.
    Other fields that are None take the value of the `StreamingDataset`.

    Raises:
        ConfigError: There are two kinds of weight, or a weight is negative or not a number.

    Example:
        >>> web = Stream(remote="s3://bucket/web", proportion=3)
        >>> code = Stream(remote="s3://bucket/code", proportion=1)
        >>> dataset = StreamingDataset(streams=[web, code], batch_size=32, epoch_size="10M", shuffle=True)
    """

    remote: str | os.PathLike[str] | None = None
    """URI or path of the data set's folder."""

    local: str | os.PathLike[str] | None = None
    """Cache folder; without `remote`, the data set itself."""

    split: str | None = None
    """Subfolder of both; or a split by the names of Parquet files, such as `data/train-00000.parquet`; or one
    of a data set on a hub."""

    config: str | None = None
    """Name of the configuration of a data set on a hub (`hf://datasets/owner/name`)."""

    name: str | None = None
    """Name of the stream in `weights`; by default the last part of `remote`, or else of `local`."""

    proportion: float | None = None
    """Share of the epoch, relative to the other streams."""

    repeat: float | None = None
    """Number of times that an epoch has each sample; 2.5 means all twice and half of them once more."""

    choose: int | None = None
    """Number of samples in an epoch."""

    download_retry: int | None = None
    """Number of times a shard is fetched before wrong bytes raise an error."""

    download_timeout: float | None = None
    """Seconds for all attempts of one request together, plus one second per MiB."""

    validate_hash: str | None = None
    """Name of the digest to check."""

    keep_zip: bool | None = None
    """Whether to keep downloaded compressed shards beside the raw ones."""

    keep_shards: bool | None = None
    """Whether to keep downloaded shards in the cache folder."""

    format: str | None = None
    """`mds` for data with an `index.json`, or `parquet`; by default that of the folder."""

    columns: Sequence[str] | None = None
    """Names of the columns to read from Parquet files."""

    encodings: Mapping[str, str] | None = None
    """Encodings of columns of Parquet files, instead of the usual ones."""

    filters: Filters | None = None
    """The rows of Parquet files to read, such as `[("lang", "==", "en"), ("length", "<", 512)]`."""

    schema: str | None = None
    """Policy for Parquet files whose columns differ: `equal` refuses them, `union`, or `permissive`."""

    def __post_init__(self) -> None:
        weights: dict[str, Any] = {
            "proportion": self.proportion,
            "repeat": self.repeat,
            "choose": self.choose,
        }
        given = {name: value for name, value in weights.items() if value is not None}
        if len(given) > 1:
            raise ConfigError(f"a stream has {given}: expected at most one kind of weight")
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
                raise ConfigError(
                    f"`{name}` is {value!r}: expected a number; weights that change during the run are not "
                    "supported"
                )
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"`{name}` is {value!r}: expected a number from 0")
        if self.choose is not None and self.choose != int(self.choose):
            raise ConfigError(f"`choose` is {self.choose!r}: expected a whole number of samples")
        if self.download_retry is not None:
            whole("download_retry", self.download_retry, least=1)
        if self.download_timeout is not None:
            seconds("download_timeout", self.download_timeout)


def name_streams(streams: Sequence[Stream]) -> list[str]:
    """Return the names of streams, by which `weights` refers to them."""

    def named(stream: Stream) -> str:
        place = os.fspath(stream.remote or stream.local or "")
        return os.path.basename(f"{place}/{stream.split or ''}".rstrip("/"))

    return [named(stream) if stream.name is None else stream.name for stream in streams]


def choose_streams(
    streams: Sequence[Stream] | None,
    remote: str | os.PathLike[str] | None,
    local: str | os.PathLike[str] | None,
    split: str | None,
    *,
    config: str | None = None,
    format: str | None = None,  # noqa: A002 - the usual name
    columns: Sequence[str] | None = None,
    encodings: Mapping[str, str] | None = None,
    filters: Filters | None = None,
    schema: str | None = None,
) -> Sequence[Stream]:
    """Return the given streams, or the one stream that the other arguments describe.

    Raises:
        ConfigError: Both are given.
    """
    given: dict[str, Any] = {"remote": remote, "local": local, "split": split}
    given |= {"config": config, "format": format, "columns": columns, "encodings": encodings}
    given |= {"filters": filters, "schema": schema}
    is_given = any(value is not None for value in given.values())
    # Configurations of mosaicml-streaming's clients have an empty list beside `remote` and `local`.
    if streams is None or (isinstance(streams, Sequence) and not streams and is_given):
        return [Stream(**given)]
    if any(value is not None for value in given.values()):
        raise ConfigError(
            f"`streams` is given beside {[name for name, value in given.items() if value is not None]}: "
            "expected one of the two; pass these to each `Stream`"
        )
    if not isinstance(streams, Sequence):
        raise ConfigError(f"`streams` is {streams!r:.100}: expected a list of `hocket.stream.Stream` objects")
    return streams


def resolve_sources(streams: Sequence[Stream], defaults: SourceSettings) -> list[StreamSource]:
    """Return the location and the settings of each stream.

    Raises:
        ConfigError: There is no stream, a location is not valid, or two streams with different data have the
            same cache folder.
    """
    if not streams:
        raise ConfigError("`streams` is empty: expected at least one `Stream`")
    sources = [_resolve(stream, defaults) for stream in streams]
    locations: dict[object, DatasetLocation] = {}
    for source in sources:
        location = source.location
        first = locations.setdefault(location.local, location)
        if first != location:
            raise ConfigError(
                f"`{first.origin}` and `{location.origin}` are both cached in `{location.local}`: expected a "
                "folder for each; give every stream its own `local`"
            )
    return sources


def _resolve(stream: Stream, defaults: SourceSettings) -> StreamSource:
    if not isinstance(stream, Stream):
        raise ConfigError(f"`streams` holds {stream!r:.100}: expected `hocket.stream.Stream` objects")
    overrides: dict[str, Any] = {
        "download_retry": stream.download_retry,
        "download_timeout": stream.download_timeout,
        "validate_hash": stream.validate_hash,
        "keep_zip": stream.keep_zip,
        "keep_shards": stream.keep_shards,
    }
    settings = replace(defaults, **{name: value for name, value in overrides.items() if value is not None})
    place = None if stream.remote is None else os.fspath(stream.remote)
    hub = pin_source(place, config=stream.config, split=stream.split, deadline_s=settings.download_timeout)
    remote = stream.remote if hub is None else hub.uri
    location, whole = resolve_location(remote, stream.local, split=stream.split), None
    if stream.config is not None:
        location = replace(location, local=location.local / f"config-{quote(stream.config, safe='')}")
    # Other names are those of folders only, so that a misspelt one does not list all that is beside it.
    if stream.split is not None and (hub is not None or is_split(stream.split)):
        whole = resolve_location(remote, stream.local, split=None)
        if whole.remote is not None:
            whole = replace(whole, local=location.local)  # each split has its own cache folder
    return StreamSource(
        location=location,
        split=stream.split,
        whole=whole,
        format=FileFormat.parse(
            stream.format, stream.columns, stream.encodings, stream.filters, stream.schema
        ),
        settings=settings,
        hub=hub,
    )
