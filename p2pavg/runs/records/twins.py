"""Two processes with one identity, because a key file was copied with its folder.

Each of them signs records that replace the other one's. On one machine, the lock of the file tells the second process
at once (:mod:`p2pavg.runs.records.identity`). A copy is noticed here: a process that finds a record of its own identity
which it has not signed may have a twin, or have been started again. So it publishes a *mark*, the time at which it
began and a random number, under a key of its identity, and looks there for some time. A mark of another process that
is renewed is that of a process which runs. The one that began later renews its mark, so that it is noticed, and ends
with an error. The other one logs the fault, and goes on.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from enum import Enum, auto
from typing import Annotated

import trio
from msgspec import Meta

from p2pavg.base.errors import IdentityError, RemoteProtocolError
from p2pavg.base.limits import LOOK_SECONDS
from p2pavg.base.messages import Message, Seconds, pack
from p2pavg_dht import Record, RecordNode

logger = logging.getLogger(__name__)

MARK_LOOKS = 15
LAST_MARKS = 3  # by which the other process, which looks as often, sees that this one runs
MARK_TTL = 30.0
"""Seconds for which a mark is kept: twice as long as a process looks."""
_KEY_DOMAIN = "p2pavg/identity/1"
_MARK_BYTES = 16


class ProcessMark(Message, frozen=True, order=True):
    """The mark of one process."""

    began: Seconds
    """Wall clock."""
    number: Annotated[bytes, Meta(min_length=_MARK_BYTES, max_length=_MARK_BYTES)]


class Twin(Enum):
    """The relation of this process to another one with its identity, as far as it is known."""

    NONE = auto()
    EARLIER = auto()
    """The other process began before this one."""
    LATER = auto()


class MarksSeen:
    """The marks of other processes. No I/O, no clock.

    Args:
        mine: the mark of this process.
    """

    def __init__(self, mine: ProcessMark) -> None:
        self._mine = mine
        self._sequences: dict[ProcessMark, int] = {}

    def see(self, mark: ProcessMark, sequence: int) -> Twin:
        """Return the relation to the process of a mark. It runs if its mark was signed again since the last look."""
        if mark == self._mine:
            return Twin.NONE
        before = self._sequences.setdefault(mark, sequence)
        if sequence <= before:
            return Twin.NONE
        return Twin.EARLIER if mark < self._mine else Twin.LATER


class Twins:
    """Finds another process with this peer's identity.

    Args:
        began: wall-clock time at which this process began.
    """

    def __init__(self, records: RecordNode, *, peer_id: str, began: float) -> None:
        self._records = records
        self._peer_id = peer_id
        self._mine = ProcessMark(began, secrets.token_bytes(_MARK_BYTES))
        self._key = hashlib.sha256(pack(_KEY_DOMAIN, peer_id)).digest()
        self._suspected = trio.Event()
        self._told = False
        records.on_outranked = self._suspected_now

    def _suspected_now(self) -> None:
        self._suspected.set()

    async def run(self) -> None:
        """Look for a twin whenever there may be one, until cancelled.

        Raises:
            IdentityError: there is one, and it began before this process.
        """
        while True:
            await self._suspected.wait()
            self._suspected = trio.Event()
            seen = MarksSeen(self._mine)
            for _ in range(MARK_LOOKS):
                await self._poll(seen)
                await trio.sleep(LOOK_SECONDS)

    async def _poll(self, seen: MarksSeen) -> None:
        found = await self._records.find(self._key)
        for record in found:
            mark = _read(record) if record.publisher == self._peer_id else None
            twin = Twin.NONE if mark is None else seen.see(mark, record.sequence)
            if twin is Twin.EARLIER:
                for _ in range(LAST_MARKS):
                    await self._renew()
                    await trio.sleep(LOOK_SECONDS)
                self._records.fall_silent()
                raise IdentityError(
                    f"another process, which began before this one, has the same identity {self._peer_id}: its key file"
                    " was copied",
                    remedy="give each peer a key file of its own: p2pavg identity FILE",
                )
            if twin is Twin.LATER and not self._told:
                self._told = True
                logger.error(
                    "another process, which began after this one, has the same identity %s: its key file was copied. It"
                    " ends as soon as it notices; give each peer a key file of its own: p2pavg identity FILE",
                    self._peer_id,
                )
        await self._renew()  # after the look: the newest mark replaces the others

    async def _renew(self) -> None:
        await self._records.publish(self._key, self._mine.encode(), ttl=MARK_TTL)


def _read(record: Record) -> ProcessMark | None:
    """Return a mark that a process of this identity has signed; ``None`` for one of another version."""
    try:
        return ProcessMark.decode(record.value)
    except RemoteProtocolError:
        return None
