"""The spreading of an authority's notices among the members of its runs: each publishes the newest that it has seen."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Generic

import trio

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import FAREWELL_SECONDS, LOOK_SECONDS, RECORD_LIFE_SECONDS, SPREAD_LOOK_SECONDS
from p2pavg.base.messages import pack
from p2pavg.runs.membership.job_release import JobRelease, decode_release
from p2pavg.runs.membership.revocation import (
    N,
    NewestNotice,
    RevocationList,
    known_revocations,
    read_revocations,
)
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.runs.records.run_records import RunRecords
from p2pavg_dht import Record

logger = logging.getLogger(__name__)

_REVOKED_DOMAIN = "p2pavg/revoked/3"
_RELEASE_DOMAIN = "p2pavg/release/1"


@dataclass(frozen=True, slots=True)
class NoticeKind(Generic[N]):
    """The place of one kind of notices, and how they are read."""

    name: str
    key: bytes
    """Under which members publish them."""
    read: Callable[[bytes], N]
    """Returns a notice that the authority has signed; raises RemoteProtocolError for all else."""


def revocations_of(authority: bytes) -> NoticeKind[RevocationList]:
    """Return the place of an authority's lists of revoked certificates."""
    # A list counts in all of the authority's runs: a run of many members has others beside it, such as one for each
    # shard.
    key = hashlib.sha256(pack(_REVOKED_DOMAIN, authority)).digest()
    return NoticeKind("list of revoked certificates", key, lambda data: read_revocations(data, authority))


def releases_of(run: RunFile) -> NoticeKind[JobRelease]:
    """Return the place of the releases of a run's job."""
    key = hashlib.sha256(pack(_RELEASE_DOMAIN, run.authority, run.run_id)).digest()
    return NoticeKind(
        "release of a job", key, partial(decode_release, authority=run.authority, run_id=run.run_id)
    )


async def spread(records: RunRecords, kind: NoticeKind[N], notice: N, timeout: float) -> int:
    """Give a notice to the members, and return the number of members that publish it after that.

    It returns as soon as one member does: the others get it from there.

    Args:
        records: of a peer with a certificate of one of the runs.
        timeout: seconds after which it returns in any case.
    """
    told = 0
    with trio.move_on_after(timeout):
        while not told:
            published = await records.publish(kind.key, notice.encode(), ttl=RECORD_LIFE_SECONDS)
            told = sum(_number(record, kind) >= notice.number for record in published.records)
            if not told:
                await trio.sleep(LOOK_SECONDS)
    return told


def _number(record: Record, kind: NoticeKind[N]) -> int:
    try:
        return kind.read(record.value).number
    except RemoteProtocolError:
        return 0


async def poll_notices(records: RunRecords, kind: NoticeKind[N], known: NewestNotice[N]) -> None:
    """Ask other members for a newer notice, once."""
    _learn(await records.find(kind.key), kind, known)


def _learn(records: Iterable[Record], kind: NoticeKind[N], known: NewestNotice[N]) -> None:
    for record in records:
        if record.withdrawn:
            continue
        try:
            notice = kind.read(record.value)
        except RemoteProtocolError as error:
            logger.info("%s published an invalid %s: %s", record.publisher, kind.name, error)
            continue
        if known.learn(notice):
            logger.info("this run's authority has signed %s number %d", kind.name, notice.number)


class NoticeSpreading(Generic[N]):
    """One peer's part in spreading the notices of one kind. All of their users at this peer share one object.

    Args:
        known: the newest one that this peer has seen.
        first: number of the one that all members know from the beginning, as from the run file: it needs no record.
    """

    def __init__(self, kind: NoticeKind[N], known: NewestNotice[N], *, first: int) -> None:
        self.known = known
        self._kind = kind
        self._first = first
        self._newer = trio.Event()
        self._turn = trio.Lock()
        self.known.changed.append(self._tell)

    async def run(self, records: RunRecords) -> None:
        """Look for newer notices and publish the newest one, until cancelled. Withdraw it then.

        Each user at this peer looks for itself, since it asks the members of its own run too. One of them publishes;
        the next one takes over when it ends.
        """
        key = self._kind.key
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._poll, records)
            # A peer has one record under a key. Two users that published and withdrew it would disturb each other.
            async with self._turn:
                records.watch(key, lambda: _learn(records.held(key), self._kind, self.known))
                try:
                    await self._publish(records)
                finally:
                    records.unwatch(key)
                    with trio.CancelScope(shield=True, deadline=trio.current_time() + FAREWELL_SECONDS):
                        await records.withdraw(key)

    async def _poll(self, records: RunRecords) -> None:
        while True:
            await poll_notices(records, self._kind, self.known)
            # A notice is everywhere a minute after the authority has published it.
            await trio.sleep(SPREAD_LOOK_SECONDS)

    async def _publish(self, records: RunRecords) -> None:
        published = self._first
        while True:
            newest, newer = self.known.newest, self._newer
            if newest.number > published:
                await records.publish(self._kind.key, newest.encode(), ttl=RECORD_LIFE_SECONDS)
                published = newest.number
            await newer.wait()

    def _tell(self) -> None:
        self._newer.set()
        self._newer = trio.Event()


def spreading_revocations(authority: bytes) -> NoticeSpreading[RevocationList]:
    """Return one peer's part in spreading the list of revoked certificates."""
    return NoticeSpreading(revocations_of(authority), known_revocations(authority), first=0)
