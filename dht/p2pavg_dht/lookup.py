"""The iterative lookup: which peers to ask next, and when enough have answered.

After Maymounkov & Mazières (2002), section 2.3: ask the nearest known, learn nearer ones from their answers,
until the K nearest that are there have all answered. Two things differ:

- The asker counts as a peer that has answered; in a network of K everybody holds everything.
- A call that takes longer than `HEDGE_DELAY` is *stalled*: the next nearest peer is asked beside it, and
  the lookup no longer waits for it once a majority of the K nearest has answered. Two majorities of the
  same K meet, so a record stored at one is found at another, while a dead peer costs half a second rather
  than the whole time limit of a call. Short of a majority the stalled ones are waited for.

Times are seconds on a monotonic clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from p2pavg_dht.contact import Contact
from p2pavg_dht.distance import K, nearest

# The paper's alpha: calls in flight while the answers still bring nearer peers.
ALPHA = 4
HEDGE_DELAY = 0.5
# Liars can name made-up peers that are ever nearer; at some point we stop following.
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
    """One search for the K peers nearest to `point`, seen from the peer `own_id`.

    `wide` asks all of the K nearest at once from the beginning: right when they are known already.
    """

    def __init__(self, point: int, seeds: Iterable[Contact], *, own_id: str, wide: bool) -> None:
        self._point = point
        self._candidates = {own_id: _Candidate(Contact(own_id), _State.ANSWERED)}
        self._own_id = own_id
        self._calls = 0
        self._add(seeds)
        self._wide = wide or len(self._candidates) <= K

    def next_calls(self, now: float) -> list[Contact]:
        """Whom to ask at `now`; they count as asked."""
        room = (K if self._wide else ALPHA) - len(self._in(_State.ASKED))
        room = min(room, MOST_CALLS - self._calls)
        chosen = [c for c in self._front() if c.state is _State.HEARD][: max(0, room)]
        for candidate in chosen:
            candidate.state, candidate.asked_at = _State.ASKED, now
        self._calls += len(chosen)
        return [candidate.contact for candidate in chosen]

    def answered(self, peer_id: str, closer: Iterable[Contact]) -> None:
        """`peer_id` has answered and named peers nearer to the point (at most K count)."""
        self._candidates[peer_id].state = _State.ANSWERED
        before = {candidate.peer_id for candidate in self._front()}
        self._add(list(closer)[:K])
        # Nothing nearer came: the K nearest are known, so ask all that are left of them at once.
        if before == {candidate.peer_id for candidate in self._front()}:
            self._wide = True

    def failed(self, peer_id: str) -> None:
        """`peer_id` has not answered and will not."""
        self._candidates[peer_id].state = _State.FAILED

    def notice_stalls(self, now: float) -> None:
        """Calls that have been under way for HEDGE_DELAY at `now` no longer hold others up."""
        for candidate in self._in(_State.ASKED):
            if now >= candidate.asked_at + HEDGE_DELAY:
                candidate.state = _State.STALLED

    @property
    def next_stall(self) -> float:
        """When `notice_stalls` will have something to notice; infinity when no call is under way."""
        return min((c.asked_at + HEDGE_DELAY for c in self._in(_State.ASKED)), default=float("inf"))

    @property
    def stalled(self) -> list[Contact]:
        """The contacts whose calls are given up if the lookup ends now."""
        return [candidate.contact for candidate in self._in(_State.STALLED)]

    @property
    def finished(self) -> bool:
        """Whether waiting longer would not change much: see the module's text."""
        front = self._front()
        if any(candidate.state is _State.ASKED for candidate in front):
            return False
        if self._calls < MOST_CALLS and any(candidate.state is _State.HEARD for candidate in front):
            return False
        return not self._in(_State.STALLED) or self._majority()

    @property
    def calls(self) -> int:
        """How many calls have been made."""
        return self._calls

    def _majority(self) -> bool:
        there = [c for c in self._candidates.values() if c.state is not _State.FAILED]
        front = nearest(there, self._point)
        return 2 * sum(c.state is _State.ANSWERED for c in front) > len(front)

    def _front(self) -> list[_Candidate]:
        """The K nearest that may still answer in time."""
        hopeless = _State.FAILED, _State.STALLED
        return nearest((c for c in self._candidates.values() if c.state not in hopeless), self._point)

    def _in(self, state: _State) -> list[_Candidate]:
        return [candidate for candidate in self._candidates.values() if candidate.state is state]

    def _add(self, contacts: Iterable[Contact]) -> None:
        for contact in contacts:
            held = self._candidates.get(contact.peer_id)
            # Somebody else may know the address at which a peer does answer.
            if held is None or (held.state is _State.FAILED and held.contact.addresses != contact.addresses):
                self._candidates[contact.peer_id] = _Candidate(contact)
