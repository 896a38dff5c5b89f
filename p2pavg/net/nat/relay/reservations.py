"""Keep reservations at a few relays, for as long as this peer cannot be dialled, and accept the circuits from there."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict

import trio

from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import ASK_AGAIN_SECONDS, CALM_LOOK_SECONDS, QUICK_REPLY_SECONDS, RETRY_SECONDS
from p2pavg.net.addresses import CircuitAddress
from p2pavg.net.nat.reach.watcher import Connecting, ReachWatcher
from p2pavg.net.nat.relay.choice import addresses_of_relay, choose_relays
from p2pavg.net.nat.relay.messages import (
    CIRCUIT_PROTOCOL,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Connected,
    Incoming,
    RelayPing,
    RelayRefusal,
    Reserve,
    Reserved,
    decode,
)
from p2pavg.net.nat.relay.service import CIRCUIT_SECONDS, RELAY_PING_SECONDS, receive
from p2pavg.net.transport import PeerId, Stream, Transport, receive_message, send_message

logger = logging.getLogger(__name__)

MAX_AVOIDED = 256

_FAILURES = (UnreachableError, StreamBrokenError, RemoteProtocolError, ClosedError)


class Reservations:
    """The relays through which others reach this peer.

    Args:
        connections: the connections of the transport.
        watcher: is told when :attr:`addresses` has changed.
    """

    def __init__(self, transport: Transport, connections: Connecting, watcher: ReachWatcher) -> None:
        self._transport = transport
        self._connections = connections
        self._watcher = watcher
        self._wanted = False
        self._asked: dict[PeerId, trio.CancelScope] = {}
        self._held: dict[PeerId, tuple[str, ...]] = {}
        self._avoided: OrderedDict[PeerId, float] = OrderedDict()
        self._next_questions = -math.inf
        self._changed = trio.Event()
        transport.serve(CIRCUIT_PROTOCOL, self._accept_circuit)

    @property
    def relays(self) -> tuple[PeerId, ...]:
        """The relays at which this peer has a reservation."""
        return tuple(self._held)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses at which others reach this peer through its relays, one relay after the other."""
        return tuple(
            str(CircuitAddress(address, relay, self._transport.peer_id))
            for relay, addresses in self._held.items()
            for address in addresses
        )

    def want(self, wanted: bool) -> None:
        """Say whether this peer needs relays. Without need, its reservations end."""
        if wanted != self._wanted:
            self._wanted = wanted
            self.poll()

    def poll(self) -> None:
        """Look at the candidates now, for example because there is a new connection."""
        self._changed.set()

    def forget_failures(self) -> None:
        """Ask any peer again from now on, because this peer is in another network."""
        self._avoided.clear()
        self.poll()

    async def run(self) -> None:
        """Keep the reservations, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                self._changed = trio.Event()
                if self._wanted:
                    now = trio.current_time()
                    # Only those that this one has dialled, which have a port: others can probably dial them too.
                    dialled = {peer.peer_id: peer for peer in self._connections.neighbours() if peer.port}
                    for peer_id in choose_relays(
                        self._transport.peer_id, [*dialled.values()], self._asked, self._avoided, now
                    ):
                        # Before the task begins, so that the next look does not ask the same peer again.
                        self._asked[peer_id] = trio.CancelScope()
                        nursery.start_soon(self._hold, peer_id)
                else:
                    for scope in self._asked.values():
                        scope.cancel()
                with trio.move_on_after(CALM_LOOK_SECONDS):
                    await self._changed.wait()

    async def _hold(self, relay: PeerId) -> None:
        """Have a reservation at one relay, until it is lost or not wanted any more."""
        stream: Stream | None = None
        held = False
        try:
            with self._asked[relay]:
                with trio.move_on_after(QUICK_REPLY_SECONDS):
                    stream = await self._transport.open_stream(relay, PROTOCOL, timeout=QUICK_REPLY_SECONDS)
                    addresses = await self._reserve(stream)
                    held = True
                # The time is over. The relay may have made the reservation: the reset below ends it there.
                if stream is None or not held:
                    raise UnreachableError(f"no answer within {QUICK_REPLY_SECONDS:.0f} s")
                self._held[relay] = addresses
                logger.info("this peer is reachable through the relay %s", relay)
                self._watcher.relayed_by(self.relays, self.addresses)
                await self._ping(stream)
        except _FAILURES as error:
            # The only relay is lost: one that has refused may be a relay by now. A hostile relay that takes this peer
            # and drops it again and again causes one such question to others in RETRY_SECONDS.
            now = trio.current_time()
            if held and self._held.keys() <= {relay} and now >= self._next_questions:
                self._next_questions = now + RETRY_SECONDS
                self._avoided.clear()
            # One that was lost may have been restarted, or this peer may have changed its network.
            self._avoid(relay, 2 * ASK_AGAIN_SECONDS if held else RETRY_SECONDS)
            logger.info("%s at %s: %s", "the reservation is lost" if held else "no reservation", relay, error)
        finally:
            if stream is not None:
                await stream.reset()
            del self._asked[relay]
            if self._held.pop(relay, None) is not None:
                self._watcher.relayed_by(self.relays, self.addresses)
            self.poll()

    async def _reserve(self, stream: Stream) -> tuple[str, ...]:
        # No chains of relays: the relay refuses them as well.
        if stream.relayed:
            raise UnreachableError("the peer is itself only reached by a relay")
        await send_message(stream, Reserve().encode())
        answer = await receive(stream)
        if isinstance(answer, RelayRefusal):
            raise UnreachableError(answer.reason)
        if not isinstance(answer, Reserved):
            raise RemoteProtocolError(f"it answered with {type(answer).__name__}")
        addresses = addresses_of_relay(
            stream.remote, self._connections.dialled_addresses(stream.remote), answer.addresses
        )
        if not addresses:
            raise UnreachableError("this peer has no connection to the relay that it has dialled")
        return addresses

    async def _ping(self, stream: Stream) -> None:
        """Exchange pings with a relay until it is lost, and raise the reason.

        A dead relay is noticed within two pings and the time for an answer.
        """
        heard = _RelayLife(trio.current_time())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._receive, stream, heard, nursery.cancel_scope)
            # Both tasks may fail at once when the connection ends, so neither raises: a nursery would raise a group.
            try:
                while trio.current_time() <= heard.at + RELAY_PING_SECONDS + QUICK_REPLY_SECONDS:
                    await send_message(stream, RelayPing().encode())
                    await trio.sleep(RELAY_PING_SECONDS)
                # The connection is dead, or a router has forgotten it: nothing else would notice that for minutes.
                await stream.reset_connection()
                heard.end = heard.end or UnreachableError(
                    f"no answer to a ping within {QUICK_REPLY_SECONDS:.0f} s"
                )
            except _FAILURES as error:
                heard.end = heard.end or error
            nursery.cancel_scope.cancel()
        assert heard.end is not None  # a cancelled caller does not come here
        raise heard.end

    async def _receive(self, stream: Stream, heard: _RelayLife, both: trio.CancelScope) -> None:
        try:
            while data := await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES):
                if not isinstance(decode(data), RelayPing):
                    raise RemoteProtocolError("it sent something else than a ping")
                heard.at = trio.current_time()
            raise UnreachableError("the relay has ended the reservation")
        except _FAILURES as error:
            heard.end = heard.end or error
        both.cancel()

    def _avoid(self, relay: PeerId, seconds: float) -> None:
        self._avoided[relay] = trio.current_time() + seconds
        self._avoided.move_to_end(relay)
        while len(self._avoided) > MAX_AVOIDED:
            self._avoided.popitem(last=False)

    async def _accept_circuit(self, stream: Stream) -> None:
        """Accept a circuit from a relay of this peer, and let its connection live in this task."""
        with trio.move_on_after(CIRCUIT_SECONDS) as scope:
            message = await receive(stream)
            if not isinstance(message, Incoming):
                raise RemoteProtocolError(f"a circuit began with {type(message).__name__}")
            if stream.relayed or stream.remote not in self._held:
                await send_message(stream, RelayRefusal("this peer has no reservation there").encode())
                await stream.aclose()
                return
            await send_message(stream, Connected().encode())
        if scope.cancelled_caught:
            return
        try:
            await self._connections.host_circuit(stream, message.source)
        except UnreachableError as error:
            logger.info(
                "a circuit of %s through %s came to nothing: %s", message.source, stream.remote, error
            )


class _RelayLife:
    """The time of a relay's last sign of life, and the reason for which the reservation has ended."""

    def __init__(self, at: float) -> None:
        self.at = at
        self.end: Exception | None = None
