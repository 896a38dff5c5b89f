"""Tools for tests: a seeded network in memory with the faults of a real one, and swarms of real processes."""

from p2pavg.group.milestones import Milestone
from p2pavg.testing.faults import (
    After,
    At,
    Crash,
    Cut,
    Delay,
    Disconnect,
    Fault,
    FaultPlan,
    Partition,
    Stop,
    Throttle,
)
from p2pavg.testing.loops import SimulatedLoop, run_loops
from p2pavg.testing.memory import Inbound, MemoryNetwork, MemoryTransport
from p2pavg.testing.simulation import run_peers, simulate, simulated_clock, simulated_peer, simulated_peers
from p2pavg.testing.swarm import LocalSwarm, Member, SwarmProcess

__all__ = [
    "After",
    "At",
    "Crash",
    "Cut",
    "Delay",
    "Disconnect",
    "Fault",
    "FaultPlan",
    "Inbound",
    "LocalSwarm",
    "Member",
    "MemoryNetwork",
    "MemoryTransport",
    "Milestone",
    "Partition",
    "SimulatedLoop",
    "Stop",
    "SwarmProcess",
    "Throttle",
    "run_loops",
    "run_peers",
    "simulate",
    "simulated_clock",
    "simulated_peer",
    "simulated_peers",
]
