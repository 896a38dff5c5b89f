"""Strangers that write the frames of libp2p's layers themselves, and so can break the protocols."""

import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio
from libp2p.abc import ISecureConn
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.protocol_muxer.generic_selector import GenericMultistreamSelector
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as Noise
from libp2p.stream_muxer.yamux.yamux import (
    FLAG_ACK,
    FLAG_RST,
    FLAG_SYN,
    HEADER_SIZE,
    TYPE_DATA,
    TYPE_PING,
    TYPE_WINDOW_UPDATE,
    YAMUX_HEADER_FORMAT,
)
from libp2p.transport.upgrader import TransportUpgrader

from p2pavg.net.transport import Transport
from tests.integration.hosts import port_of, seeds


async def open_tcp(host: Transport) -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", port_of(host))


def line(text: bytes) -> bytes:
    """Encode a line of protocol negotiation of fewer than 127 bytes."""
    return bytes([len(text) + 1]) + text + b"\n"


class RawPeer:
    """A stranger that has finished the handshake, and then writes its own yamux frames."""

    def __init__(self, tcp: trio.SocketStream, secured: ISecureConn, peer_id: str) -> None:
        self.tcp = tcp
        self.peer_id = peer_id
        self._secured = secured
        self._unread = bytearray()

    async def write_raw(self, data: bytes) -> None:
        await self._secured.write(data)

    async def write(self, kind: int, flags: int, stream_id: int, length: int, body: bytes = b"") -> None:
        await self._secured.write(struct.pack(YAMUX_HEADER_FORMAT, 0, kind, flags, stream_id, length) + body)

    async def send_data(self, stream_id: int, body: bytes) -> None:
        await self.write(TYPE_DATA, 0, stream_id, len(body), body)

    async def open(self, stream_id: int, protocol: str, *, window: int = 0) -> None:
        await self.write(TYPE_WINDOW_UPDATE, FLAG_SYN, stream_id, window)
        await self.send_data(stream_id, line(b"/multistream/1.0.0") + line(protocol.encode()))

    async def ping(self, number: int) -> None:
        await self.write(TYPE_PING, FLAG_SYN, 0, number)

    async def _read_exactly(self, count: int) -> bytes:
        while len(self._unread) < count:
            chunk = await self._secured.read()
            if not chunk:
                raise EOFError
            self._unread += chunk
        taken = bytes(self._unread[:count])
        del self._unread[:count]
        return taken

    async def read(self) -> tuple[int, int, int, int, bytes]:
        """Return the next frame: kind, flags, stream id, length, body."""
        version, kind, flags, stream_id, length = struct.unpack(
            YAMUX_HEADER_FORMAT, await self._read_exactly(HEADER_SIZE)
        )
        assert version == 0
        assert kind in (0, 1, 2, 3), "the stream of frames is corrupt"
        body = await self._read_exactly(length) if kind == TYPE_DATA else b""
        return kind, flags, stream_id, length, body

    async def read_until(self, wanted: Callable[[int, int, int, int], bool]) -> None:
        while True:
            kind, flags, stream_id, length, _ = await self.read()
            if wanted(kind, flags, stream_id, length):
                return

    async def read_forever(self) -> None:
        await self.read_until(lambda _kind, _flags, _found, _length: False)

    async def until_pong(self, number: int) -> None:
        await self.read_until(
            lambda kind, flags, _, length: (kind, flags, length) == (TYPE_PING, FLAG_ACK, number)
        )

    async def until_reset(self, stream_id: int) -> None:
        await self.read_until(
            lambda _kind, flags, found, _length: bool(flags & FLAG_RST) and found == stream_id
        )


@asynccontextmanager
async def raw_peer(host: Transport) -> AsyncIterator[RawPeer]:
    keys = create_new_key_pair(next(seeds))
    upgrader = TransportUpgrader({NOISE_ID: Noise(keys, noise_privkey=x25519_key_pair().private_key)}, {})
    async with await open_tcp(host) as tcp:
        raw = RawConnection(TrioTCPStream(tcp), True)
        secured = await upgrader.upgrade_security(raw, True, ID.from_base58(host.peer_id))
        selector: GenericMultistreamSelector[None] = GenericMultistreamSelector()
        selector.add_handler(TProtocol("/yamux/1.0.0"), None)
        await selector.select(secured, True)
        yield RawPeer(tcp, secured, str(ID.from_pubkey(keys.public_key)))
