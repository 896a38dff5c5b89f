"""The two carriers of a connection of libp2p: a TCP socket, and a stream through a relay."""

from __future__ import annotations

import logging

import trio
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError

from p2pavg.base.errors import ClosedError, StreamBrokenError
from p2pavg.net.libp2p.speed import ReadAheadStream
from p2pavg.net.limits.admission import ConnectionArrival
from p2pavg.net.transport import PeerId, Stream

logger = logging.getLogger(__name__)

_READ_BYTES = 64 * 1024


class RelayedStream(ReadWriteCloser):
    """A stream through a relay, in the shape in which libp2p carries a connection over it.

    Closing it delivers what was written before, as TCP does, and then the relay ends the circuit. An end that reads
    nothing costs the circuit, and not this peer's connection to the relay.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        stream.carry_circuit()
        self.relay: PeerId = stream.remote
        self.remote_endpoint = (stream.remote_host, 0)
        """The relay's IP address: a circuit counts against the relay's host, since the peer's is not known."""
        self._reading: trio.CancelScope | None = None
        self.arrival: ConnectionArrival | None = None
        self.punched = False
        self.expected = ""

    async def read(self, n: int | None = None) -> bytes:
        if n == 0:
            return b""
        try:
            with trio.CancelScope() as self._reading:
                return await self._stream.receive_some(_READ_BYTES if n is None else n)
        except StreamBrokenError as error:
            raise ConnectionClosedError(f"the circuit broke: {error}", transport="circuit") from error
        except ClosedError:
            logger.debug("a read of a circuit to %s that this process has closed", self.relay)
        return b""  # as libp2p expects it of a socket that this process has closed

    async def write(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except (StreamBrokenError, ClosedError) as error:
            raise ConnectionClosedError(f"the circuit broke: {error}", transport="circuit") from error

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        await self._stream.aclose()

    async def wait_delivered(self) -> None:
        """Wait, after :meth:`close`, until the relay has passed on what was written. Bounded in time."""
        await self._stream.wait_closed()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


Carrier = ReadAheadStream | RelayedStream
"""The carrier of a connection: a socket or a circuit."""
