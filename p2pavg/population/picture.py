"""Draws curves and the jumps between them as SVG. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 34, 40
COLOURS = (
    "#1f6fb4",
    "#d1741f",
    "#2c8c4a",
    "#b23a48",
    "#7a55a8",
    "#8a6242",
    "#c05c9a",
    "#5f6b73",
    "#9a8f1c",
    "#1f9aa8",
)
TICKS = 5
NAMED = 20
"""Curves that the legend names."""


@dataclass(slots=True)
class Curve:
    """The line of one member."""

    name: str
    points: list[tuple[int, float]]
    """Generation and value."""
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class Jump:
    """A copy: from one curve at a generation to another one."""

    donor: str
    donor_generation: int
    copier: str
    generation: int


def draw(title: str, curves: Mapping[str, Curve], jumps: Sequence[Jump], *, is_log: bool) -> str:
    """Return a picture as the text of an SVG file.

    Args:
        title: names the value.
        curves: by an id that jumps refer to.
        is_log: true for a logarithmic axis; values that are not above 0 are left out.
    """
    points = [point for curve in curves.values() for point in curve.points if not is_log or point[1] > 0]
    axes = _Axes(points, is_log)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        '<defs><marker id="arrow" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0,0 L6,3 L0,6 z" fill="#777"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)} by generation</text>',
        *axes.lines(),
    ]
    places: dict[tuple[str, int], tuple[float, float]] = {}
    for index, (key, curve) in enumerate(curves.items()):
        drawn = [
            (number, axes.x(number), axes.y(value))
            for number, value in curve.points
            if not is_log or value > 0
        ]
        places |= {(key, number): (x, y) for number, x, y in drawn}
        colour, width = COLOURS[index % len(COLOURS)], 3.0 if curve.is_best else 1.4
        path = " ".join(f"{x:.1f},{y:.1f}" for _, x, y in drawn)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}"/>' for _, x, y in drawn]
        if index < NAMED:
            weight = ' font-weight="bold"' if curve.is_best else ""
            parts.append(
                f'<text x="{WIDTH - RIGHT + 12}" y="{TOP + 12 + 16 * index}" fill="{colour}"{weight}>'
                f"{escape(_short(curve.name))}</text>"
            )
    for jump in jumps:
        begin = places.get((jump.donor, jump.donor_generation))
        # The copy shows in the generation after it; before that one has ended, at the end of this one.
        end = places.get((jump.copier, jump.generation + 1)) or places.get((jump.copier, jump.generation))
        if begin is not None and end is not None:
            parts.append(
                f'<line x1="{begin[0]:.1f}" y1="{begin[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" stroke="#777" '
                'stroke-dasharray="3 3" marker-end="url(#arrow)"/>'
            )
    return "\n".join([*parts, "</svg>\n"])


class _Axes:
    """Places of values in the picture."""

    def __init__(self, points: Sequence[tuple[int, float]], is_log: bool) -> None:
        self._log = is_log
        numbers = [number for number, _ in points] or [0, 1]
        values = [self._scaled(value) for _, value in points] or [0.0, 1.0]
        self._first, self._last = min(numbers), max(max(numbers), min(numbers) + 1)
        low, high = min(values), max(values)
        room = (high - low) * 0.05 or abs(high) * 0.05 or 0.5
        self._low, self._high = low - room, high + room

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def x(self, number: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (number - self._first) / (self._last - self._first)

    def y(self, value: float) -> float:
        part = (self._scaled(value) - self._low) / (self._high - self._low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * part

    def lines(self) -> list[str]:
        right, bottom, found = WIDTH - RIGHT, HEIGHT - BOTTOM, []
        for index in range(TICKS):
            scaled = self._low + (self._high - self._low) * index / (TICKS - 1)
            value = 10**scaled if self._log else scaled
            y = self.y(value)
            found.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e4e4e4"/>')
            found.append(
                f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{value:.3g}</text>'
            )
        step = max(1, math.ceil((self._last - self._first) / 8))
        for number in range(self._first, self._last + 1, step):
            x = self.x(number)
            found.append(
                f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#555">{number}</text>'
            )
        found.append(
            f'<rect x="{LEFT}" y="{TOP}" width="{right - LEFT}" height="{bottom - TOP}" fill="none" stroke="#999"/>'
        )
        return found


def _short(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:6]}..{name[-8:]}"
