"""The columns that the names of folders hold, and the files that a filter on them leaves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hocket.stream.convert.sources import SourceFiles, partition_values
from hocket.stream.errors import ConfigError
from hocket.stream.settings.file_format import FileFormat
from hocket.stream.settings.row_filter import RowFilter

_ROOT = Path("/")


class FolderValues:
    """The values of files' folders, such as `date=2020-01-01`, by the files' names."""

    def __init__(self, origin: str, chosen: FileFormat) -> None:
        self._origin, self._chosen = origin, chosen
        self.values: dict[str, dict[str, Any]] = {}
        """Values by column, of each file."""
        self.columns: dict[str, str] = {}
        """Encodings of the columns. They are those of all files, whichever the filter leaves."""

    def choose(self, keys: Sequence[str]) -> list[str]:
        """Read the names of files, and return those of files that may have rows to read.

        Raises:
            ConfigError: There are none, or a value is of another kind than that of its condition.
        """
        paths = {_ROOT / key: key for key in keys if "=" in key}
        found = partition_values(_ROOT, list(paths), self._chosen.encodings)
        files = SourceFiles(root=_ROOT, files=list(paths), partitions=found)
        self.columns = files.partition_columns()
        self.values = {key: {} for key in keys} | {key: found.get(path, {}) for path, key in paths.items()}
        left = [key for key in keys if self.filter_of(key) is not False]
        if keys and not left:
            assert self._chosen.filters is not None
            raise no_rows(self._origin, self._chosen.filters)
        return left

    def filter_of(self, key: str) -> RowFilter | bool:
        """Return the filter on the rows of a file, or whether it is read as a whole."""
        filters = self._chosen.filters
        return True if filters is None else filters.resolve(self.values[key])


def no_rows(origin: str, filters: RowFilter) -> ConfigError:
    """Return the error for a filter that keeps nothing."""
    return ConfigError(f"`filters` is {filters}, which keeps no row of `{origin}`: expected at least one")
