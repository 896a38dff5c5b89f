"""For tests, ours and yours: a network in memory that behaves as badly as the real one, from a seed."""

from p2pavg.testing.memory import Inbound, MemoryNetwork, MemoryTransport
from p2pavg.testing.simulation import simulated_clock, simulated_peer, simulated_peers
from p2pavg.testing.swarm import LocalSwarm, Member, SwarmProcess

__all__ = [
    "Inbound",
    "LocalSwarm",
    "Member",
    "MemoryNetwork",
    "MemoryTransport",
    "SwarmProcess",
    "simulated_clock",
    "simulated_peer",
    "simulated_peers",
]
