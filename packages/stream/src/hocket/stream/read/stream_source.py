"""One stream of a data set: its location, its settings and its index."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from hocket.native import _native
from hocket.native.errors import StorePermissionError, StoreTransientError
from hocket.stream.read.location import DatasetLocation
from hocket.stream.settings.reading import SourceSettings

logger = logging.getLogger("hocket.stream")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSource:
    """The location and the settings of one stream."""

    location: DatasetLocation
    settings: SourceSettings

    def fetch_index(self) -> tuple[bytes, int]:
        """Return the bytes of the index and the time at which it was written; see `load_shard_index`."""
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
        return _native.ShardIndex.parse(data, f"{self.location.origin.rstrip('/')}/index.json")
