"""One metric over a whole run in a few points. No I/O, no clock."""

from __future__ import annotations


class SeriesHistory:
    """Keeps every n-th point of a series; n doubles whenever there are too many, so the points span the whole run.

    Args:
        most: points to keep.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._stride = 1
        self._skipped = 0
        self._points: list[tuple[int, float]] = []
        self._newest: tuple[int, float] | None = None

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """The kept points in order, at most ``most``: the first one, the newest one, and some between them."""
        if self._newest is None or self._points[-1] == self._newest:
            return tuple(self._points)
        return (*self._points, self._newest)

    def add(self, at: int, value: float) -> None:
        """Add a point. If it is not after the newest one, the run went back: points from there on are forgotten."""
        if self._newest is not None and at <= self._newest[0]:
            self._points = [point for point in self._points if point[0] < at]
        self._newest = (at, value)
        self._skipped += 1
        if self._skipped < self._stride and self._points:
            return
        self._skipped = 0
        self._points.append(self._newest)
        if len(self._points) >= self._most:
            self._stride *= 2
            self._points = self._points[::2]
