"""Dialling: one dial per peer at a time, which an inbound connection of the same peer makes unnecessary."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import trio

from p2pavg.base.errors import AddressError, RefusedError, UnreachableError
from p2pavg.base.limits import GLANCE_SECONDS
from p2pavg.net.transport import PeerId

logger = logging.getLogger(__name__)

MAX_ADDRESSES_DIALLED = 6


class DialledConnections(Protocol):
    """The connections of a transport, as far as dialling needs them."""

    def is_connected(self, peer_id: PeerId) -> bool:
        """Return whether a connection to the peer is open now."""

    async def dial_one(self, peer_id: PeerId, address: str) -> None:
        """Connect to a peer at one address.

        Raises UnreachableError or AddressError with the reason. Raises RefusedError if the connection was refused at a
        host where the peer was met before.
        """


class _Attempt:
    def __init__(self, deadline: float) -> None:
        self.scope = trio.CancelScope(deadline=deadline)
        self.reasons: list[str] = []
        self.others = 0  # addresses that failed for a reason other than a refusal


class Dialler:
    """Waits for a connection to a peer, whichever side makes it.

    A dial goes on even if an inbound connection arrives before it is done. If two peers dial each other at once and
    each gave up its own dial in favour of the other's, both connections would be lost.
    """

    def __init__(self, nursery: trio.Nursery, connections: DialledConnections) -> None:
        self._nursery = nursery
        self._connections = connections
        self._attempts: dict[PeerId, _Attempt] = {}
        self._changed = trio.Event()
        self._watchers: list[Callable[[PeerId], None]] = []

    def connected(self, peer_id: PeerId) -> None:
        """Note a new connection, whichever side has made it."""
        self._wake()
        for tell in tuple(self._watchers):
            tell(peer_id)

    @contextmanager
    def watching(self, connected: Callable[[PeerId], None]) -> Iterator[None]:
        """See :meth:`Transport.watching_connections`."""
        self._watchers.append(connected)
        try:
            yield
        finally:
            self._watchers.remove(connected)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def connect(
        self,
        peer_id: PeerId,
        addresses: Sequence[str],
        *,
        wait_inbound: bool = False,
        failed: list[str] | None = None,
    ) -> None:
        """Wait until there is a connection to the peer, and dial it if no other call does.

        Args:
            failed: if the call is cancelled, gets the reasons of the dials that had failed by then.

        Raises:
            RefusedError: every address refused the connection, and ``wait_inbound`` is false.
            UnreachableError: no address answered, and ``wait_inbound`` is false; the message says why.
        """
        mine: _Attempt | None = None
        last: _Attempt | None = None
        try:
            while not self._connections.is_connected(peer_id):
                if peer_id not in self._attempts:
                    # Its time may have been over at its end, and the caller has been given more since.
                    now, latest = trio.current_time(), trio.current_effective_deadline()
                    if mine is None or mine.scope.deadline <= now < latest:
                        mine = self._start(peer_id, addresses[:MAX_ADDRESSES_DIALLED])
                    elif not wait_inbound:
                        refused = bool(mine.reasons) and not mine.others
                        kind = RefusedError if refused else UnreachableError
                        why = "; ".join(mine.reasons) or "no address is known"
                        raise kind(f"no connection to {peer_id}: {why}")
                last = self._attempts.get(peer_id, last)
                await self._changed.wait()
        except trio.Cancelled:
            if failed is not None and last is not None:
                failed += last.reasons
            if mine is not None:
                mine.scope.cancel()
            raise

    def _start(self, peer_id: PeerId, addresses: Sequence[str]) -> _Attempt:
        attempt = self._attempts[peer_id] = _Attempt(trio.current_effective_deadline())
        self._nursery.start_soon(self._run, attempt, peer_id, addresses)
        return attempt

    async def _run(self, attempt: _Attempt, peer_id: PeerId, addresses: Sequence[str]) -> None:
        """Try the addresses in order. The next one begins when the one before has failed, or after 0.25 s."""
        try:
            with attempt.scope:
                async with trio.open_nursery() as nursery:
                    for address in addresses:
                        failed = trio.Event()
                        nursery.start_soon(self._try, attempt, peer_id, address, failed)
                        with trio.move_on_after(GLANCE_SECONDS):
                            await failed.wait()
        finally:
            del self._attempts[peer_id]
            self._wake()

    async def _try(self, attempt: _Attempt, peer_id: PeerId, address: str, failed: trio.Event) -> None:
        try:
            await self._connections.dial_one(peer_id, address)
        except (AddressError, UnreachableError) as error:
            attempt.reasons.append(f"{address}: {error}")
            attempt.others += not isinstance(error, RefusedError)
            failed.set()
        except Exception as error:
            logger.exception("dialling %s failed", address)
            attempt.reasons.append(f"{address}: {error!r}")
            attempt.others += 1
            failed.set()
        else:
            attempt.scope.cancel()


def timed_out(what: str, timeout: float, failed: Sequence[str]) -> UnreachableError:
    """Return the error of a call that took too long, with the reasons of the dials that had failed by then."""
    return UnreachableError(
        f"no {what} within {timeout:.1f} s" + (f": {'; '.join(failed)}" if failed else "")
    )
