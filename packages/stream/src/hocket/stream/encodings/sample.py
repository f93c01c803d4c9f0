"""Encoding of a whole sample."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.stream.encodings.base import Encoding
from hocket.stream.errors import SampleError


class SampleEncoder:
    """An encoder of mappings as MDS samples: the sizes of variable columns, then all columns in order.

    Args:
        columns: Name and encoding of each column, in order.
    """

    def __init__(self, columns: Sequence[tuple[str, Encoding]]) -> None:
        self._columns = [(name, encoding.store, encoding.width) for name, encoding in columns]
        self._sizes = struct.Struct(f"<{sum(width is None for *_, width in self._columns)}I")

    def encode(self, sample: Mapping[str, Any]) -> bytes:
        """Return the bytes of a sample.

        A value of type `bytes` is taken to be encoded already and is stored unchanged, if the encoding can
        read it.

        Raises:
            SampleError: A column is missing, or a value does not have its column's type.
        """
        sizes: list[int] = []
        values: list[bytes] = [b""]
        for name, store, width in self._columns:
            try:
                encoded = store(sample[name])
            except KeyError:
                raise SampleError(
                    f"the sample has no `{name}`: expected all of {[known for known, *_ in self._columns]}"
                ) from None
            except SampleError as error:
                raise SampleError(f"column `{name}`: {error}") from None
            if width is None:
                sizes.append(len(encoded))
            elif len(encoded) != width:
                raise SampleError(f"column `{name}` has {len(encoded)} bytes: expected {width}")
            values.append(encoded)
        if max(sizes, default=0) >= 1 << 32:
            raise SampleError(f"a value has {max(sizes)} bytes: expected fewer than 2^32")
        values[0] = self._sizes.pack(*sizes)
        return b"".join(values)
