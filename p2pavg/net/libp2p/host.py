"""The host of libp2p with this project's classes, and the number of connections that it may hold."""

from __future__ import annotations

import logging
import math

import libp2p.io.msgio as _msgio
import libp2p.network.connection.swarm_connection as _swarm_connection
import libp2p.protocol_muxer.multiselect_communicator as _multiselect
from libp2p.abc import INetStream
from libp2p.crypto.ed25519 import create_new_key_pair as ed25519_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import ParseError
from libp2p.host.basic_host import BasicHost
from libp2p.io.abc import Reader
from libp2p.io.exceptions import IncompleteReadError
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as Noise
from libp2p.stream_muxer.yamux import yamux as _yamux
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
from libp2p.transport.upgrader import TransportUpgrader
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from p2pavg.net.lanes.limits import MAX_IDLE, MAX_INBOUND
from p2pavg.net.libp2p.guarded_swarm import GuardedMuxerMultistream, GuardedSwarm
from p2pavg.net.libp2p.guarded_yamux import MAX_WINDOW_BYTES, GuardedYamux
from p2pavg.net.libp2p.sniffing import SniffingTCP
from p2pavg.net.libp2p.speed import EagerMultiselectClient, OneAnswerMultiselect
from p2pavg.net.libp2p.stream import is_of_the_network
from p2pavg.net.limits.admission import Acquaintances, Admission, ConnectionLimits
from p2pavg.net.limits.entrance import Entrance, raise_file_limit, share_of_files

# Guards that py-libp2p 0.8.1 needs before strangers may talk to it.
#
# Each guard repairs one fault, names it, and has a test that fails without it: in
# `tests/integration/test_libp2p_*.py`, `tests/unit/net/libp2p/test_guards.py` or the transports' conformance suite.
#
# This module holds the guards that replace functions of libp2p's modules, and the guarded host. The others are in
# p2pavg.net.libp2p.guarded_swarm, p2pavg.net.libp2p.guarded_yamux and p2pavg.net.libp2p.patient_stream. Nothing
# outside p2pavg.net.libp2p imports any of them.

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


logger = logging.getLogger(__name__)

# Never reached. libp2p's own limit would drop connections by rules other than ours.
_LIBP2P_MAX_CONNECTIONS = 1_000_000


class Places:
    """The number of connections and lanes that one transport may have, and the peers that have them."""

    def __init__(self, limits: ConnectionLimits) -> None:
        wanted = limits.connections + limits.unfinished + MAX_INBOUND + 2 * MAX_IDLE
        limit = raise_file_limit()
        share = share_of_files(limit, wanted)
        if share < 1.0:
            limits = limits.scaled(share)
            logger.warning(
                "this process may open only %s files: it holds at most %d connections and %d inbound lanes; "
                "raise the limit with `ulimit -n` for more",
                limit,
                limits.connections,
                int(MAX_INBOUND * share),
            )
        self.lanes = share
        """The share of the usual number of lanes, above 0 and at most 1."""
        self.acquaintances = Acquaintances()
        self.entrance = Entrance(Admission(limits, self.acquaintances))


def new_host(seed: bytes, tcp: SniffingTCP) -> tuple[GuardedHost, GuardedSwarm]:
    """Make a host as ``libp2p.new_host`` does, but with guarded classes and Noise alone.

    libp2p's own function also offers plaintext connections, in which a peer's identity is an unproved claim.
    """
    keys = ed25519_key_pair(seed)
    peer_id = ID.from_pubkey(keys.public_key)
    peerstore = PeerStore()
    peerstore.add_key_pair(peer_id, keys)
    upgrader = TransportUpgrader({NOISE_ID: Noise(keys, noise_privkey=x25519_key_pair().private_key)}, {})
    upgrader.muxer_multistream = GuardedMuxerMultistream({TProtocol(YAMUX_ID): GuardedYamux})
    swarm = GuardedSwarm(
        peer_id,
        peerstore,
        upgrader,
        transports=[tcp],
        retry_config=RetryConfig(max_retries=0),
        connection_config=ConnectionConfig(
            max_connections=_LIBP2P_MAX_CONNECTIONS,
            max_connections_per_peer=3,
            high_watermark=_LIBP2P_MAX_CONNECTIONS,
            min_connections=0,
            low_watermark=0,
        ),
    )
    # p2pavg.net.limits.admission decides which peers get in. Once used up, this limiter would refuse every peer.
    swarm._inbound_limiter.total_tokens = math.inf
    host = GuardedHost(swarm)
    host.multiselect_client = EagerMultiselectClient()
    # Without libp2p's own protocols: identify would write a stranger's claims into our peerstore, and ping is not used.
    host.multiselect = OneAnswerMultiselect()
    return host, swarm
