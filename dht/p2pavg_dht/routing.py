"""The routing table: k-buckets of contacts that have answered, and backoff for contacts that have not.

After Maymounkov & Mazières (2002), section 2.4: a bucket keeps its oldest contacts. A peer that has been up
for an hour is likely to be up for another, and a flood of new identities cannot displace it. A newcomer enters
a full bucket only in place of a contact that has stopped answering. A peer enters only after it has answered a
call of this peer.

All times here are seconds on a monotonic clock.

No I/O, no clock.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from heapq import nsmallest

from p2pavg_dht.identity import Contact

# The XOR metric: peers and keys are points of one 256-bit space, and the distance of two points is their XOR.
#
# After Maymounkov & Mazières, "Kademlia" (IPTPS 2002), section 2.1. Points are SHA-256 hashes, so peer ids and keys
# do not cluster, however they were made.

# Copies of a record (k of the paper's section 2.2, there 20 for file sharing on modems). Readiness is
# renewed every TTL/3, and 30 % dead peers leave all 8 copies dead once in 15,000.
K = 8
BITS = 256


@lru_cache(maxsize=4096)
def peer_point(peer_id: str) -> int:
    """Return the point of a peer: SHA-256 of its id's text."""
    return int.from_bytes(sha256(peer_id.encode()).digest(), "big")


def key_point(key: bytes) -> int:
    """Return the point of a key: SHA-256 of its bytes."""
    return int.from_bytes(sha256(key).digest(), "big")


def point_bytes(point: int) -> bytes:
    """Encode a point for the wire: 32 bytes, big-endian."""
    return point.to_bytes(BITS // 8, "big")


def bucket_of(own: int, other: int) -> int:
    """Return the bucket in which `own` keeps `other`: the bit length of their distance, 0 for the same point."""
    return (own ^ other).bit_length()


def flipped(own: int, bucket: int) -> int:
    """Return the point in `bucket` (1 to 256) that differs from `own` in one bit only."""
    return own ^ (1 << (bucket - 1))


def nearest(contacts: Iterable[Contact], point: int, count: int = K) -> list[Contact]:
    """Return the `count` contacts nearest to `point`, nearest first."""
    return nsmallest(count, contacts, key=lambda contact: peer_point(contact.peer_id) ^ point)


# The paper's k = 20. It is more than K, so that K live contacts remain if some of them are dead.
BUCKET_CAPACITY = 20
TOTAL_CONTACTS = 1024
# A larger network is estimated, not counted: some buckets are full then, and not all of its peers are known.
COUNTED = 48
# Lookups of the own point find the K nearest peers, and are found by as many on the other side.
ESTIMATE_FROM = 16
MOST_PEERS = 1 << 24
FIRST_BACKOFF = 2.0
LONGEST_BACKOFF = 300.0
# A contact is given up after 2 + 4 + ... + 128 s and the calls between: about five minutes of silence.
MOST_FAILURES = 8
MOST_BACKOFFS = 1024
# A contact that has not answered for so long is called to check that it is still there.
CHECK_INTERVAL = 120.0
# A peer that calls this one but does not answer calls is tried again at most this often.
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
    began: float
    last_failure: float

    @property
    def over_at(self) -> float:
        return self.began + min(LONGEST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(self.failures - 1, 10))


class RoutingTable:
    """The contacts of the peer `own_id`. Bounded: 20 in a bucket, 1024 in all, 1024 in backoff."""

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self._own_point = peer_point(own_id)
        # A bucket is there from its first contact on: a run of a thousand peers fills about ten of them.
        self._buckets: dict[int, dict[str, _Known]] = {}
        # By contact, not by peer id: a wrong address that a stranger has named must not affect the right one.
        self._backoffs: dict[Contact, _Backoff] = {}
        self.met = 0
        """The number of contacts that have entered the table so far."""

    def live(self) -> list[Contact]:
        """Return the contacts that answered their last call. In each bucket, the longest known come first."""
        return [known.contact for known in self._all() if self._live(known)]

    def nearest(self, point: int, count: int = K) -> list[Contact]:
        """Return the `count` live contacts nearest to `point`, nearest first."""
        return nearest(self.live(), point, count)

    def prefer_live(self, contact: Contact) -> Contact:
        """Return the live contact of the same peer, whose addresses are proved; `contact` if there is none."""
        known = self._known(contact.peer_id)
        return known.contact if known and self._live(known) else contact

    def usable(self, contact: Contact, now: float) -> bool:
        """Return whether an operation may call `contact`: it is not this peer itself, and not in backoff."""
        backoff = self._backoffs.get(contact)
        return contact.peer_id != self._own_id and (backoff is None or now >= backoff.over_at)

    def wanted(self, contact: Contact, now: float) -> bool:
        """Return whether to call `contact`, which has just called this peer or was named to it."""
        known = self._known(contact.peer_id)
        if contact.peer_id == self._own_id or (known and self._live(known)):
            return False
        backoff = self._backoffs.get(contact)
        if backoff is not None and now < backoff.last_failure + FORGIVENESS_INTERVAL:
            return False
        return known is not None or self._has_room(self._bucket(contact.peer_id))

    def update_addresses(self, contact: Contact) -> None:
        """Note the new addresses that an authenticated, live contact has announced itself."""
        known = self._known(contact.peer_id)
        if known and self._live(known) and contact.addresses:
            known.contact = contact

    def succeeded(self, contact: Contact, now: float) -> bool:
        """Note an answer of `contact` at `now`. Return whether it is a new or recovered live contact."""
        known = self._known(contact.peer_id)
        recovered = known is not None and not self._live(known)
        self._backoffs.pop(contact, None)
        if known is None:
            return self._enter(self._bucket(contact.peer_id), contact, now)
        if recovered:
            # The contact may have answered at a new address.
            self._backoffs.pop(known.contact, None)
            known.contact = contact
        known.last_answer = now
        return recovered

    def failed(self, contact: Contact, now: float) -> None:
        """Note that a call to `contact` has failed at `now`. It is not named to others until it answers again."""
        earlier, failures, began = self._backoffs.pop(contact, None), 1, now
        if earlier is not None:
            # All calls that are under way fail by one silence, of the other peer or of this one. They are one failure:
            # a dozen of them would give up a peer that stood still for ten seconds.
            is_same = now < earlier.over_at
            failures, began = (earlier.failures, earlier.began) if is_same else (earlier.failures + 1, now)
        known = self._known(contact.peer_id)
        if failures >= MOST_FAILURES and known is not None and known.contact == contact:
            del self._bucket(contact.peer_id)[contact.peer_id]
        self._backoffs[contact] = _Backoff(failures, began, now)
        if len(self._backoffs) > MOST_BACKOFFS:
            # Dictionaries keep their order, so the first one failed longest ago.
            del self._backoffs[next(iter(self._backoffs))]

    def due(self, now: float) -> list[Contact]:
        """Return the contacts to call at `now`: their backoff is over, or they have not answered for long."""
        return [known.contact for known in self._all() if self._due_at(known) <= now]

    def buckets_to_refresh(self) -> list[int]:
        """Return the numbers of the buckets to refresh after a lookup of this peer's own point, nearest first.

        The lookup of the own point finds the K nearest peers, and so every peer in the buckets nearer than
        theirs. The remaining buckets are refreshed (section 2.3 of the paper, joining), unless they have K
        live contacts already. The list is empty while fewer than K peers are known, because the lookup of the
        own point then asks every peer.
        """
        surroundings = self.nearest(self._own_point, K)
        if len(surroundings) < K:
            return []
        first = bucket_of(self._own_point, peer_point(surroundings[-1].peer_id))
        lives = {number: sum(map(self._live, bucket.values())) for number, bucket in self._buckets.items()}
        return [number for number in range(first, BITS + 1) if lives.get(number, 0) < K]

    def network_size(self) -> int:
        """Return about how many peers the network has, this one included.

        A network of up to COUNTED peers is counted, as far as it is known. A larger one is estimated from the
        distance of the ESTIMATE_FROM nearest peers: their points are random, so n peers have the k-th nearest one
        at k/n of the space. The standard error is a quarter. Identities that someone makes near this peer raise the
        number for this peer alone, so it may only choose where to look first.
        """
        live = self.live()
        if len(live) < COUNTED:
            return len(live) + 1
        distances = nsmallest(ESTIMATE_FROM, (self._own_point ^ peer_point(c.peer_id) for c in live))
        estimate = (ESTIMATE_FROM - 1) * (1 << BITS) // max(distances[-1], 1)
        return max(min(estimate, MOST_PEERS), len(live)) + 1

    def _due_at(self, known: _Known) -> float:
        backoff = self._backoffs.get(known.contact)
        return backoff.over_at if backoff else known.last_answer + CHECK_INTERVAL

    def _known(self, peer_id: str) -> _Known | None:
        return self._bucket(peer_id).get(peer_id)

    def _live(self, known: _Known) -> bool:
        return not self._backoffs or known.contact not in self._backoffs

    def _all(self) -> Iterator[_Known]:
        return (known for number in sorted(self._buckets) for known in self._buckets[number].values())

    def _bucket(self, peer_id: str) -> dict[str, _Known]:
        return self._buckets.setdefault(bucket_of(self._own_point, peer_point(peer_id)), {})

    def _enter(self, bucket: dict[str, _Known], contact: Contact, now: float) -> bool:
        if contact.peer_id == self._own_id or not self._has_room(bucket):
            return False
        weakest = self._weakest(bucket)
        if self._full(bucket) and weakest is not None:
            del bucket[weakest.peer_id]
        bucket[contact.peer_id] = _Known(contact, now)
        self.met += 1
        return True

    def _has_room(self, bucket: dict[str, _Known]) -> bool:
        return not self._full(bucket) or self._weakest(bucket) is not None

    def _full(self, bucket: dict[str, _Known]) -> bool:
        return len(bucket) >= BUCKET_CAPACITY or sum(map(len, self._buckets.values())) >= TOTAL_CONTACTS

    def _weakest(self, bucket: dict[str, _Known]) -> _Known | None:
        failing = [known for known in bucket.values() if not self._live(known)]
        return max(failing, key=lambda known: self._backoffs[known.contact].failures, default=None)
