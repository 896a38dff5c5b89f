"""A network in memory: seeded latencies, cuts, stops and crashes, on trio's virtual clock.

Nothing here takes real time: under ``trio.testing.MockClock(autojump_threshold=0)`` (pytest-trio's ``autojump_clock``)
an hour of silence passes in a moment. Each direction between two peers has its own generator of latencies, so one
pair's traffic does not change another pair's latencies. Tasks that are ready at the same instant run in trio's order,
which is not seeded. Give ``latency`` a range, so that instants differ.
"""

from p2pavg.testing.memory.connection import MAX_INBOUND_STREAMS, WINDOW_BYTES, MemoryStream
from p2pavg.testing.memory.network import DIRECT_KINDS, Inbound, MemoryNetwork, MemoryTransport

__all__ = [
    "DIRECT_KINDS",
    "MAX_INBOUND_STREAMS",
    "WINDOW_BYTES",
    "Inbound",
    "MemoryNetwork",
    "MemoryStream",
    "MemoryTransport",
]
