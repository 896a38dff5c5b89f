"""Using a relay: circuits to peers behind it, and circuits that others open to this peer."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.net.addresses import CircuitAddress
from p2pavg.net.framing import send_message
from p2pavg.net.nat.relay.messages import (
    CIRCUIT_PROTOCOL,
    PROTOCOL,
    Connect,
    Connected,
    Incoming,
    RelayRefusal,
)
from p2pavg.net.nat.relay.service import receive
from p2pavg.net.transport import PeerId, Stream, Transport

logger = logging.getLogger(__name__)

# Asking the relay, which asks the peer: four round trips of at most a second each, twice.
CIRCUIT_SECONDS = 8.0

Adopt = Callable[[Stream, PeerId], Awaitable[None]]
"""Makes a connection with a peer over a circuit, as the side that was asked, and lives as long as the connection.

Raises UnreachableError if the other end is not that peer, or there is no place for the connection.
"""


async def open_circuit(transport: Transport, address: CircuitAddress) -> Stream:
    """Ask a relay for a circuit. Return the stream that carries its bytes.

    Raises:
        UnreachableError: the relay was not reached, or gives no circuit; the message says why.
    """
    with trio.move_on_after(CIRCUIT_SECONDS):
        stream = await transport.open_stream(
            address.relay, PROTOCOL, addresses=[address.relay_address], timeout=CIRCUIT_SECONDS
        )
        try:
            if stream.relayed:
                raise UnreachableError(f"the relay {address.relay} is itself only reached by a relay")  # noqa: TRY301
            await send_message(stream, Connect(address.target).encode())
            answer = await receive(stream)
            if isinstance(answer, RelayRefusal):
                raise UnreachableError(f"the relay {address.relay} gives no circuit: {answer.reason}")  # noqa: TRY301
            if not isinstance(answer, Connected):
                raise RemoteProtocolError(f"it answered with {type(answer).__name__}")  # noqa: TRY301
        except (StreamBrokenError, RemoteProtocolError, ClosedError) as error:
            await stream.reset()
            raise UnreachableError(f"the relay {address.relay} gives no circuit: {error}") from None
        except BaseException:
            await stream.reset()
            raise
        return stream
    raise UnreachableError(f"the relay {address.relay} gave no circuit within {CIRCUIT_SECONDS:.0f} s")


class InboundCircuits:
    """Accepts circuits from the relays at which this peer has a reservation.

    Args:
        is_relay: returns whether this peer has a reservation at a peer.
        adopt: makes a connection with the peer at the other end.
    """

    def __init__(self, transport: Transport, is_relay: Callable[[PeerId], bool], adopt: Adopt) -> None:
        self._is_relay = is_relay
        self._adopt = adopt
        transport.serve(CIRCUIT_PROTOCOL, self.serve)

    async def serve(self, stream: Stream) -> None:
        """Accept one circuit, and let its connection live in this task."""
        with trio.move_on_after(CIRCUIT_SECONDS) as scope:
            message = await receive(stream)
            if not isinstance(message, Incoming):
                raise RemoteProtocolError(f"a circuit began with {type(message).__name__}")
            if stream.relayed or not self._is_relay(stream.remote):
                await send_message(stream, RelayRefusal("this peer has no reservation there").encode())
                await stream.aclose()
                return
            await send_message(stream, Connected().encode())
        if scope.cancelled_caught:
            return
        try:
            await self._adopt(stream, message.source)
        except UnreachableError as error:
            logger.info(
                "a circuit of %s through %s came to nothing: %s", message.source, stream.remote, error
            )
