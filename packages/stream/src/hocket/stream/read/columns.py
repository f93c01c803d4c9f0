"""Decoding of the columns of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from hocket.stream.encodings import Column, Encoding, check_width, resolve_encoding
from hocket.stream.encodings.base import Plain
from hocket.stream.encodings.images import EncodedImage, ImageList, load_pixels
from hocket.stream.errors import SampleCorruptError, ShardCorruptError

#: A column's bytes; the offsets of its values if they differ in size; the samples that have it if not all do.
RawColumn = tuple[memoryview, memoryview | None, memoryview | None]


class ColumnSet:
    """A decoder for the batches of one or several indexes with the same columns.

    If shards differ in a column, a batch has a list of its values, with None for samples without the column.
    A column with several encodings that is not in `mixed` has one array: its encodings give the same type.

    Args:
        columns: Name, encoding and size of each column, in the order of a batch.
        mixed: Names of columns that some shards lack, or have in another encoding.
        origin: Path or URI of the index, for messages.
        allow_unsafe_types: Accept `pkl` columns, which run code from the data when they are decoded.
        loads_images: Decode the pixels of images, which Pillow otherwise does on first access.

    Raises:
        ConfigError: An encoding is unknown, or unsafe and not allowed.
        IndexCorruptError: The size of a column is not that of its encoding.
    """

    def __init__(
        self,
        columns: Sequence[tuple[str, str, int | None]],
        mixed: Collection[str],
        *,
        origin: str,
        allow_unsafe_types: bool,
        loads_images: bool = False,
    ) -> None:
        self._loads_images = loads_images
        self._columns: list[tuple[str, Encoding]] = []
        for name, kind, width in columns:
            encoding = resolve_encoding(kind, allow_unsafe_types=allow_unsafe_types)
            check_width(name, encoding, width, origin)
            self._columns.append((name, encoding))
        self._mixed = frozenset(mixed)
        names = Counter(name for name, _ in self._columns)
        self._joined = {name for name, count in names.items() if count > 1} - self._mixed
        self.encodings: dict[str, Encoding] = {
            name: _MixedColumn() if name in self._mixed else encoding for name, encoding in self._columns
        }
        """Encodings by column name; `item` returns the value of one sample in a decoded column."""

    def decode(self, columns: Sequence[RawColumn], num_samples: int) -> dict[str, Column]:
        """Return the values of a batch by column.

        Raises:
            SampleCorruptError: A value cannot be decoded.
        """
        decoded: dict[str, Column] = {}
        for (name, encoding), (data, offsets, rows) in zip(self._columns, columns, strict=True):
            edges = None if offsets is None else np.frombuffer(offsets, np.uint64)
            try:
                column = encoding.decode(data, edges)
                if self._loads_images and isinstance(encoding, (EncodedImage, ImageList)):
                    load_pixels(column)
            except ShardCorruptError as error:
                raise SampleCorruptError(f"column `{name}`: {error}") from None
            if name not in self._mixed | self._joined:
                decoded[name] = column
                continue
            if name in self._joined:
                assert isinstance(column, np.ndarray)  # only encodings of integers are joined
                joined: Column = decoded.setdefault(name, np.empty(num_samples, column.dtype))
                joined[slice(None) if rows is None else np.frombuffer(rows, np.uint64)] = column
                continue
            values = decoded.setdefault(name, [None] * num_samples)
            positions = range(num_samples) if rows is None else np.frombuffer(rows, np.uint64).tolist()
            for number, position in enumerate(positions):
                values[position] = encoding.item(column, number)
        return decoded


class _MixedColumn(Plain):
    """A column whose values are decoded already, as a list. It is only read."""
