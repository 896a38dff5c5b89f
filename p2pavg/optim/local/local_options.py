"""The options of local updates that all peers of a run share, checked. No I/O, no clock."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from p2pavg.base.messages import pack
from p2pavg.optim.base.recipe import Settings
from p2pavg.optim.base.state import checked_count, checked_period

# Intervals between two outer steps, in inner steps or in seconds.

_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
MAX_INTERVAL_SECONDS = 30 * 24 * 3600.0

SyncEvery = int | str
"""A number of inner steps, or a time such as ``"30s"``, ``"5min"`` or ``"1h"``."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval: one of the two is above 0."""

    steps: int = 0
    seconds: float = 0.0

    @property
    def is_time(self) -> bool:
        """True if it is in seconds."""
        return self.seconds > 0

    def part(self, count: int) -> Interval:
        """Return this interval divided by a number of fragments.

        Raises:
            ValueError: it is a number of steps that is no multiple of ``count``.
        """
        if self.steps % count:
            raise ValueError(
                f"sync_every must be a multiple of fragments: {self.steps} steps cannot be divided by {count}"
            )
        return Interval(self.steps // count, self.seconds / count)


def checked_interval(value: SyncEvery) -> Interval:
    """Return the interval that ``sync_every`` names; raise ValueError for anything else."""
    if not isinstance(value, str):
        return Interval(steps=checked_count("sync_every", value))
    found = _TIME.fullmatch(value)
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds <= MAX_INTERVAL_SECONDS:
        raise ValueError(
            f'sync_every must be a number of steps, or a time such as "30s", "5min" or "1h", got {value!r}'
        )
    return Interval(seconds=seconds)


class Boundaries:
    """Tells when this peer's next outer step is due.

    Args:
        interval: between two outer steps.
    """

    def __init__(self, interval: Interval) -> None:
        self.interval = interval
        self.steps = 0
        """Inner steps since the last boundary."""
        self._since: float | None = None
        """Time of the last boundary; of the first inner step before there was one."""
        self._again = False

    def stepped(self, now: float) -> None:
        """Note an inner step."""
        self.steps += 1
        if self._since is None:
            self._since = now

    def is_due(self, now: float) -> bool:
        """Return whether an outer step is due."""
        if self._again and self.steps > 0:
            return True
        if not self.interval.is_time:
            return self.steps >= self.interval.steps
        return self.steps > 0 and self._since is not None and now >= self._since + self.interval.seconds

    def passed(self, now: float, *, steps: int = 0) -> None:
        """Begin the next interval.

        Args:
            now: moment of the boundary, which all peers of a round should agree on.
            steps: inner steps since then.
        """
        self.steps, self._since, self._again = steps, now, False

    def again(self) -> None:
        """Note that the last boundary's round found no group: the next inner step is a boundary too."""
        self._again = True

    def align(self, moment: float) -> None:
        """Note the moment at which the group of the last boundary was complete: the same for all its members.

        Peers whose batches take different times would otherwise drift apart.
        """
        self._since = moment


# Fragments of a model for local updates: which elements are averaged together.
#
# The layers of the model are dealt out like cards: with P fragments, the first one begins with the layers 0, P, 2P
# and so on, as the strided pattern of Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512, section 2.2). The
# line of layers in this order is cut into P fragments of the same number of elements, also in the middle of a tensor:
# all rounds then have vectors of one size. Names and shapes alone decide, so all peers that agree on these agree on
# the fragments.

_DOMAIN = "p2pavg/fragments/1"
_NUMBER = re.compile(r"(?:^|\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of one parameter's elements, in the order of its memory."""

    position: int
    """Number of the parameter."""
    start: int
    stop: int


Fragment = tuple[Piece, ...]


def fragments_of(names: Sequence[str], shapes: Sequence[tuple[int, ...]], count: int) -> tuple[Fragment, ...]:
    """Return the fragments of some parameters; together they hold every element once.

    Args:
        names: of the parameters, which begin with their layers' names.
        shapes: of the parameters.
        count: number of fragments. With 1, its pieces are the whole parameters in their order.

    Raises:
        ValueError: there are fewer elements than fragments.
    """
    sizes = [math.prod(shape) for shape in shapes]
    total = sum(sizes)
    if count == 1:
        return (tuple(Piece(position, 0, size) for position, size in enumerate(sizes)),)
    if total < count:
        raise ValueError(f"fragments must be at most the number of elements, {total}, got {count}")
    # The positions of each layer's parameters, in the order in which the layers first appear.
    layers: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        layers.setdefault(layer_of(name), []).append(position)
    line = list(layers.values())
    order = [position for first in range(count) for layer in line[first::count] for position in layer]
    ends = [total * number // count for number in range(1, count + 1)]
    found: list[list[Piece]] = [[] for _ in range(count)]
    at = number = 0  # in the line of all elements; of the fragment
    for position in order:
        start = 0
        while start < sizes[position]:
            taken = min(sizes[position] - start, ends[number] - at)
            found[number].append(Piece(position, start, start + taken))
            start, at = start + taken, at + taken
            number += at == ends[number]
    return tuple(tuple(pieces) for pieces in found)


def elements_in(fragment: Fragment) -> int:
    """Return the number of elements of a fragment; those of one model differ by 1 at most."""
    return sum(piece.stop - piece.start for piece in fragment)


def layout_digest(names: Sequence[str], fragments: Sequence[Fragment]) -> str:
    """Return a short text that depends on every name and piece."""
    pieces = tuple(
        tuple((piece.position, piece.start, piece.stop) for piece in fragment) for fragment in fragments
    )
    return blake3(pack(_DOMAIN, repr((tuple(names), pieces)))).hexdigest()[:16]


def layer_of(name: str) -> str:
    """Return the name of a parameter's layer: up to its first number, as in ``blocks.3``; else without its last part.

    >>> layer_of("transformer.h.3.attn.c_proj.weight")
    'transformer.h.3'
    >>> layer_of("transformer.wte.weight")
    'transformer.wte'
    """
    number = _NUMBER.search(name)
    if number is not None:
        return name[: number.end()]
    layer, _, last = name.rpartition(".")
    return layer or last


class LocalOptions:
    """Options of :class:`~p2pavg.optim.LocalUpdates`, which documents them.

    Raises:
        ValueError: one of them is out of range; the message names it.
    """

    def __init__(
        self, *, sync_every: SyncEvery, fragments: int, delay: int, alpha: float | None, proximal: float
    ) -> None:
        self.sync_every = sync_every
        self.fragments = checked_count("fragments", fragments)
        self.interval = checked_interval(sync_every).part(self.fragments)
        """Between two outer steps: that of a fragment, divided by the number of fragments."""
        self.delay = checked_period("delay", delay)
        if not self.interval.is_time and self.delay > self.interval.steps:
            raise ValueError(
                f"delay must be at most sync_every / fragments, {self.interval.steps} inner steps, got {delay}"
            )
        if alpha is not None and not (_is_number(alpha) and 0 <= alpha < 1):
            raise ValueError(f"alpha must be a number from 0 to below 1, or None, got {alpha!r}")
        if not (_is_number(proximal) and 0 <= proximal < math.inf):
            raise ValueError(f"proximal must be a number, 0 or more, got {proximal!r}")
        self.alpha = None if alpha is None else float(alpha)
        self.proximal = float(proximal)

    @property
    def overlaps(self) -> bool:
        """True if rounds run in the background."""
        return self.delay > 0

    def rules(self, names: Sequence[str], pieces: Sequence[Fragment]) -> Settings:
        """Return the settings for the recipe; those of options that are not used are left out."""
        rules: list[tuple[str, object]] = [("sync_every", self.sync_every), ("proximal", self.proximal)]
        if self.fragments > 1:
            rules += [("fragments", self.fragments), ("layout of fragments", layout_digest(names, pieces))]
        if self.delay:
            rules.append(("delay", self.delay))
        if self.alpha is not None:
            rules.append(("alpha", self.alpha))
        return tuple(rules)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
