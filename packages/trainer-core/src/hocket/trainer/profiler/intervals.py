"""Sets of time intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        elif end > start:
            merged.append((start, end))
    return merged


def length(disjoint: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in disjoint)


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two lists of disjoint intervals in order."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common
