"""For tests, ours and yours: a network in memory that behaves as badly as the real one, from a seed."""

from p2pavg.testing.memory import Inbound, MemoryNetwork, MemoryTransport
from p2pavg.testing.simulation import simulated_clock, simulated_peer, simulated_peers

__all__ = [
    "Inbound",
    "MemoryNetwork",
    "MemoryTransport",
    "simulated_clock",
    "simulated_peer",
    "simulated_peers",
]
