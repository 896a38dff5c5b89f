"""The spreading of a run's list of revoked certificates: every member publishes the newest list that it has seen."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable

import trio

from p2pavg.base.encoding import pack
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.runs.membership.membership import Membership
from p2pavg.runs.membership.revocation import RevocationList, read_revocations
from p2pavg.runs.records.run_records import RunRecords
from p2pavg_dht import Record

logger = logging.getLogger(__name__)

LOOK_SECONDS = 20.0  # a list is everywhere a minute after the authority has published it
REVOCATIONS_TTL_SECONDS = 600.0
_WITHDRAW_SECONDS = 1.0
_POLL_SECONDS = 1.0

_KEY_DOMAIN = "p2pavg/revoked/1"


def revocations_key(run_id: str) -> bytes:
    """Return the key under which the members of a run publish the list."""
    return hashlib.sha256(pack(_KEY_DOMAIN, run_id)).digest()


async def spread(
    records: RunRecords, membership: Membership, run_id: str, revocations: RevocationList, timeout: float
) -> int:
    """Give a list to the members of a run, and return the number of members that publish it after that.

    It returns as soon as one member does: the others get it from there.

    Args:
        records, membership: of a peer with a certificate of the run.
        timeout: seconds after which it returns in any case.
    """
    key, told = revocations_key(run_id), 0
    membership.learn(revocations)
    with trio.move_on_after(timeout):
        while not told:
            published = await records.publish(key, revocations.data, ttl=REVOCATIONS_TTL_SECONDS)
            told = sum(_number(record, membership) >= revocations.number for record in published.records)
            if not told:
                await trio.sleep(_POLL_SECONDS)
    return told


def _number(record: Record, membership: Membership) -> int:
    try:
        return read_revocations(record.value, membership.access.authority).number
    except RemoteProtocolError:
        return 0


class Revocations:
    """One member's part in spreading the list.

    Args:
        changed: called after a newer list was learned.
    """

    def __init__(
        self,
        records: RunRecords,
        membership: Membership,
        run_id: str,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._records = records
        self._membership = membership
        self._key = revocations_key(run_id)
        self._changed = changed
        self._published = 0  # number of the list that this peer publishes
        self._newer = trio.Event()

    async def run(self) -> None:
        """Look for newer lists and publish the newest one, until cancelled. Withdraw it then."""
        self._records.watch(self._key, lambda: self._take(self._records.held(self._key)))
        try:
            while True:
                self._newer = trio.Event()
                self._take(await self._records.find(self._key))
                newest = self._membership.revocations
                if newest.number > self._published:
                    await self._records.publish(self._key, newest.data, ttl=REVOCATIONS_TTL_SECONDS)
                    self._published = newest.number
                with trio.move_on_after(LOOK_SECONDS):
                    await self._newer.wait()
        finally:
            self._records.unwatch(self._key)
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _WITHDRAW_SECONDS):
                await self._records.withdraw(self._key)

    def _take(self, records: Iterable[Record]) -> None:
        for record in records:
            if record.withdrawn:
                continue
            try:
                revocations = read_revocations(record.value, self._membership.access.authority)
            except RemoteProtocolError as error:
                logger.info("%s published an invalid list: %s", record.publisher, error)
                continue
            if self._membership.learn(revocations):
                logger.info(
                    "list %d of this run's authority revokes %d certificate%s",
                    revocations.number,
                    len(revocations.serials),
                    "s" if len(revocations.serials) > 1 else "",
                )
                self._newer.set()
                self._changed()
