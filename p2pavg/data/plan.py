"""The plan by which the peers of a run take each sample of an epoch once. No I/O, no clock.

All peers follow the same updates, and each update's certificate says how many samples each of its members contributed.
From this alone they all make the same plan, and anyone can make it again from the certificates:

* Each member has a *lane*: the places of the epoch's order (:mod:`p2pavg.data.order`) that it takes next. An update
  covers as many places at the front of each member's lane as the member contributed samples.
* A lane that has fewer places than three such updates need is filled up to six from the *rest* of the epoch. When the
  rest is dealt out, the next epoch begins.
* The lane of a member that was in none of four updates goes back to the front of the rest: what died with it is taken
  by others.
* A peer that has no lane yet, or has taken more than its lane held, takes places of the epoch that has not begun: from
  a place on that follows from its id, without those that are covered already. When that epoch begins, they are not in
  it.

So an epoch's samples are all covered, and none twice, except where two such peers meet in the epoch to come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from p2pavg.data.order import SCHEME, SampleOrder

FEW_UPDATES = 3
"""A lane with places for fewer updates than this is filled up: a peer may be faster in the next one, and a data loader
holds some of its places already."""
MANY_UPDATES = 6
KEPT_UPDATES = 3
"""For so many updates the lane of a member is kept that is in none of them: it may have missed one."""
MAX_LANES = 1024
"""Of a plan that another peer sent. A group has at most 64 members."""
MAX_PIECES = 10_000
"""In all lanes and the rest of such a plan: an honest one has some for each member."""
MAX_EPOCHS = 2**40

Piece: TypeAlias = tuple[int, int, int]
"""Epoch, first place, and the place after the last one."""


class _SavedPlan(msgspec.Struct, forbid_unknown_fields=True):
    """A plan as plain values, which another peer may have made up."""

    scheme: int
    length: int
    seed: int
    begun: Annotated[int, Meta(ge=0, le=MAX_EPOCHS)]
    lanes: Annotated[dict[str, list[Piece]], Meta(max_length=MAX_LANES)]
    absent: dict[str, Annotated[int, Meta(ge=0, le=KEPT_UPDATES)]]
    rest: list[Piece]
    early: list[tuple[int, int]]


class EpochPlan:
    """The lanes of a run's members.

    Args:
        order: of the samples.
    """

    def __init__(self, order: SampleOrder) -> None:
        self.order = order
        self.begun = 0
        """Number of epochs that have begun."""
        self._lanes: dict[str, list[Piece]] = {}
        self._absent: dict[str, int] = {}
        """Updates since those members with a lane were in one that have missed the last."""
        self._rest: list[Piece] = []
        self._early: list[tuple[int, int]] = []
        """Places of the epoch to come that are covered: disjoint, in ascending order, as first and end."""

    def took(self, contributed: Mapping[str, float]) -> None:
        """Note an update.

        Args:
            contributed: samples of each member that contributed any, by its id.
        """
        counts = {peer: round(samples) for peer, samples in sorted(contributed.items()) if round(samples) > 0}
        early = list(self._early)
        for peer, count in counts.items():
            beyond = count - _size(_cut(self._lanes.setdefault(peer, []), count))
            # By what was covered before this update, which is all that each of them knew when it took them. Where two
            # meet, samples are repeated.
            if beyond:
                early += [(first, end) for _, first, end in _cut(list(self._early_places(peer)), beyond)]
        self._early = _joined(early)
        self._absent = {
            peer: self._absent.get(peer, 0) + 1 for peer in sorted(self._lanes.keys() - counts.keys())
        }
        gone = [peer for peer, updates in self._absent.items() if updates > KEPT_UPDATES]
        self._absent = {peer: self._absent[peer] for peer in self._absent.keys() - set(gone)}
        self._rest = [*chain.from_iterable(self._lanes.pop(peer) for peer in gone), *self._rest]
        for peer, count in counts.items():
            lane = self._lanes.setdefault(peer, [])
            if _size(lane) < FEW_UPDATES * count:
                # At most an epoch, so that no claim uses up more.
                lane += self._deal(min(MANY_UPDATES * count, self.order.length) - _size(lane))

    @property
    def _free(self) -> list[tuple[int, int]]:
        """The places of the epoch to come that are not covered yet."""
        length = self.order.length
        covered = [(0, 0), *self._early, (length, length)]
        return [(end, first) for (_, end), (first, _) in pairwise(covered) if end < first]

    def _early_places(self, peer: str) -> Iterator[Piece]:
        """Return the places that a peer takes from the epoch that has not begun."""
        start = self.order.first_place(self.begun, peer)
        free = self._free
        for first, end in free:
            if end > start:
                yield self.begun, max(first, start), end
        for first, end in free:
            if first < start:
                yield self.begun, first, min(end, start)

    def _deal(self, count: int) -> list[Piece]:
        found: list[Piece] = []
        while (missing := count - _size(found)) > 0:
            if not self._rest:  # the next epoch begins
                self._rest = [(self.begun, first, end) for first, end in self._free]
                self._early = []
                self.begun += 1
            found += _cut(self._rest, missing)
        return found

    def room(self, peer: str) -> int:
        """Return the number of places in a peer's lane."""
        return _size(self._lanes.get(peer, []))

    def places(self, peer: str) -> Iterator[Piece]:
        """Return the places that a peer takes next, in order, until all of the epoch that has not begun are used up."""
        yield from self._lanes.get(peer, ())
        yield from self._early_places(peer)

    # ------------------------------------------------------------------ states

    @property
    def identity(self) -> dict[str, int]:
        """The values that all peers need alike."""
        return {"scheme": SCHEME, "length": self.order.length, "seed": self.order.seed}

    def saved(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return {
            **self.identity,
            "begun": self.begun,
            "lanes": {peer: [list(piece) for piece in lane] for peer, lane in self._lanes.items()},
            "absent": dict(sorted(self._absent.items())),
            "rest": [list(piece) for piece in self._rest],
            "early": [list(each) for each in self._early],
        }

    def is_of(self, saved: object) -> bool:
        """Return whether saved values are of the same data."""
        return isinstance(saved, Mapping) and all(
            saved.get(name) == own for name, own in self.identity.items()
        )

    def loaded(self, saved: object) -> EpochPlan:
        """Return a plan from the values of :meth:`saved`, which may come from another peer.

        Raises:
            ValueError: they are malformed, or of other data.
        """
        try:
            values = msgspec.convert(saved, _SavedPlan)
        except msgspec.ValidationError:  # it quotes the peer, whose words a terminal must not obey
            raise ValueError("data: it is no plan of an epoch, or a value in it is malformed") from None
        if not self.is_of(saved):
            raise ValueError(f"data: it is of other data than {self.identity}")
        pieces = [*values.rest, *chain.from_iterable(values.lanes.values())]
        if len(pieces) + len(values.early) > MAX_PIECES:
            raise ValueError(f"data: it has more than {MAX_PIECES} pieces")
        spans = [*((first, end) for _, first, end in pieces), *values.early]
        is_dealt = all(0 <= epoch < values.begun for epoch, _, _ in pieces)
        if not is_dealt or not all(0 <= first < end <= self.order.length for first, end in spans):
            raise ValueError("data: a piece of its plan is out of range")
        if not values.absent.keys() <= values.lanes.keys():
            raise ValueError("data: members are absent that have no lane")
        if _joined(values.early) != values.early:
            raise ValueError("data: the places that are covered early are out of order")
        found = EpochPlan(self.order)
        found.begun, found._lanes, found._absent = values.begun, values.lanes, values.absent
        found._rest, found._early = values.rest, values.early
        return found


def _size(pieces: list[Piece]) -> int:
    return sum(end - first for _, first, end in pieces)


def _cut(pieces: list[Piece], count: int) -> list[Piece]:
    """Remove ``count`` places from the front of some pieces, or all if there are fewer; return them."""
    found: list[Piece] = []
    while pieces and count > 0:
        epoch, first, end = pieces[0]
        middle = min(end, first + count)
        found.append((epoch, first, middle))
        count -= middle - first
        if middle == end:
            del pieces[0]
        else:
            pieces[0] = (epoch, middle, end)
    return found


def _joined(places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same places in ascending order, in as few intervals as there can be."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(places):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return found
