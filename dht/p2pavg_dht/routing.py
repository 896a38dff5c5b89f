"""Whom this peer knows: k-buckets of contacts that have answered, and back-off for those that have not.

After Maymounkov & Mazières (2002), section 2.4: a bucket keeps the contacts that have been there longest,
because who has been up for an hour will likely be up for another, and because a flood of new identities
then cannot displace them. A newcomer enters a full bucket only in place of a contact that has stopped to
answer. Nobody enters who has not answered a call of ours.

All times here are seconds on a monotonic clock.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from p2pavg_dht.contact import Contact
from p2pavg_dht.distance import BITS, K, bucket_of, nearest, peer_point

# The paper's k = 20: more than K, so that with some of them dead there are still K to ask.
BUCKET_CAPACITY = 20
TOTAL_CONTACTS = 1024
FIRST_BACKOFF = 2.0
LONGEST_BACKOFF = 300.0
# Given up after 2 + 4 + ... + 256 s: about eight minutes of silence.
MOST_FAILURES = 8
MOST_BACKOFFS = 1024
# A contact that has not been heard for so long is asked whether it is still there.
CHECK_INTERVAL = 120.0
# A peer that calls us but does not answer our calls is tried again this often at most.
FORGIVENESS_INTERVAL = 5.0


@dataclass(slots=True)
class _Known:
    contact: Contact
    last_answer: float

    @property
    def peer_id(self) -> str:
        return self.contact.peer_id


@dataclass(frozen=True, slots=True)
class _Backoff:
    failures: int
    last_failure: float

    @property
    def over_at(self) -> float:
        return self.last_failure + min(LONGEST_BACKOFF, FIRST_BACKOFF * 2.0 ** (self.failures - 1))


class RoutingTable:
    """The contacts of the peer `own_id`. Bounded: 20 a bucket, 1024 in all, 1024 in back-off."""

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self._own_point = peer_point(own_id)
        self._buckets: list[dict[str, _Known]] = [{} for _ in range(BITS + 1)]
        # By contact, not by peer id: a false address that a stranger named must not discredit a true one.
        self._backoffs: dict[Contact, _Backoff] = {}

    def live(self) -> list[Contact]:
        """The contacts that answered when last called, those longest known first in each bucket."""
        return [known.contact for known in self._all() if self._live(known)]

    def nearest(self, point: int, count: int = K) -> list[Contact]:
        """The `count` live contacts nearest to `point`, nearest first."""
        return nearest(self.live(), point, count)

    def prefer_live(self, contact: Contact) -> Contact:
        """The live contact of the same peer, if there is one: its addresses are proved."""
        known = self._known(contact.peer_id)
        return known.contact if known and self._live(known) else contact

    def usable(self, contact: Contact, now: float) -> bool:
        """Whether an operation should call `contact`: not this peer itself, and not in back-off."""
        backoff = self._backoffs.get(contact)
        return contact.peer_id != self._own_id and (backoff is None or now >= backoff.over_at)

    def wanted(self, contact: Contact, now: float) -> bool:
        """Whether `contact`, which has just shown itself, should be called to see whether it answers."""
        known = self._known(contact.peer_id)
        if contact.peer_id == self._own_id or (known and self._live(known)):
            return False
        backoff = self._backoffs.get(contact)
        if backoff is not None and now < backoff.last_failure + FORGIVENESS_INTERVAL:
            return False
        return known is not None or self._has_room(self._bucket(contact.peer_id))

    def update_addresses(self, contact: Contact) -> None:
        """A live contact has said itself, authenticated, where it is now."""
        known = self._known(contact.peer_id)
        if known and self._live(known) and contact.addresses:
            known.contact = contact

    def succeeded(self, contact: Contact, now: float) -> bool:
        """`contact` has answered a call at `now`. Whether that makes it a new or recovered live contact."""
        known = self._known(contact.peer_id)
        recovered = known is not None and not self._live(known)
        self._backoffs.pop(contact, None)
        if known is None:
            return self._enter(self._bucket(contact.peer_id), contact, now)
        if recovered:
            # It may have answered at an address that it did not have before.
            self._backoffs.pop(known.contact, None)
            known.contact = contact
        known.last_answer = now
        return recovered

    def failed(self, contact: Contact, now: float) -> None:
        """A call to `contact` has failed at `now`: nobody is sent there until it has answered again."""
        earlier = self._backoffs.pop(contact, None)
        failures = earlier.failures + 1 if earlier else 1
        known = self._known(contact.peer_id)
        if failures >= MOST_FAILURES and known is not None and known.contact == contact:
            del self._bucket(contact.peer_id)[contact.peer_id]
        self._backoffs[contact] = _Backoff(failures, now)
        if len(self._backoffs) > MOST_BACKOFFS:
            # Dictionaries keep their order: the first failed longest ago.
            del self._backoffs[next(iter(self._backoffs))]

    def due(self, now: float) -> list[Contact]:
        """The contacts to call at `now`: those whose back-off is over and those not heard for long."""
        return [known.contact for known in self._all() if self._due_at(known) <= now]

    def buckets_to_refresh(self) -> list[int]:
        """The buckets, by number, to look into after looking up oneself, the nearest first.

        Looking up oneself finds the K nearest, and so everybody who is nearer than the last of them; buckets
        from there on are looked into (section 2.3 of the paper, joining), unless they have K live contacts
        already, which lead to everybody there. None while fewer than K are known, since then looking up
        oneself asks everybody.
        """
        surroundings = self.nearest(self._own_point, K)
        if len(surroundings) < K:
            return []
        first = bucket_of(self._own_point, peer_point(surroundings[-1].peer_id))
        lives = [sum(map(self._live, bucket.values())) for bucket in self._buckets]
        return [number for number in range(first, BITS + 1) if lives[number] < K]

    def _due_at(self, known: _Known) -> float:
        backoff = self._backoffs.get(known.contact)
        return backoff.over_at if backoff else known.last_answer + CHECK_INTERVAL

    def _known(self, peer_id: str) -> _Known | None:
        return self._bucket(peer_id).get(peer_id)

    def _live(self, known: _Known) -> bool:
        return known.contact not in self._backoffs

    def _all(self) -> Iterator[_Known]:
        return (known for bucket in self._buckets for known in bucket.values())

    def _bucket(self, peer_id: str) -> dict[str, _Known]:
        return self._buckets[bucket_of(self._own_point, peer_point(peer_id))]

    def _enter(self, bucket: dict[str, _Known], contact: Contact, now: float) -> bool:
        if contact.peer_id == self._own_id or not self._has_room(bucket):
            return False
        weakest = self._weakest(bucket)
        if self._full(bucket) and weakest is not None:
            del bucket[weakest.peer_id]
        bucket[contact.peer_id] = _Known(contact, now)
        return True

    def _has_room(self, bucket: dict[str, _Known]) -> bool:
        return not self._full(bucket) or self._weakest(bucket) is not None

    def _full(self, bucket: dict[str, _Known]) -> bool:
        return len(bucket) >= BUCKET_CAPACITY or sum(map(len, self._buckets)) >= TOTAL_CONTACTS

    def _weakest(self, bucket: dict[str, _Known]) -> _Known | None:
        failing = [known for known in bucket.values() if not self._live(known)]
        return max(failing, key=lambda known: self._backoffs[known.contact].failures, default=None)
