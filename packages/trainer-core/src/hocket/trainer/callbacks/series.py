"""A bounded record of a metric over time."""

from __future__ import annotations


class MetricSeries:
    """The points of one metric, thinned evenly to stay below a limit.

    When the limit is reached, every other point is dropped, and from then on only every second new point is
    kept; each time the limit is reached again, the stride doubles. The last point is always kept.

    Args:
        max_points: Number of points to hold; at least 4.
        points: Points to start with.
    """

    def __init__(self, max_points: int = 1000, points: list[tuple[int, float]] | None = None) -> None:
        self.max_points = max(4, max_points)
        self._points: list[tuple[int, float]] = []
        self._stride = 1
        self._num_since = 0
        self._last: tuple[int, float] | None = None
        for step, value in points or ():
            self.add(step, value)

    def add(self, step: int, value: float) -> None:
        """Add a point; if its step is below the last one, drop the points from that step on first."""
        if self._last is not None and step < self._last[0]:
            self._points = [point for point in self._points if point[0] < step]
        self._last = (step, value)
        self._num_since += 1
        if self._num_since >= self._stride:
            self._num_since = 0
            self._points.append(self._last)
            if len(self._points) >= self.max_points:
                self._points = self._points[::2]
                self._stride *= 2

    def points(self) -> list[tuple[int, float]]:
        """Return the points that are held, the last one included."""
        if self._last is None or (self._points and self._points[-1] == self._last):
            return list(self._points)
        return [*self._points, self._last]
