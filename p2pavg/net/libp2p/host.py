"""The host of libp2p with this project's classes, and the number of connections that it may hold."""

from __future__ import annotations

import logging
import math

from libp2p.crypto.ed25519 import create_new_key_pair as ed25519_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as Noise
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
from libp2p.transport.upgrader import TransportUpgrader

from p2pavg.net.lanes.limits import MAX_IDLE, MAX_INBOUND
from p2pavg.net.libp2p.guarded_swarm import GuardedMuxerMultistream, GuardedSwarm
from p2pavg.net.libp2p.guarded_yamux import GuardedYamux
from p2pavg.net.libp2p.guards import GuardedHost
from p2pavg.net.libp2p.sniffing import SniffingTCP
from p2pavg.net.libp2p.speed import EagerMultiselectClient, OneAnswerMultiselect
from p2pavg.net.limits.admission import Acquaintances, Admission, ConnectionLimits
from p2pavg.net.limits.entrance import Entrance
from p2pavg.net.limits.open_files import raise_file_limit, share_of_files

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
        self.entrance = Entrance(
            Admission(limits, self.acquaintances.standing_of, self.acquaintances.standing_at)
        )


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
