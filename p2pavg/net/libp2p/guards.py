"""Guards that py-libp2p 0.8.1 needs before strangers may talk to it.

Each guard repairs one fault, names it, and has a test that fails without it: in
``tests/integration/test_libp2p_*.py``, ``tests/unit/net/libp2p/test_guards.py`` or the transports' conformance suite.

This module holds the guards that replace functions of libp2p's modules, and the guarded host. The others are in
:mod:`~p2pavg.net.libp2p.guarded_swarm`, :mod:`~p2pavg.net.libp2p.guarded_yamux` and
:mod:`~p2pavg.net.libp2p.patient_stream`. Nothing outside :mod:`p2pavg.net.libp2p` imports any of them.
"""

from __future__ import annotations

import logging

import libp2p.io.msgio as _msgio
import libp2p.network.connection.swarm_connection as _swarm_connection
import libp2p.protocol_muxer.multiselect_communicator as _multiselect
from libp2p.abc import INetStream
from libp2p.exceptions import ParseError
from libp2p.host.basic_host import BasicHost
from libp2p.io.abc import Reader
from libp2p.io.exceptions import IncompleteReadError
from libp2p.peer.id import ID
from libp2p.stream_muxer.yamux import yamux as _yamux
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from p2pavg.net.libp2p.errors import is_of_the_network
from p2pavg.net.libp2p.guarded_yamux import MAX_WINDOW_BYTES, GuardedYamux

logger = logging.getLogger(__name__)

# The limit of open inbound streams of one connection. A round needs four streams for each member, a record call one.
MAX_INBOUND_STREAMS = 128

# The longest line of protocol negotiation. Ours are under 40 bytes; the Go implementation allows 64 KiB.
MAX_NEGOTIATION_BYTES = 1024


def install() -> None:
    """Install the guards that replace names of libp2p's modules. A second call changes nothing."""
    # libp2p logs everyday events of an open network at error level; a user who wants these lines adds a handler.
    logging.getLogger("libp2p").addHandler(logging.NullHandler())
    _yamux.MAX_WINDOW_SIZE = MAX_WINDOW_BYTES
    # libp2p calls logging.warning() on the root logger, which installs a handler in the user's process.
    _swarm_connection.logging = logging.getLogger(_swarm_connection.__name__)  # type: ignore[assignment,attr-defined]
    _multiselect.read_delim = _read_line  # type: ignore[attr-defined]
    _yamux.read_exactly = read_exactly  # type: ignore[attr-defined]
    _msgio.read_exactly = read_exactly  # type: ignore[attr-defined]


async def _read_line(reader: Reader) -> bytes:
    """Read a line of the negotiation, with a limit. libp2p reads as many bytes as an unauthenticated peer announces."""
    line = await read_varint_prefixed_bytes_limited(reader, MAX_NEGOTIATION_BYTES)
    if not line.endswith(b"\n"):
        raise ParseError("a line of the negotiation has no end")
    return line[:-1]


async def read_exactly(reader: Reader, n: int, retry_count: int = 0) -> bytes:  # noqa: ARG001 - libp2p's signature
    """Read ``n`` bytes, in any number of pieces.

    libp2p's own function gives up after 101 pieces and reports a closed connection. Slow links deliver small pieces.
    """
    buffer = bytearray()
    while len(buffer) < n:
        piece = await reader.read(n - len(buffer))
        if not piece:
            raise IncompleteReadError(f"closed {n - len(buffer)} bytes early", n, len(buffer))
        if len(piece) == n:
            return piece  # the common case, without a copy
        buffer += piece
    return bytes(buffer)


class GuardedHost(BasicHost):
    """A host that survives any stream, and that learns addresses from this library alone."""

    def _schedule_identify(self, peer_id: ID, *, reason: str) -> None:
        """Do nothing: identify would replace a good address by ``0.0.0.0``, and its system task may end trio."""

    async def _swarm_stream_handler(self, net_stream: INetStream) -> None:
        """Serve an inbound stream. In libp2p, an exception of a handler or a non-UTF-8 protocol name ends the host."""
        muxed = net_stream.muxed_conn
        assert isinstance(muxed, GuardedYamux)
        if muxed.inbound_streams >= MAX_INBOUND_STREAMS:
            logger.info("%s opened more than %d streams at once", muxed.peer_id, MAX_INBOUND_STREAMS)
            await net_stream.reset()
            return
        muxed.inbound_streams += 1
        try:
            await super()._swarm_stream_handler(net_stream)
        except Exception as error:
            if is_of_the_network(error):
                logger.debug("stream of %s dropped: %r", muxed.peer_id, error)
            else:
                logger.exception("stream of %s dropped, because of a bug of this process", muxed.peer_id)
            await net_stream.reset()
        finally:
            muxed.inbound_streams -= 1
