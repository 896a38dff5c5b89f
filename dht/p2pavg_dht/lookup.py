"""The iterative lookup: it decides which peers to ask next, and when enough of them have answered.

After Maymounkov & Mazières (2002), section 2.3: ask the nearest known peers, and learn nearer ones from their
answers, until the K nearest live peers have all answered. Two things differ:

- The asking peer counts as a peer that has answered. In a network of K peers, each peer holds every record.
- A call that takes longer than `HEDGE_DELAY` is *stalled*. Then the next nearest peer is asked in addition.
  When a majority of the K nearest has answered, the lookup no longer waits for stalled calls. Any two
  majorities of the same K peers overlap, so a lookup finds a record that was stored at a majority. This way a
  dead peer costs half a second instead of the whole timeout of a call. Without a majority, the lookup waits
  for the stalled calls.

Times are seconds on a monotonic clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from p2pavg_dht.contact import Contact
from p2pavg_dht.distance import K, nearest

# The paper's alpha: the number of parallel calls while answers still bring nearer peers.
ALPHA = 4
HEDGE_DELAY = 0.5
# The limit of calls of one lookup. Malicious peers can name invented peers that are ever nearer.
MOST_CALLS = 64


class _State(Enum):
    HEARD = auto()
    ASKED = auto()
    STALLED = auto()
    ANSWERED = auto()
    FAILED = auto()


@dataclass(slots=True)
class _Candidate:
    contact: Contact
    state: _State = _State.HEARD
    asked_at: float = 0.0

    @property
    def peer_id(self) -> str:
        return self.contact.peer_id


class Lookup:
    """A search for the K peers nearest to `point`, made by the peer `own_id`.

    With `wide`, all of the K nearest are asked at once from the beginning. Use it if they are known already.
    """

    def __init__(self, point: int, seeds: Iterable[Contact], *, own_id: str, wide: bool) -> None:
        self._point = point
        self._candidates = {own_id: _Candidate(Contact(own_id), _State.ANSWERED)}
        self._own_id = own_id
        self._calls = 0
        self._add(seeds)
        self._wide = wide or len(self._candidates) <= K

    def next_calls(self, now: float) -> list[Contact]:
        """Return the contacts to ask at `now`, and count them as asked."""
        room = (K if self._wide else ALPHA) - len(self._in(_State.ASKED))
        room = min(room, MOST_CALLS - self._calls)
        chosen = [c for c in self._front() if c.state is _State.HEARD][: max(0, room)]
        for candidate in chosen:
            candidate.state, candidate.asked_at = _State.ASKED, now
        self._calls += len(chosen)
        return [candidate.contact for candidate in chosen]

    def answered(self, peer_id: str, closer: Iterable[Contact]) -> None:
        """Note that `peer_id` has answered, and has named peers nearer to the point (at most K count)."""
        self._candidates[peer_id].state = _State.ANSWERED
        before = {candidate.peer_id for candidate in self._front()}
        self._add(list(closer)[:K])
        # No nearer peer was named, so the K nearest are known: ask all remaining ones of them at once.
        if before == {candidate.peer_id for candidate in self._front()}:
            self._wide = True

    def failed(self, peer_id: str) -> None:
        """Note that the call to `peer_id` has failed."""
        self._candidates[peer_id].state = _State.FAILED

    def notice_stalls(self, now: float) -> None:
        """Mark the calls that have been under way for HEDGE_DELAY at `now` as stalled."""
        for candidate in self._in(_State.ASKED):
            if now >= candidate.asked_at + HEDGE_DELAY:
                candidate.state = _State.STALLED

    @property
    def next_stall(self) -> float:
        """The moment at which the next call will be stalled; infinity if no call is under way."""
        return min((c.asked_at + HEDGE_DELAY for c in self._in(_State.ASKED)), default=float("inf"))

    @property
    def stalled(self) -> list[Contact]:
        """The contacts whose calls are stalled, which are given up if the lookup ends now."""
        return [candidate.contact for candidate in self._in(_State.STALLED)]

    @property
    def finished(self) -> bool:
        """True if the lookup need not wait any longer; see the module's docstring."""
        front = self._front()
        if any(candidate.state is _State.ASKED for candidate in front):
            return False
        if self._calls < MOST_CALLS and any(candidate.state is _State.HEARD for candidate in front):
            return False
        return not self._in(_State.STALLED) or self._majority()

    @property
    def calls(self) -> int:
        """The number of calls that were made."""
        return self._calls

    def _majority(self) -> bool:
        there = [c for c in self._candidates.values() if c.state is not _State.FAILED]
        front = nearest(there, self._point)
        return 2 * sum(c.state is _State.ANSWERED for c in front) > len(front)

    def _front(self) -> list[_Candidate]:
        """Return the K nearest candidates whose calls are neither failed nor stalled."""
        hopeless = _State.FAILED, _State.STALLED
        return nearest((c for c in self._candidates.values() if c.state not in hopeless), self._point)

    def _in(self, state: _State) -> list[_Candidate]:
        return [candidate for candidate in self._candidates.values() if candidate.state is state]

    def _add(self, contacts: Iterable[Contact]) -> None:
        for contact in contacts:
            held = self._candidates.get(contact.peer_id)
            # A different address of a failed peer may be the right one, so it is tried again.
            if held is None or (held.state is _State.FAILED and held.contact.addresses != contact.addresses):
                self._candidates[contact.peer_id] = _Candidate(contact)
