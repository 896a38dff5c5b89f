"""Two peers whose streams are in memory, and whose punches are real connections on loopback."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import cast

import trio

from p2pavg.base.errors import UnreachableError
from p2pavg.net.limits.admission import Acquaintances
from p2pavg.net.limits.dial_gate import DialGate
from p2pavg.net.nat.punch.meeting import Puncher
from p2pavg.net.nat.punch.service import PunchService
from p2pavg.net.nat.reach.reachability import Kind, Reachability
from p2pavg.net.nat.reach.watcher import Connecting, ReachWatcher
from p2pavg.net.transport import PeerId, Transport
from p2pavg.testing import MemoryNetwork
from p2pavg.testing.memory import MemoryTransport
from tests.unit.group.samples import SIGNERS

BEHIND_A_ROUTER = Reachability(
    kind=Kind.PUNCHABLE, sentence="behind a router that keeps ports", punch_hosts=("127.0.0.1",)
)
BEHIND_A_SYMMETRIC_ROUTER = Reachability(kind=Kind.RELAYED, sentence="behind a symmetric router")


async def kept(version: int, port: int) -> int:
    """Predict the outer port as behind a router that keeps ports."""
    return port


class Router:
    """Stands for the transport and the watcher of a peer, which know the router before it."""

    def __init__(self, reachability: Reachability) -> None:
        self.reachability = reachability
        self.outer_port = kept

    def puncher(self, gate: DialGate) -> Puncher:
        return Puncher(gate, cast(Transport, self), cast(ReachWatcher, self))


def new_gate(loopback: bool = True) -> DialGate:
    """Return the gate of a process that has met a peer, and that may dial on loopback if its user said so."""
    acquaintances = Acquaintances()
    acquaintances.met("another peer", "203.0.113.7")
    gate = DialGate(acquaintances)
    if loopback:
        gate.listens_at("127.0.0.1")
    return gate


async def shake_hands(plain: socket.socket, *, me: PeerId, peer_id: PeerId, initiator: bool) -> None:
    """Stand in for the handshake of Noise: each end sends its id and its role, and checks the other's."""
    with plain:
        plain.send(f"{me} {int(initiator)}".encode())
        await trio.lowlevel.wait_readable(plain.fileno())
        remote, role = b"", b"0"
        with suppress(OSError, ValueError):
            remote, role = plain.recv(1000).split()
        if remote.decode() != peer_id or int(role) == initiator:
            raise UnreachableError(f"the other end is not {peer_id}, but said {remote!r}")


@dataclass
class Side:
    """A peer with everything that its punches depend on."""

    transport: MemoryTransport
    router: Router = field(default_factory=lambda: Router(BEHIND_A_ROUTER))
    gate: DialGate = field(default_factory=new_gate)
    adopted: list[tuple[PeerId, bool]] = field(default_factory=list)
    dialled: list[tuple[PeerId, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.puncher = self.router.puncher(self.gate)
        self.service = PunchService(self.transport, cast(Connecting, self), self.puncher)

    @property
    def peer_id(self) -> PeerId:
        return self.transport.peer_id

    async def adopt_socket(self, plain: socket.socket, peer_id: PeerId, *, initiator: bool) -> None:
        await shake_hands(plain, me=self.peer_id, peer_id=peer_id, initiator=initiator)
        self.adopted.append((peer_id, initiator))

    async def dial_one(self, peer_id: PeerId, address: str) -> None:
        self.dialled.append((peer_id, address))
        if "dead" in address:
            raise UnreachableError("no answer")


@asynccontextmanager
async def two_sides() -> AsyncIterator[tuple[Side, Side]]:
    """Open two connected peers."""
    network = MemoryNetwork(seed=1, latency=(0.001, 0.002))
    async with network.transport(SIGNERS[0]) as one, network.transport(SIGNERS[1]) as other:
        here, there = Side(one), Side(other)
        await one.dial(other.addresses[0], timeout=5.0)
        yield here, there
