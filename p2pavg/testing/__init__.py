"""For tests, ours and yours: a network in memory that behaves as badly as the real one, from a seed."""

from p2pavg.testing.memory import Inbound, MemoryNetwork, MemoryTransport

__all__ = ["Inbound", "MemoryNetwork", "MemoryTransport"]
