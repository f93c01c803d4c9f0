"""`Stream` and the registry of its subclasses, with mosaicml-streaming's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hocket.stream import Stream as CoreStream
from hocket.stream.errors import ConfigError
from hocket.stream.read.location import resolve_location

#: Methods of mosaicml-streaming's class that fetch shards, which native code does here.
_NATIVE = (
    "_decompress_shard_part",
    "_download_file",
    "_prepare_shard_part",
    "get_index_size",
    "get_shards",
    "prepare_shard",
    "set_up_local",
)

Kind = TypeVar("Kind", bound=Callable[..., Any])


class Stream:
    """One of several data sets, and its share of an epoch; see `hocket.stream.Stream` for the arguments.

    Subclasses may add arguments and attributes. The data set that reads a stream fills in `local`,
    `proportion`, `repeat` and `choose`.

    Raises:
        ConfigError: There are two kinds of weight, or a weight is negative or not a number.
    """

    def __init__(
        self,
        *,
        remote: str | None = None,
        local: str | None = None,
        split: str | None = None,
        proportion: float | None = None,
        repeat: float | None = None,
        choose: int | None = None,
        download_retry: int | None = None,
        download_timeout: float | None = None,
        validate_hash: str | None = None,
        keep_zip: bool | None = None,
    ) -> None:
        self.remote = remote
        self.local = local
        if local is None and remote is not None:
            self.local = str(resolve_location(remote, None, split=None).local)
        self.split = split
        self.proportion = proportion
        self.repeat = repeat
        self.choose = choose
        self.download_retry = download_retry
        self.download_timeout = download_timeout
        self.validate_hash = validate_hash
        self.keep_zip = keep_zip
        self._weights = {"proportion": proportion, "repeat": repeat, "choose": choose}
        self.to_core()

    def to_core(self) -> CoreStream:
        """Return the stream as `hocket.stream` reads it, with the weights that were given.

        Raises:
            ConfigError: A subclass overrides a method that native code replaces.
        """
        for name in _NATIVE:
            if hasattr(type(self), name):
                raise ConfigError(
                    f"`{type(self).__name__}` defines `{name}`, which is not called: shards are fetched by "
                    "native code; write what the method makes to a folder and stream from there"
                )
        return CoreStream(
            remote=self.remote,
            local=self.local,
            split=self.split,
            download_retry=self.download_retry,
            download_timeout=self.download_timeout,
            validate_hash=self.validate_hash,
            keep_zip=self.keep_zip,
            **self._weights,  # type: ignore[arg-type]
        )

    def fill(self, *, local: str, count: int, size: int, total: int) -> None:
        """Set the values that follow from the data: the cache folder and the weights.

        Args:
            local: Folder of the cache, or of the data set.
            count: Number of samples of this stream in an epoch.
            size: Number of samples in the stream.
            total: Number of samples in an epoch.
        """
        self.local = local if self.local is None else self.local
        self.choose = count
        self.repeat = count / size if size else 0.0
        self.proportion = count / total if total else 0.0

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.to_core() == other.to_core()

    __hash__ = object.__hash__


def to_core(streams: Sequence[Stream | CoreStream]) -> list[CoreStream]:
    """Return streams as `hocket.stream` reads them.

    Raises:
        ConfigError: An element is not a stream.
    """
    core_streams = []
    for stream in streams:
        if not isinstance(stream, (Stream, CoreStream)):
            raise ConfigError(f"`streams` holds {stream!r:.100}: expected `Stream` objects")
        core_streams.append(stream.to_core() if isinstance(stream, Stream) else stream)
    return core_streams


class StreamsRegistry:
    """Classes of streams by name."""

    def __init__(self) -> None:
        self._kinds: dict[str, Callable[..., Any]] = {}

    def register(self, name: str, *, func: Kind | None = None) -> Any:
        """Register a class under a name, as a call or as a decorator."""
        if func is None:
            return lambda kind: self.register(name, func=kind)
        self._kinds[name] = func
        return func

    __call__ = register

    def get(self, name: str) -> Callable[..., Any]:
        """Return the class with a name.

        Raises:
            ConfigError: There is no class with that name.
        """
        if name not in self._kinds:
            raise ConfigError(
                f"`stream_name` is {name!r}: expected one of {sorted(self._kinds)}; register your own with "
                "`streams_registry.register(name, func=...)`"
            )
        return self._kinds[name]

    def get_all(self) -> dict[str, Callable[..., Any]]:
        """Return all classes by name."""
        return dict(self._kinds)

    def __contains__(self, name: object) -> bool:
        return name in self._kinds


streams_registry = StreamsRegistry()
"""The registry that `StreamingDataset(stream_name=…)` looks in."""

streams_registry.register("stream", func=Stream)
