"""The spreading of an authority's list of revoked certificates: every member publishes the newest that it has seen."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable

import trio

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import FAREWELL_SECONDS, LOOK_SECONDS, RECORD_LIFE_SECONDS, SPREAD_LOOK_SECONDS
from p2pavg.base.messages import pack
from p2pavg.runs.membership.membership import Membership
from p2pavg.runs.membership.revocation import KnownRevocations, RevocationList, read_revocations
from p2pavg.runs.records.run_records import RunRecords
from p2pavg_dht import Record

logger = logging.getLogger(__name__)


_KEY_DOMAIN = "p2pavg/revoked/3"


def revocations_key(authority: bytes) -> bytes:
    """Return the key under which the members of an authority's runs publish its list."""
    # The list counts in all of them: a run of many members has others beside it, such as one for each shard.
    return hashlib.sha256(pack(_KEY_DOMAIN, authority)).digest()


async def spread(
    records: RunRecords, membership: Membership, revocations: RevocationList, timeout: float
) -> int:
    """Give a list to the members of its authority's runs, and return the number of members that publish it after that.

    It returns as soon as one member does: the others get it from there.

    Args:
        records, membership: of a peer with a certificate of one of the runs.
        timeout: seconds after which it returns in any case.
    """
    key, told = revocations_key(revocations.authority), 0
    membership.known.learn(revocations)
    with trio.move_on_after(timeout):
        while not told:
            published = await records.publish(key, revocations.encode(), ttl=RECORD_LIFE_SECONDS)
            told = sum(
                _number(record, revocations.authority) >= revocations.number for record in published.records
            )
            if not told:
                await trio.sleep(LOOK_SECONDS)
    return told


def _number(record: Record, authority: bytes) -> int:
    try:
        return read_revocations(record.value, authority).number
    except RemoteProtocolError:
        return 0


class Revocations:
    """One peer's part in spreading the list. All users of the authority's runs at this peer share one object."""

    def __init__(self, authority: bytes) -> None:
        self.known = KnownRevocations(authority)
        self._authority = authority
        self._key = revocations_key(authority)
        self._newer = trio.Event()
        self._turn = trio.Lock()
        self.known.changed.append(self._tell)

    async def run(self, records: RunRecords) -> None:
        """Look for newer lists and publish the newest one, until cancelled. Withdraw it then.

        Each user at this peer looks for itself, since it asks the members of its own run too. One of them publishes;
        the next one takes over when it ends.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._poll, records)
            # A peer has one record under a key. Two users that published and withdrew it would disturb each other.
            async with self._turn:
                records.watch(self._key, lambda: self._take(records.held(self._key)))
                try:
                    await self._publish(records)
                finally:
                    records.unwatch(self._key)
                    with trio.CancelScope(shield=True, deadline=trio.current_time() + FAREWELL_SECONDS):
                        await records.withdraw(self._key)

    async def _poll(self, records: RunRecords) -> None:
        while True:
            self._take(await records.find(self._key))
            # A list is everywhere a minute after the authority has published it.
            await trio.sleep(SPREAD_LOOK_SECONDS)

    async def _publish(self, records: RunRecords) -> None:
        published = 0
        while True:
            newest, newer = self.known.newest, self._newer
            if newest.number > published:
                await records.publish(self._key, newest.encode(), ttl=RECORD_LIFE_SECONDS)
                published = newest.number
            await newer.wait()

    def _tell(self) -> None:
        self._newer.set()
        self._newer = trio.Event()

    def _take(self, records: Iterable[Record]) -> None:
        for record in records:
            if record.withdrawn:
                continue
            try:
                revocations = read_revocations(record.value, self._authority)
            except RemoteProtocolError as error:
                logger.info("%s published an invalid list: %s", record.publisher, error)
                continue
            if self.known.learn(revocations):
                logger.info(
                    "list %d of this run's authority revokes %d certificate%s",
                    revocations.number,
                    len(revocations.identifiers),
                    "s" if len(revocations.identifiers) > 1 else "",
                )
