"""A bulletin board of a run: each peer publishes one short signed entry, which expires unless it is renewed.

Under one topic each peer has one live entry; a new one replaces it. An entry reaches the peers that store it at once
(in a run of up to eight, all of them), and the other peers at their next look. A withdrawn entry disappears at once
from the peers that store it, and expires elsewhere.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import trio

from p2pavg.base.errors import ClosedError
from p2pavg.base.limits import CLOCK_SKEW_SECONDS, GLANCE_SECONDS, LOOK_SECONDS
from p2pavg.base.messages import pack
from p2pavg_dht import Published, Record

SAID_TTL_SECONDS = 15.0  # the entry of a peer that died expires after this
MAX_CALLS = 4  # at once
MAX_ENTRY_BYTES = 4096
MAX_PUBLISHERS = 1024
"""Entries of more publishers are ignored: a peer that stores records can invent publishers, at 4 KB an entry. Known
publishers keep their places, so that invented ones cannot push them out."""

_KEY_DOMAIN = "p2pavg/bulletin/1"


def board_key(run_id: str, topic: str) -> bytes:
    """Return the key under which the peers of a run publish on one topic."""
    return hashlib.sha256(pack(_KEY_DOMAIN, run_id, topic)).digest()


class BoardRecords(Protocol):
    """The part of a record node that a board uses."""

    async def publish(self, key: bytes, value: bytes, *, ttl: float) -> Published: ...
    async def withdraw(self, key: bytes) -> None: ...
    async def find(self, key: bytes) -> tuple[Record, ...]: ...
    def held(self, key: bytes) -> tuple[Record, ...]: ...
    def watch(self, key: bytes, changed: Callable[[], None]) -> None: ...
    def unwatch(self, key: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One peer's entry."""

    value: bytes
    sequence: int
    """Grows with every entry of that peer, even if the value is the same."""
    expiration_time: float
    """Wall clock, seconds."""


class Topic(Protocol):
    """The part of a board that a training program uses; all of it may be called from any thread. See :class:`Board`."""

    def publish(self, value: bytes, *, now: bool = False) -> None: ...
    def withdraw(self) -> None: ...
    def poll(self) -> None: ...
    @property
    def version(self) -> int: ...
    @property
    def entries(self) -> Mapping[str, Entry]: ...
    def wait(self, version: int, timeout: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Lasting:
    """The way in which entries of a board outlive their publishers, so that others read last words later."""

    seconds: float
    """The life of an entry that is renewed no more."""
    release: Callable[[bytes], None]
    """Ends the renewals of this peer's record under a key without withdrawing it."""


class Board:
    """One topic. :meth:`run` belongs to trio; the rest may be called from any thread.

    Args:
        lasting: for entries that outlive their publishers; if ``None``, an entry is withdrawn when the board closes,
            and forgotten when its publisher's process has ended.
    """

    def __init__(
        self,
        records: BoardRecords,
        *,
        key: bytes,
        peer_id: str,
        wall_clock: Callable[[], float],
        look_seconds: float = LOOK_SECONDS,
        lasting: Lasting | None = None,
    ) -> None:
        self._records = records
        self._lasting = lasting
        self._ttl = SAID_TTL_SECONDS if lasting is None else lasting.seconds
        self._key = key
        self._peer_id = peer_id
        self._wall_clock = wall_clock
        self._look_seconds = look_seconds
        self._changed = threading.Condition()
        self._entries: dict[str, Entry] = {}
        self._departed: dict[str, float] = {}
        """Times at which peers' processes were seen to have ended, wall clock, while older entries can be live."""
        self._version = 0
        self._to_publish: bytes | None = None  # None: nothing new; empty: withdraw the entry
        self._urgent = False
        self._unsaid = b""
        """The entry that no call has published yet."""
        self._ended = False
        self._token = trio.lowlevel.current_trio_token()
        self._woken = trio.Event()
        self._calling = trio.Semaphore(MAX_CALLS)
        self._scope = trio.CancelScope()
        self._on_change: list[Callable[[], None]] = []

    def subscribe(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` in trio's thread whenever an entry of another peer has changed."""
        self._on_change.append(changed)

    def publish(self, value: bytes, *, now: bool = False) -> None:
        """Replace this peer's entry: soon, or at once with ``now``, for an entry that another peer waits for.

        Args:
            value: 1 to 4096 bytes.

        Raises:
            ValueError: ``value`` is empty or too long.
        """
        if not 0 < len(value) <= MAX_ENTRY_BYTES:
            raise ValueError(f"value must have 1 to {MAX_ENTRY_BYTES} bytes, got {len(value)}")
        with self._changed:
            # An urgent entry that has not been published yet stays urgent when a later one replaces it.
            self._to_publish, self._urgent = value, self._urgent or now
            self._unsaid = value
        self._wake()

    def withdraw(self) -> None:
        """Withdraw this peer's entry, until :meth:`publish` is called again."""
        with self._changed:
            self._to_publish, self._urgent = b"", True
            self._unsaid = b""
        self._wake()

    def poll(self) -> None:
        """Look for new entries now, without waiting for the next regular look."""
        with self._changed:
            self._urgent = True
        self._wake()

    def look_every(self, seconds: float) -> None:
        """Look for new entries at least this often from now on."""
        with self._changed:
            self._look_seconds = min(self._look_seconds, seconds)
        self._wake()

    @property
    def version(self) -> int:
        """A number that grows whenever an entry of another peer changes."""
        return self._version

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The live entries of the other peers, as far as this peer knows them, by peer id."""
        now = self._wall_clock()
        with self._changed:
            return {p: said for p, said in self._entries.items() if said.value and said.expiration_time > now}

    def wait(self, version: int, timeout: float) -> None:
        """Block until :attr:`version` is above ``version``, for at most ``timeout`` seconds.

        Raises:
            ClosedError: the averager is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._version > version or self._ended, timeout)
            if self._ended:
                raise ClosedError("the averager is closed")

    # ------------------------------------------------------------------ in trio

    def depart(self, peer_id: str) -> None:
        """Take a peer's entries for withdrawn, because its process has ended.

        That holds also for an entry which it published before its end and which arrives after this call. An entry that
        it publishes later, because it has been started again, counts. What is later is told by the expiration time,
        which the publisher's clock sets. So the entries of a peer whose clock is slow count that much later again, and
        if its clock is fast, its last entry may still count.
        """
        if self._lasting is not None:
            return  # its last word is for the time after its end
        with self._changed:
            self._departed[peer_id] = self._wall_clock()
            known = self._entries.get(peer_id)
            # The sequence stays, so the same entry does not count again when it arrives from another keeper.
            if known is not None and known.value:
                self._entries[peer_id] = Entry(b"", known.sequence, known.expiration_time)
                self._version += 1
                self._changed.notify_all()
        self._tell()

    async def run(self) -> None:
        """Publish and look until cancelled; :meth:`aclose` withdraws the entry."""
        self._records.watch(self._key, self._take_held)
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    await self._speak_and_look(nursery)
        finally:
            self._records.unwatch(self._key)
            # Threads that wait for a change would otherwise sleep until their timeout.
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    async def _speak_and_look(self, nursery: trio.Nursery) -> None:
        while True:
            # A call to a peer that is gone may take seconds; entries published meanwhile do not wait for it.
            await self._calling.acquire()
            with self._changed:
                value, self._to_publish, self._urgent = self._to_publish, None, False
            nursery.start_soon(self._call, value)
            await self._pause()

    async def _pause(self) -> None:
        """Wait until there is something to publish or to look for."""
        began = trio.current_time()
        while True:
            woken = self._woken = trio.Event()  # made before the check: no wake-up is missed
            with self._changed:
                most = GLANCE_SECONDS if self._to_publish is not None else self._look_seconds
                until = began if self._urgent else began + most
            if trio.current_time() >= until:
                return
            with trio.move_on_at(until):
                await woken.wait()

    async def _call(self, value: bytes | None) -> None:
        try:
            # Without this checkpoint, an entry published at the last moment would be signed and stored before the
            # cancellation, and then renewed for ever.
            await trio.lowlevel.checkpoint_if_cancelled()
            if value is None:
                self._take(await self._records.find(self._key))
            elif not value:
                await self._records.withdraw(self._key)
            else:
                published = await self._records.publish(self._key, value, ttl=self._ttl)
                with self._changed:
                    if self._unsaid == value:
                        self._unsaid = b""
                self._take(published.records)
        finally:
            self._calling.release()

    async def aclose(self) -> None:
        """End :meth:`run` and withdraw this peer's entry, unless it is to last."""
        # No other call may publish after the withdrawal.
        self._scope.cancel()
        if self._lasting is not None:
            with self._changed:
                unsaid, self._unsaid = self._unsaid, b""
            if unsaid:  # the program ends right after its last word: this call is the one that tells it
                await self._records.publish(self._key, unsaid, ttl=self._ttl)
            self._lasting.release(self._key)
        else:
            await self._records.withdraw(self._key)

    def _wake(self) -> None:
        try:
            self._token.run_sync_soon(lambda: self._woken.set())
        except trio.RunFinishedError:
            return  # the averager is closed; its next call raises ClosedError

    def _take_held(self) -> None:
        self._take(self._records.held(self._key))

    def _take(self, records: tuple[Record, ...]) -> None:
        with self._changed:
            before = dict(self._entries)
            now = self._wall_clock()
            self._departed = {
                peer: at for peer, at in self._departed.items() if at <= now < at + SAID_TTL_SECONDS
            }
            for record in records:
                latest = now + SAID_TTL_SECONDS + CLOCK_SKEW_SECONDS
                if self._lasting is None and record.expiration_time > latest:
                    continue  # an entry that lives longer would make others wait for a dead peer
                known = self._entries.get(record.publisher)
                if known is None and len(self._entries) >= MAX_PUBLISHERS:
                    continue
                if record.publisher != self._peer_id and (known is None or known.sequence < record.sequence):
                    ended_at = self._departed.get(record.publisher, -math.inf)
                    self._entries[record.publisher] = Entry(
                        record.value if record.expiration_time > ended_at + SAID_TTL_SECONDS else b"",
                        record.sequence,
                        record.expiration_time,
                    )
            self._entries = {peer: said for peer, said in self._entries.items() if said.expiration_time > now}
            changed = self._entries != before
            if changed:
                self._version += 1
                self._changed.notify_all()
        if changed:
            self._tell()

    def _tell(self) -> None:
        for changed in self._on_change:
            changed()
