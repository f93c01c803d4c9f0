"""The format of a stream's files, and the choice of columns in those that have a schema of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hocket.stream.errors import ConfigError
from hocket.stream.settings.row_filter import Filters, RowFilter

FORMATS = ("mds", "parquet")
SCHEMAS = ("equal", "union", "permissive")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFormat:
    """The format of a stream, and what is read of it."""

    name: str | None = None
    """`mds` for a data set with an `index.json`, of shards in any of its formats; `parquet`; None to look."""

    columns: tuple[str, ...] | None = None
    """Names of the columns to read; None for all."""

    encodings: Mapping[str, str] = field(default_factory=dict)
    """Encodings by column name, instead of the usual ones."""

    filters: RowFilter | None = None
    """The rows to read; None for all."""

    schema: str = "equal"
    """Policy for files whose columns differ: they are refused, or `union`, or `permissive`."""

    @classmethod
    def parse(
        cls,
        name: str | None,
        columns: Sequence[str] | None,
        encodings: Mapping[str, str] | None,
        filters: Filters | None = None,
        schema: str | None = None,
    ) -> FileFormat:
        """Return the format that arguments of these names describe.

        Raises:
            ConfigError: The name is unknown, or a selection is not one.
        """
        if name is not None and name not in FORMATS:
            raise ConfigError(
                f"`format` is {name!r}: expected one of {FORMATS}, or None to look at the folder"
            )
        if isinstance(columns, str) or not all(isinstance(column, str) for column in columns or ()):
            raise ConfigError(f"`columns` is {columns!r:.100}: expected a list of names")
        if not isinstance(encodings or {}, Mapping):
            raise ConfigError(f"`encodings` is {encodings!r:.100}: expected encodings by column name")
        if schema is not None and schema not in SCHEMAS:
            raise ConfigError(f"`schema` is {schema!r}: expected one of {SCHEMAS}")
        chosen = cls(
            name=name,
            columns=None if columns is None else tuple(columns),
            encodings=dict(encodings or {}),
            filters=None if filters is None else RowFilter.parse(filters),
            schema=schema or SCHEMAS[0],
        )
        if name == "mds":
            chosen.refuse_selection("the index")
        return chosen

    def refuse_selection(self, origin: str) -> None:
        """Refuse columns, encodings, filters and a schema for data whose index determines them.

        Raises:
            ConfigError: Some are given.
        """
        schema = None if self.schema == SCHEMAS[0] else self.schema
        given = {"columns": self.columns, "encodings": self.encodings, "filters": self.filters}
        for name, value in (given | {"schema": schema}).items():
            if value:
                raise ConfigError(
                    f"`{name}` is given, and `{origin}` determines the columns, their encodings and the "
                    "rows: leave it out; it is for Parquet"
                )
