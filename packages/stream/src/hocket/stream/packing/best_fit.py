"""The division of sequences into rows of one length, by best fit, and a permutation of the rows.

Both depend on their arguments only, in every version of NumPy and Python, because a run may be resumed under
another one.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class SequencePiece(NamedTuple):
    """A part of a sequence, or all of it."""

    sequence: int
    """Number of the sequence."""

    start: int
    """Its first token."""

    stop: int
    """The token after its last one."""


def cut_sequences(lengths: Sequence[int], capacity: int) -> list[SequencePiece]:
    """Return the pieces of sequences, each as long as a row at most. Empty sequences have none."""
    return [
        SequencePiece(number, start, min(start + capacity, length))
        for number, length in enumerate(lengths)
        for start in range(0, length, capacity)
    ]


def pack_pieces(pieces: Sequence[SequencePiece], capacity: int) -> list[list[SequencePiece]]:
    """Put pieces into rows, the longest first, each into the fullest row that has room for it.

    The pieces of a row, and the rows by their first pieces, are in the order of the argument.

    Args:
        pieces: Pieces that are not longer than a row, in ascending order.
        capacity: Number of tokens in a row.

    Source: Johnson et al., Worst-case performance bounds for simple one-dimensional packing algorithms, 1974.
    """
    rows: list[list[SequencePiece]] = []
    rooms: list[tuple[int, int]] = []  # tokens that are free, and the row, ascending
    for piece in sorted(pieces, key=lambda piece: piece.start - piece.stop):
        length = piece.stop - piece.start
        at = bisect.bisect_left(rooms, (length, -1))
        if at == len(rooms):
            rows.append([])
            free, row = capacity, len(rows) - 1
        else:
            free, row = rooms.pop(at)
        rows[row].append(piece)
        if free > length:
            bisect.insort(rooms, (free - length, row))
    return sorted(sorted(row) for row in rows)


def permutation(count: int, *key: int) -> NDArray[np.int64]:
    """Return a permutation of the numbers below `count` that is a function of a key.

    Args:
        count: Number of numbers.
        key: Integers, such as a seed and an epoch.
    """
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    start = np.uint64(int.from_bytes(digest, "little"))
    with np.errstate(over="ignore"):
        # SplitMix64 (Steele et al., Fast splittable pseudorandom number generators, 2014).
        mixed = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable").astype(np.int64)
