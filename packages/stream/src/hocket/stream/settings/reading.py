"""The settings of fetching, prefetching and decoding. They do not change the order of samples."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.stream.errors import ConfigError
from hocket.stream.settings.defaults import (
    DOWNLOAD_RETRY,
    DOWNLOAD_TIMEOUT_S,
    FETCH_THREADS,
    PREFETCH_BATCHES,
    PREFETCH_BYTES,
)
from hocket.stream.settings.sizes import parse_bytes
from hocket.stream.settings.validation import seconds, switch, whole


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSettings:
    """Settings for fetching and checking the shards of one stream. They do not change what is read."""

    validate_hash: str | None = None
    """Name of the digest to check; None for the fastest one in the index."""

    keep_zip: bool = False
    """Whether to keep downloaded compressed shards beside the raw ones."""

    keep_shards: bool = True
    """Whether to keep downloaded shards in the cache folder, or only in memory while batches need them."""

    download_timeout: float = DOWNLOAD_TIMEOUT_S
    """Seconds for all attempts of one request together."""

    download_retry: int = DOWNLOAD_RETRY
    """Number of times a shard is fetched before wrong bytes raise an error."""

    def __post_init__(self) -> None:
        validated = {
            "keep_zip": switch("keep_zip", self.keep_zip),
            "keep_shards": switch("keep_shards", self.keep_shards),
            "download_timeout": seconds("download_timeout", self.download_timeout),
            "download_retry": whole("download_retry", self.download_retry, least=1),
        }
        for name, value in validated.items():
            object.__setattr__(self, name, value)
        if self.keep_zip and not self.keep_shards:
            raise ConfigError(
                "`keep_zip` is True and `keep_shards` False: leave `keep_zip` out to keep nothing"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSettings:
    """Settings for prefetching, the cache limit and decoding."""

    prefetch_bytes: int | str = PREFETCH_BYTES
    """Maximum size of shards fetched ahead of their first use, such as `256mb`."""

    prefetch_batches: int = PREFETCH_BATCHES
    """Maximum number of finished batches in the queue."""

    fetch_threads: int = FETCH_THREADS
    """Number of shards fetched concurrently."""

    prefetch_next_epoch: bool = True
    """Whether to fetch the next epoch's first shards at the end of an epoch."""

    cache_limit: int | str | None = None
    """Maximum size of the cache folders together, such as `100gb`; None for no limit."""

    limits_index: bool = True
    """Whether the index files count under `cache_limit`, too."""

    allow_unsafe_types: bool = False
    """Whether to accept `pkl` columns, which run code from the data when they are decoded."""

    on_bad_sample: str = "raise"
    """Policy for a sample that cannot be decoded: `raise` or `replace`."""

    def __post_init__(self) -> None:
        validated: dict[str, object] = {
            name: whole(name, getattr(self, name), least=1) for name in ("prefetch_batches", "fetch_threads")
        }
        validated |= {
            name: switch(name, getattr(self, name)) for name in ("prefetch_next_epoch", "allow_unsafe_types")
        }
        for name in ("prefetch_bytes", "cache_limit"):
            value = getattr(self, name)
            if value is not None:
                validated[name] = parse_bytes(name, value)
        for name, value in validated.items():
            object.__setattr__(self, name, value)
        if self.on_bad_sample not in ("raise", "replace"):
            reason = ", which would leave ranks with batches of different sizes"
            raise ConfigError(
                f"`on_bad_sample` is {self.on_bad_sample!r}{reason if self.on_bad_sample == 'skip' else ''}: "
                "expected 'raise' or 'replace'"
            )
