"""The parts that a run's data is mixed from."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hocket.stream.arguments import seconds, whole
from hocket.stream.engine import Source, SourceSettings
from hocket.stream.errors import ConfigError
from hocket.stream.location import Location, resolve_location


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """One data set of several, and its share of an epoch.

    At most one of `proportion`, `repeat` and `choose`; without any, each sample once. What is None is as the
    `StreamingDataset` has it.

    Raises:
        ConfigError: Two kinds of weight, a negative one, or one that is no number.

    Example:
        >>> web = Stream(remote="s3://bucket/web", proportion=3)
        >>> code = Stream(remote="s3://bucket/code", proportion=1)
        >>> dataset = StreamingDataset(streams=[web, code], batch_size=32, epoch_size="10M", shuffle=True)
    """

    remote: str | os.PathLike[str] | None = None
    """The data set's folder: a URI, or a path."""

    local: str | os.PathLike[str] | None = None
    """Its cache folder; or, without `remote`, the data set itself."""

    split: str | None = None
    """A folder within both."""

    proportion: float | None = None
    """Its share, relative to the other streams', of an epoch of stated size."""

    repeat: float | None = None
    """How often an epoch has each of its samples: 2.5 is all twice and half of them once more."""

    choose: int | None = None
    """How many samples an epoch has of it."""

    download_retry: int | None = None
    """Fetches of a shard before wrong bytes are final."""

    download_timeout: float | None = None
    """Seconds that all tries of one request may take together, plus one for each MiB."""

    validate_hash: str | None = None
    """The digest to check."""

    keep_zip: bool | None = None
    """Keep downloaded compressed shards beside the raw ones."""

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
                    f"`{name}` is {value!r}: expected a number; weights that change in the run come later"
                )
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"`{name}` is {value!r}: expected a number from 0")
        if self.choose is not None and self.choose != int(self.choose):
            raise ConfigError(f"`choose` is {self.choose!r}: expected a whole number of samples")
        if self.download_retry is not None:
            whole("download_retry", self.download_retry, least=1)
        if self.download_timeout is not None:
            seconds("download_timeout", self.download_timeout)


def choose_streams(
    streams: Sequence[Stream] | None,
    remote: str | os.PathLike[str] | None,
    local: str | os.PathLike[str] | None,
    split: str | None,
) -> Sequence[Stream]:
    """Return the streams, given as such or as the one that the other arguments describe.

    Raises:
        ConfigError: Both are given.
    """
    if streams is None:
        return [Stream(remote=remote, local=local, split=split)]
    given = {"remote": remote, "local": local, "split": split}
    if any(value is not None for value in given.values()):
        raise ConfigError(
            f"`streams` is given beside {[name for name, value in given.items() if value is not None]}: "
            "expected one way to say where the data is; give each `Stream` its own"
        )
    if not isinstance(streams, Sequence):
        raise ConfigError(f"`streams` is {streams!r:.100}: expected a list of `hocket.stream.Stream` objects")
    return streams


def resolve_sources(streams: Sequence[Stream], defaults: SourceSettings) -> list[Source]:
    """Return where each stream is read from, and how.

    Raises:
        ConfigError: There is no stream, a location does not work, or two streams would keep different data in
            one folder.
    """
    if not streams:
        raise ConfigError("`streams` is empty: expected at least one `Stream`")
    sources = [_resolve(stream, defaults) for stream in streams]
    kept: dict[object, Location] = {}
    for source in sources:
        location = source.location
        first = kept.setdefault(location.local, location)
        if first != location:
            raise ConfigError(
                f"`{first.origin}` and `{location.origin}` are both kept in `{location.local}`: expected a "
                "folder for each; give every stream its own `local`"
            )
    return sources


def _resolve(stream: Stream, defaults: SourceSettings) -> Source:
    if not isinstance(stream, Stream):
        raise ConfigError(f"`streams` holds {stream!r:.100}: expected `hocket.stream.Stream` objects")
    own: dict[str, Any] = {
        "download_retry": stream.download_retry,
        "download_timeout": stream.download_timeout,
        "validate_hash": stream.validate_hash,
        "keep_zip": stream.keep_zip,
    }
    return Source(
        location=resolve_location(stream.remote, stream.local, split=stream.split),
        settings=replace(defaults, **{name: value for name, value in own.items() if value is not None}),
    )
