"""One stream of a data set: its location, its settings and its index."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from hocket.native import _native
from hocket.native.errors import StorePermissionError, StoreTransientError
from hocket.stream.errors import ConfigError, IndexNotFoundError
from hocket.stream.read.hub.pin import HubSource
from hocket.stream.read.location import DatasetLocation
from hocket.stream.read.parquet.files import has_kept, has_parquet
from hocket.stream.read.parquet.index import ParquetIndex, make_index
from hocket.stream.settings.file_format import FileFormat
from hocket.stream.settings.reading import SourceSettings

logger = logging.getLogger("hocket.stream")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSource:
    """The location and the settings of one stream."""

    location: DatasetLocation
    settings: SourceSettings
    format: FileFormat = field(default_factory=FileFormat)

    split: str | None = None
    """Name of the split, of which `location` is the folder unless `is_split_by_name`."""

    whole: DatasetLocation | None = None
    """The location of all splits, if there is a split."""

    is_split_by_name: bool = False
    """Whether the split is chosen by the names of Parquet files in `location`. Not known before `open`."""

    hub: HubSource | None = None
    """The data set on a hub that `location` is of."""

    @property
    def is_parquet(self) -> bool:
        """Whether the stream is a folder of Parquet files. Not known before `open`."""
        return self.format.name == "parquet"

    def open(self) -> tuple[StreamSource, bytes, int, str | None]:
        """Return this stream with its format, then the result of `fetch_index`, and a notice for the user.

        Raises:
            ConfigError: As `make_index`, with its other errors.
            IndexNotFoundError: The folder has neither an index nor Parquet files.
        """
        if self.is_parquet:
            if self._is_folder_missing():
                return self._by_name().open()
            index = self._make_index()
            notices = [index.notice, None if self.hub is None else self.hub.notice]
            return self, index.document, 0, "; ".join(filter(None, notices)) or None
        try:
            data, written_ms = self.fetch_index()
        except (IndexNotFoundError, StorePermissionError, StoreTransientError) as error:
            if self.format.name is not None:
                raise
            if not self._is_parquet_without_index(error):
                if self.whole is not None and self._by_name()._is_parquet_without_index(error):
                    return self._by_name().open()
                raise
            return replace(self, format=replace(self.format, name="parquet")).open()
        place = f"{self.location.origin.rstrip('/')}/index.json"
        self.format.refuse_selection(place)
        if self.hub is not None:
            self.hub.refuse_config(place)
        notice = None if self.hub is None else self.hub.notice
        return replace(self, format=replace(self.format, name="mds")), data, written_ms, notice

    def _is_folder_missing(self) -> bool:
        """Return whether only the folder of all splits has Parquet files, and not one of the split's name."""
        if self.whole is None or self.is_split_by_name:
            return False
        if self.hub is not None:
            return True  # its README or the names of its files tell the splits
        deadline_s = self.settings.download_timeout
        if has_parquet(self.location, deadline_s=deadline_s):
            return False
        return has_parquet(self.whole, deadline_s=deadline_s) or has_kept(self.whole)

    def _by_name(self) -> StreamSource:
        """Return this stream with its split chosen by the names of files, as on a hub of data sets."""
        assert self.whole is not None
        parquet = replace(self.format, name="parquet")
        return replace(self, location=self.whole, format=parquet, is_split_by_name=True)

    def _is_parquet_without_index(self, error: Exception) -> bool:
        """Return whether there are Parquet files, or those that are kept if the store is out of reach."""
        if isinstance(error, IndexNotFoundError):
            if self.hub is not None:
                return True
            return has_parquet(self.location, deadline_s=self.settings.download_timeout)
        return has_kept(self.location)

    def _make_index(self) -> ParquetIndex:
        for name, value in (
            ("validate_hash", self.settings.validate_hash),
            ("keep_zip", self.settings.keep_zip),
        ):
            if value:
                raise ConfigError(
                    f"`{name}` is {value!r}, and `{self.location.origin}` is Parquet, which has neither "
                    "digests in an index nor compressed shards: leave it out; pages have checksums"
                )
        return make_index(
            self.location,
            chosen=self.format,
            deadline_s=self.settings.download_timeout,
            split=self.split if self.is_split_by_name else None,
            layout=None if self.hub is None else self.hub.layout,
        )

    def fetch_index(self) -> tuple[bytes, int]:
        """Return the bytes of the index and the time at which it was written; see `load_shard_index`."""
        if self.is_parquet:
            return self._make_index().document, 0
        location, deadline_s = self.location, self.settings.download_timeout
        try:
            return _native.load_shard_index(location.local, location.remote, deadline_s=deadline_s)
        except (StorePermissionError, StoreTransientError) as error:
            if location.remote is None:
                raise
            # The store is out of reach, which is not the same as "no index": the kept copy may suffice.
            kept = _native.load_kept_shard_index(location.local, location.remote, deadline_s=deadline_s)
            if kept is None:
                raise
            # As text: a log record that holds the error would keep this data set alive through its traceback.
            logger.warning(
                "%s; the index kept in `%s` is used, and the shards in it", str(error), location.local
            )
            return kept

    def parse_index(self, data: bytes) -> _native.ShardIndex:
        """Return the index that `data` holds.

        Raises:
            IndexCorruptError: The index is not valid.
            ConfigError: It uses a feature that is not supported.
        """
        place = self.location.origin.rstrip("/")
        return _native.ShardIndex.parse(data, place if self.is_parquet else f"{place}/index.json")
