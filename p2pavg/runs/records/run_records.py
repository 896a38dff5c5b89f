"""The records of one run, as one of its peers publishes and finds them.

In a run that has an authority, they are encrypted to the run, and carry the publisher's certificate of membership;
records of other peers are left out, and are not stored here under the run's keys. In every run, peers that finished a
round with this one get its records directly, besides those that are nearest to the key, and are asked directly. So a
stranger that holds the places near a key cannot keep peers apart that know each other. Records of peers that are
excluded from the run are left out in every run.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import trio
from msgspec import structs

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import CLOCK_SKEW_SECONDS
from p2pavg.group.candidate import Candidate
from p2pavg.runs.membership.membership import Membership
from p2pavg.runs.membership.sealing import NONCE_BYTES, MemberRecord, seal, sealed_key, unseal
from p2pavg_dht import Contact, Published, Record, RecordNode

logger = logging.getLogger(__name__)

MAX_MATES = 16
"""Peers that are called besides those that are nearest to a key: members of the last round."""
MAX_REFUSED = 256
"""Publishers whose refusals are logged, once each. Strangers can invent any number of publishers."""
OPENED_AT_ONCE = 32
"""Records that are opened between two checkpoints, in 3 ms at most."""


class RunRecords:
    """A record node as the peers of one run use it. Keys and values are those among the run's peers.

    Args:
        membership: ``None`` if the run is open to anybody.
        wall_clock: returns seconds since 1970.
        excluded: returns the reason for which a peer is excluded from the run, or ``None``. It is called for each
            publisher that has a genuine record of the run.
    """

    def __init__(
        self,
        node: RecordNode,
        membership: Membership | None,
        wall_clock: Callable[[], float],
        *,
        excluded: Callable[[str], str | None] = lambda _peer_id: None,
    ) -> None:
        self._node = node
        self._membership = membership
        self._wall_clock = wall_clock
        self._excluded = excluded
        self._mates: tuple[Contact, ...] = ()
        self.companions: tuple[Contact, ...] = ()
        """The other members of the last round, with their addresses."""
        self._refused: dict[str, str] = {}
        self._guarded: set[bytes] = set()
        self._kept = b""
        """Key, as it is stored, under which places are kept for others."""
        self._ttls: dict[bytes, float] = {}
        self._guards = ExitStack()

    @property
    def certificate(self) -> bytes:
        """This peer's certificate; empty if the run is open to anybody."""
        return b"" if self._membership is None else self._membership.access.certificate

    @property
    def membership(self) -> Membership | None:
        """The members of the run; ``None`` if it is open to anybody."""
        return self._membership

    @property
    def network_size(self) -> int:
        """About how many peers the network has; the run has no more."""
        return self._node.network_size

    def met(self, members: Iterable[Candidate]) -> None:
        """Note the other members of a round that has ended."""
        found = [Contact(member.peer_id, member.addresses) for member in members]
        self.companions = tuple(found)
        # At random: if each member chose the same ones, the others would get no record directly.
        if len(found) > MAX_MATES:
            found = secrets.SystemRandom().sample(found, MAX_MATES)
        self._mates = tuple(found)

    async def publish(self, key: bytes, value: bytes, *, ttl: float) -> Published:
        """Publish a value; return the other members' live records under the key.

        A record that comes back has the key and value among the run's peers. Its signature, which was checked, is that
        of the record as it is stored.
        """
        if self._membership is None:
            return await self._node.publish(key, value, ttl=ttl, also=self._mates)
        # This peer may be a keeper of the key itself. From now on it stores only members' records under it.
        access, stored = self._membership.access, self._guard(key)
        self._ttls[stored] = ttl
        sealed = seal(
            access.secret,
            stored,
            access.peer_id,
            MemberRecord(access.certificate, value).encode(),
            # A nonce must not be used twice with one key. Random ones suffice,
            # since each publisher has a key of its own.
            secrets.token_bytes(NONCE_BYTES),
        )
        published = await self._node.publish(stored, sealed, ttl=ttl, also=self._mates)
        opened = await self._opened_in_turns(key, published.records)
        return Published(published.stored, published.refused, opened)

    def keep_places(self, key: bytes) -> None:
        """Keep places here for the records of the members of the last round, before this peer publishes one itself."""
        self._kept = self.stored_key(key)
        self._node.keep_places(self._kept, self._mates)

    def keep_no_places(self) -> None:
        """Keep places no longer."""
        kept, self._kept = self._kept, b""
        if kept:
            self._node.keep_places(kept, ())

    async def withdraw(self, key: bytes) -> None:
        """Withdraw this peer's record under a key."""
        await self._node.withdraw(self.stored_key(key))

    def release(self, key: bytes) -> None:
        """Renew this peer's record under a key no more, and leave it where it is stored until it expires."""
        self._node.release(self.stored_key(key))

    async def find(self, key: bytes) -> tuple[Record, ...]:
        """Return the members' live records under a key, as :meth:`publish` does."""
        found = await self._node.find(self.stored_key(key), also=self._mates)
        return await self._opened_in_turns(key, found)

    def held(self, key: bytes) -> tuple[Record, ...]:
        """Return the members' records under a key that this peer stores, withdrawals included."""
        return self._opened(key, self._node.held(self.stored_key(key)))

    def watch(self, key: bytes, changed: Callable[[], None]) -> None:
        """Call ``changed`` when other peers have stored records under a key here."""
        self._node.watch(self._guard(key), changed)

    def unwatch(self, key: bytes) -> None:
        """End a :meth:`watch`."""
        self._node.unwatch(self.stored_key(key))

    def close(self) -> None:
        """Guard none of the run's keys any longer."""
        self._guards.close()
        self._guarded.clear()

    def stored_key(self, key: bytes) -> bytes:
        """Return the key under which records are stored, by their key among the run's peers."""
        return key if self._membership is None else sealed_key(self._membership.access.secret, key)

    def _guard(self, key: bytes) -> bytes:
        """Let only members store records under a key here; return the key under which they are stored."""
        stored = self.stored_key(key)
        if self._membership is not None and stored not in self._guarded:
            self._guarded.add(stored)
            self._guards.enter_context(self._node.guarded(stored, self._why_refused))
        return stored

    async def _opened_in_turns(self, key: bytes, records: Sequence[Record]) -> tuple[Record, ...]:
        """Open records that came over the network: hostile keepers can send thousands, each with a signature."""
        opened: list[Record] = []
        for start in range(0, len(records), OPENED_AT_ONCE):
            opened += self._opened(key, records[start : start + OPENED_AT_ONCE])
            # Other tasks get their turn before the next ones.
            await trio.lowlevel.checkpoint()
        return tuple(opened)

    def _opened(self, key: bytes, records: Sequence[Record]) -> tuple[Record, ...]:
        opened = []
        for record in records:
            # A withdrawal has no value to open. It must be passed on, so that boards forget the entry.
            if record.withdrawn:
                opened.append(structs.replace(record, key=key))
                continue
            try:
                value = self._open(record)
            except RemoteProtocolError as error:
                self._note_refused(record.publisher, str(error))
            else:
                opened.append(structs.replace(record, key=key, value=value))
        return tuple(opened)

    def _open(self, record: Record) -> bytes:
        """Return the value of a member's record.

        Raises:
            RemoteProtocolError: its publisher is no member or is excluded, or it is not encrypted to the run.
        """
        # Decrypted first: `excluded` is asked about publishers of genuine
        # records only, and may note them as met in the run.
        value = self._unsealed(record)
        if (why := self._excluded(record.publisher)) is not None:
            raise RemoteProtocolError(why)
        return value

    def _unsealed(self, record: Record) -> bytes:
        if self._membership is None:
            return record.value
        # Key and publisher are part of what was encrypted, so a record cannot be
        # moved to another key or published by another peer.
        content = unseal(self._membership.access.secret, record.key, record.publisher, record.value)
        found = MemberRecord.decode(content)
        # The secret alone admits no peer: a member that was revoked still knows it.
        why = self._membership.refusal(record.publisher, found.certificate, self._wall_clock())
        if why is not None:
            raise RemoteProtocolError(why)
        # Readers take an empty value for a withdrawal, which this record is not.
        if not found.value:
            raise RemoteProtocolError("a record without a value")
        return found.value

    def _why_refused(self, record: Record) -> str | None:
        try:
            self._open(record)
        except RemoteProtocolError as error:
            return str(error)
        # A member could otherwise hold a place for as long as the store allows,
        # with a record whose kind lives for seconds.
        most = self._ttls.get(record.key, math.inf) + CLOCK_SKEW_SECONDS
        if record.expiration_time > self._wall_clock() + most:
            return "it expires later than the records of this kind"
        return None

    def _note_refused(self, publisher: str, reason: str) -> None:
        # The same record is read at each look.
        if self._refused.get(publisher) == reason:
            return
        if publisher not in self._refused and len(self._refused) >= MAX_REFUSED:
            return
        self._refused[publisher] = reason
        logger.info("a record of %s does not count: %s", publisher, reason)
