"""The iterative lookup: it decides which peers to ask next, and when enough of them have answered.

After Maymounkov & Mazières (2002), section 2.3: ask the nearest known peers, and learn nearer ones from their
answers, until the K nearest live peers have all answered. Three things differ:

- A lookup runs over PATHS disjoint paths, after Baumgart & Mies, "S/Kademlia" (2007), lookup over disjoint
  paths. The contacts that are known at the start are dealt to the paths. What a contact names is known to
  its own path only, and each contact is asked by one path only. So a hostile contact captures one path: the
  invented contacts that it names are no concern of the others. Each path has an equal part of the K places,
  its *share*, and goes on until the nearest contacts of its own have answered. Then contacts of all paths are
  asked until the K nearest of all have answered. Only asking reserves a contact. A path that names a contact
  takes it from no other path.
- The asking peer counts as a peer that has answered. In a network of K peers, each peer holds every record.
- A call that takes longer than `HEDGE_DELAY` is *stalled*. Then the next nearest peer is asked in addition.
  `Lookup.finished` says when the lookup no longer waits for stalled calls. This way a dead peer costs half a
  second instead of the whole timeout of a call.

Times are seconds on a monotonic clock.

No I/O, no clock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

from p2pavg_dht.identity import Contact
from p2pavg_dht.routing import K, nearest

# The paper's alpha: the number of parallel calls while answers still bring nearer peers.
ALPHA = 4
# One call of each path at a time makes ALPHA, and two make K. With 30 % hostile peers and two steps to the nearest
# peers, all of four paths are captured in (1 - 0.7^2)^4 = 7 % of lookups. Each path keeps two of the K places.
PATHS = 4
HEDGE_DELAY = 0.5
PATIENCE = 0.3
"""Seconds for which a lookup is patient: invented contacts would delay it by HEDGE_DELAY for each of its turns."""
# The limit of calls of one lookup. Malicious peers can name invented peers that are ever nearer, so each path has
# an equal part of it.
MOST_CALLS = 64

# The contacts that have answered, of each path.
Ends: TypeAlias = Sequence[Sequence[Contact]]


class _State(Enum):
    ASKED = auto()
    STALLED = auto()
    ANSWERED = auto()
    FAILED = auto()


@dataclass(slots=True, eq=False)
class _Path:
    wide: bool
    calls: int = 0
    known: dict[str, Contact] = field(default_factory=dict)
    # Paths without a contact at the start. They share what the first contact of this path names.
    empty: "list[_Path]" = field(default_factory=list)


@dataclass(slots=True)
class _LookupCall:
    contact: Contact
    path: _Path
    state: _State
    asked_at: float


class _Calls:
    """The calls of a lookup, and the contacts that are taken: their calls are under way, or answered."""

    def __init__(self) -> None:
        self._calls: dict[Contact, _LookupCall] = {}
        self._taken: dict[str, Contact] = {}

    def begin(self, path: _Path, contact: Contact, now: float) -> None:
        self._calls[contact] = _LookupCall(contact, path, _State.ASKED, now)
        self._taken[contact.peer_id] = contact
        path.calls += 1

    def answer(self, contact: Contact) -> _Path:
        """Note an answer of `contact`, which may have stalled, and return the path that has asked it."""
        call = self._calls[contact]
        call.state = _State.ANSWERED
        # A stalled call may answer late, when another address of the peer is already asked.
        self._taken[contact.peer_id] = contact
        # The path may have heard of another address meanwhile. This one is right.
        call.path.known[contact.peer_id] = contact
        return call.path

    def give_up(self, contact: Contact, state: _State) -> None:
        """Note that the call to `contact` has stalled or failed. Other addresses of its peer may be tried."""
        self._calls[contact].state = state
        if self._taken.get(contact.peer_id) == contact:
            del self._taken[contact.peer_id]

    def is_free(self, contact: Contact) -> bool:
        """Return whether `contact` may be asked: its peer is not taken, and it was not asked itself."""
        return contact.peer_id not in self._taken and contact not in self._calls

    def is_lost(self, contact: Contact) -> bool:
        """Return whether `contact` was asked in vain."""
        return contact in self._calls and self._taken.get(contact.peer_id) != contact

    def taken(self, path: _Path | None = None) -> list[Contact]:
        """Return the contacts that are taken, by `path` or by all paths."""
        return [c for c in self._taken.values() if path is None or self._calls[c].path is path]

    def having(self, state: _State, path: _Path | None = None) -> list[_LookupCall]:
        """Return the calls in `state`, of `path` or of all paths."""
        return [c for c in self._calls.values() if c.state is state and (path is None or c.path is path)]


class Lookup:
    """A search for the K peers nearest to `point`, made by the peer `own_id` over `paths` paths, at most K.

    The contacts in `seeds` are dealt to the paths. If `starts` are given, the `ends` of an earlier lookup with as
    many paths, each path begins with its own of these, and the first one gets the remaining seeds too. With `wide`,
    all of the K nearest are asked at once from the beginning. Use it if they are known already. A `patient` lookup has
    ALPHA calls under way at most for PATIENCE, so that later calls can tell what earlier answers have named.
    """

    def __init__(
        self,
        point: int,
        seeds: Iterable[Contact],
        *,
        own_id: str,
        wide: bool,
        patient: bool = False,
        paths: int = PATHS,
        starts: Ends = (),
    ) -> None:
        self._point = point
        self._own = Contact(own_id)
        self._share = -(-K // paths)
        self._narrow = max(1, ALPHA // paths)
        self._patience = PATIENCE if patient else 0.0
        self._patient_until: float | None = None  # the first calls begin the time
        self._most_calls = MOST_CALLS // paths
        self._calls = _Calls()
        known = {contact.peer_id: contact for contact in seeds}
        known.pop(own_id, None)
        begun = {contact.peer_id for hand in starts for contact in hand}
        # These have answered earlier calls, or the user named them.
        self._proven = known.keys() | begun
        wide = wide or len(self._proven) < K
        self._paths = [_Path(wide) for _ in range(paths)]
        if begun:
            hands = [list(hand) for hand in starts]
            hands[0] += [contact for contact in known.values() if contact.peer_id not in begun]
            # The path that had this peer among its places has found one contact less than the others.
            min(hands, key=len).append(self._own)
        elif len(known) < K:
            hands = _deal(known.values(), point, paths)
            hands[-1].append(self._own)
        else:
            hands = _deal([self._own, *known.values()], point, paths)
        self._begin(hands)
        if not begun and known:
            for number in range(len(known), paths):
                self._paths[number % len(known)].empty.append(self._paths[number])

    def next_calls(self, now: float) -> list[Contact]:
        """Return the contacts to ask at `now`, nearest first, and count them as asked."""
        chosen = []
        if self._patient_until is None:
            self._patient_until = now + self._patience
        wide, most_at_once = (self._narrow, ALPHA) if now < self._patient_until else (self._share, K)
        for path in self._paths:
            room = (wide if path.wide else self._narrow) - self._under_way(path)
            for contact in self._open_share(path)[: max(0, room)]:
                self._calls.begin(path, contact, now)
                chosen.append(contact)
        # Once each path has asked its share, the places that are left go to the
        # nearest of all, whichever path knows them.
        for contact in self._open_rest()[: max(0, most_at_once - self._under_way())]:
            # Several paths may know the contact. The one that has made the fewest calls asks it.
            knowing = [path for path in self._paths if contact in self._open(path)]
            if knowing:  # none if the calls of this loop were the last ones of these paths
                self._calls.begin(min(knowing, key=lambda path: path.calls), contact, now)
                chosen.append(contact)
        return nearest(chosen, self._point, len(chosen))

    def answered(self, contact: Contact, closer: Iterable[Contact]) -> None:
        """Note that `contact` has answered, and has named at most K peers nearer to the point."""
        path = self._calls.answer(contact)
        named = list(closer)
        heirs = [path, *path.empty] if named else [path]
        for heir, hand in zip(heirs, _deal(named, self._point, len(heirs)), strict=True):
            self._learn(heir, hand)
        if named:
            path.empty = []
        # The path has shown that it leads somewhere, so it asks its whole share at once from now on.
        path.wide = True

    def failed(self, contact: Contact) -> None:
        """Note that the call to `contact` has failed."""
        self._calls.give_up(contact, _State.FAILED)

    def notice_stalls(self, now: float) -> None:
        """Mark the calls that have been under way for HEDGE_DELAY at `now` as stalled."""
        for call in self._calls.having(_State.ASKED):
            if now >= call.asked_at + HEDGE_DELAY:
                self._calls.give_up(call.contact, _State.STALLED)

    @property
    def next_stall(self) -> float:
        """The moment at which the next call will be stalled; infinity if no call is under way."""
        asked = self._calls.having(_State.ASKED)
        return min((call.asked_at + HEDGE_DELAY for call in asked), default=float("inf"))

    @property
    def stalled(self) -> list[Contact]:
        """The contacts whose calls are stalled, which are given up if the lookup ends now."""
        return [call.contact for call in self._calls.having(_State.STALLED)]

    @property
    def finished(self) -> bool:
        """True if the lookup need not wait any longer.

        That is so if the nearest contacts of each path, and the K nearest of all, have answered, and if one of
        these holds:

        - No call is stalled.
        - A majority of the K nearest has answered. Any two majorities of the same K peers overlap, so a lookup
          finds a record that was stored at a majority. Contacts that a path was only told of fill at most the
          share of that path. So contacts that one path invents neither make a majority nor prevent it.
        - K contacts have answered. Two such lookups overlap too, unless one of them has passed over K live peers
          that the other has asked.
        """
        under_way = {call.contact for call in self._calls.having(_State.ASKED)}
        for front in (*map(self._front, self._paths), self._front_of_all()):
            # Something near is still asked, or could be.
            if any(contact in under_way or self._calls.is_free(contact) for contact in front):
                return False
        return not self.stalled or len(self._answered()) >= K or self._majority()

    @property
    def ends(self) -> Ends:
        """The nearest contacts of each path that have answered, without this peer; twice its share at most."""
        hands = []
        for path in self._paths:
            others = (contact for contact in self._answered(path) if contact != self._own)
            hands.append(tuple(nearest(others, self._point, 2 * self._share)))
        return tuple(hands)

    def _majority(self) -> bool:
        there = []
        for path in self._paths:
            stalled = [call.contact for call in self._calls.having(_State.STALLED, path)]
            contacts = [*self._answered(path), *stalled]
            there += [c for c in contacts if c.peer_id in self._proven or c == self._own]
            named = (c for c in contacts if c.peer_id not in self._proven and c != self._own)
            there += nearest(named, self._point, self._share)
        answered = set(self._answered())
        front = nearest(there, self._point)
        return 2 * sum(contact in answered for contact in front) > len(front)

    def _begin(self, hands: Sequence[Iterable[Contact]]) -> None:
        for path, hand in zip(self._paths, hands, strict=True):
            for contact in hand:
                if contact == self._own:
                    self._calls.begin(path, contact, 0.0)
                    self._calls.answer(contact)
                    path.calls = 0
            self._learn(path, hand)

    def _learn(self, path: _Path, contacts: Iterable[Contact]) -> None:
        for contact in contacts:
            held = path.known.get(contact.peer_id)
            # A different address of a lost peer may be the right one, so it is tried again.
            if held is None or (self._calls.is_lost(held) and held != contact):
                path.known[contact.peer_id] = contact

    def _open(self, path: _Path) -> list[Contact]:
        """Return the contacts that `path` may ask."""
        if path.calls >= self._most_calls:
            return []
        return [contact for contact in path.known.values() if self._calls.is_free(contact)]

    def _front(self, path: _Path) -> list[Contact]:
        """Return the nearest contacts of `path` that are not asked yet, under way or answered: its share."""
        return nearest([*self._calls.taken(path), *self._open(path)], self._point, self._share)

    def _front_of_all(self) -> list[Contact]:
        """Return the K nearest contacts of all paths that are not asked yet, under way or answered."""
        heard = {c.peer_id: c for path in self._paths for c in self._open(path)}
        return nearest([*self._calls.taken(), *heard.values()], self._point)

    def _open_share(self, path: _Path) -> list[Contact]:
        return [contact for contact in self._front(path) if self._calls.is_free(contact)]

    def _open_rest(self) -> list[Contact]:
        """Return the contacts among the K nearest of all to ask, once no path has one of its share to ask."""
        if any(map(self._open_share, self._paths)):
            return []
        return [contact for contact in self._front_of_all() if self._calls.is_free(contact)]

    def _under_way(self, path: _Path | None = None) -> int:
        return len(self._calls.having(_State.ASKED, path))

    def _answered(self, path: _Path | None = None) -> list[Contact]:
        return [call.contact for call in self._calls.having(_State.ANSWERED, path)]


def _deal(contacts: Iterable[Contact], point: int, count: int) -> list[list[Contact]]:
    """Deal contacts to `count` hands, nearest first, so that all hands are about equally near."""
    every = list(contacts)
    ordered = nearest(every, point, len(every))
    return [ordered[number::count] for number in range(count)]
