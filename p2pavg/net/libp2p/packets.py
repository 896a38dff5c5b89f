"""Packets of Noise, read and written with fewer turns of the event loop than libp2p takes.

A small message is one frame of yamux in one packet of Noise. libp2p reads a packet in two steps through six layers, and
writes it in a task of its own, with two turns of the loop. Most packets lie in the read-ahead buffer already when they
are wanted, and the kernel takes most of them at once.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from libp2p.security.noise.io import NoiseTransportReadWriter

from p2pavg.net.libp2p.speed import ReadAheadStream


class PacketNoise(NoiseTransportReadWriter):
    """The encryption of one connection, which takes whole packets from a stream that reads ahead."""

    async def read_msg(self, prefix_encoded: bool = False) -> bytes:
        stream = _carrier_of(self)
        if prefix_encoded or not isinstance(stream, ReadAheadStream):
            return await super().read_msg(prefix_encoded)
        return self.decrypt(await stream.read_packet())


class Outlet:
    """Writes packets of one connection that the kernel takes at once. No task may be writing meanwhile."""

    def __init__(self, noise: PacketNoise, stream: ReadAheadStream) -> None:
        self._noise = noise
        self._stream = stream

    def send(self, frame: bytes) -> bytes:
        """Encrypt a frame, hand it to the kernel, and return the bytes that it did not take.

        They have to be written before anything else, because packets are numbered.

        Raises:
            OSError: the connection is gone.
        """
        packet = self._noise.read_writer.encode_msg(self._noise.encrypt(frame))
        try:
            return packet[os.write(self._stream.stream.socket.fileno(), packet) :]
        except BlockingIOError:
            return packet


def use_packets(secured_conn: Any) -> Outlet | None:
    """Let a connection read whole packets from now on.

    Returns:
        Its outlet; ``None`` where there is none: over a relay, and on systems whose sockets are no files.
    """
    noise = getattr(secured_conn, "conn", None)
    if type(noise) is not NoiseTransportReadWriter:
        return None
    stream = _carrier_of(noise)
    noise.__class__ = PacketNoise
    assert isinstance(noise, PacketNoise)
    if sys.platform == "win32" or not isinstance(stream, ReadAheadStream):
        return None
    return Outlet(noise, stream)


def _carrier_of(noise: NoiseTransportReadWriter) -> object:
    raw: Any = noise.read_writer.read_write_closer
    return raw.stream
