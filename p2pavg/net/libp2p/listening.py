"""Listening: free ports, the listeners of a swarm, and the addresses to announce."""

from __future__ import annotations

import socket
from typing import cast

from libp2p.transport.tcp.tcp import TCPListener
from multiaddr import Multiaddr

from p2pavg.base.errors import ListenError
from p2pavg.net.libp2p.guarded_swarm import GuardedSwarm


def check_free(address: Multiaddr) -> None:
    """Raise ListenError if another socket listens at an address.

    libp2p listens with SO_REUSEPORT. On a port that another of its hosts holds, each of the two would get half of the
    peers.
    """
    family = socket.AF_INET if "ip4" in address else socket.AF_INET6
    port = int(str(address.value_for_protocol("tcp")))
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host_of(address), port))
            probe.listen(1)
        except OSError as error:
            raise ListenError(f"cannot listen on {address}: {error.strerror}") from None


def host_of(address: Multiaddr) -> str:
    """Return the IP address in a multiaddress."""
    return str(address.value_for_protocol(_version_of(address)))


def listeners_of(swarm: GuardedSwarm) -> list[TCPListener]:
    """Return the listeners of a swarm."""
    return [cast(TCPListener, listener) for listener in swarm.listeners.values()]


def endpoints_of(swarm: GuardedSwarm) -> list[tuple[str, int]]:
    """Return the hosts and ports at which the listeners of a swarm are bound; a host may be a wildcard."""
    bound = [address for listener in listeners_of(swarm) for address in listener.get_addrs()]
    return [(host_of(address), int(str(address.value_for_protocol("tcp")))) for address in bound]


def _version_of(address: Multiaddr) -> str:
    return "ip4" if "ip4" in address else "ip6"
