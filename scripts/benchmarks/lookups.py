"""Record lookups in simulated networks: what they cost among honest peers, and whether an attacker captures them.

Honest networks: one find of each finder, with its calls and virtual seconds, and whether the record was found. A
fraction `dead` of the peers accepts calls and never answers. One way takes 1 to 2 ms.

Attacked networks: all peers are honest while the network forms. Then a fraction of them lies: each answers with the
eight nearest to the point of many identities of the attacker. Those called `sybils` answer and lie in the same way;
`ghosts` never answer. An honest peer publishes one record before the lying begins, and one after that. Then newcomers
join through an honest peer, and each looks for one of the records.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from p2pavg.testing.simulation import simulate, simulated_clock
from p2pavg_dht import Contact, Ed25519Signer, RecordNode, RpcError
from p2pavg_dht.lookup import PATHS
from p2pavg_dht.messages import (
    Answer,
    Find,
    Found,
    Locate,
    LocateAnswer,
    Store,
    Stored,
    decode_request,
    encode,
)
from p2pavg_dht.routing import K, key_point, nearest
from scripts.benchmarks.figures import Report

if TYPE_CHECKING:
    from trio_typing import TaskStatus

NAME = "lookups"
DELAYS = 0.001, 0.002
SETTLE = 10.0
JOINING = 0.2
IDENTITIES = 2000
TTL = 600.0
SYBILS, GHOSTS = "sybils", "ghosts"
BEFORE, AFTER = "before", "after"


@dataclass(eq=False)
class Node:
    """A simulated peer with its record node, and the number of its calls."""

    network: Network
    signer: Ed25519Signer
    calls: int = 0
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    records: RecordNode = field(init=False)

    def __post_init__(self) -> None:
        self.records = RecordNode(signer=self.signer, rpc=self, wall_clock=simulated_clock)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address of this peer."""
        return contact_of(self.signer.peer_id).addresses

    async def call(self, contact: Contact, request: bytes) -> bytes:
        """Call another peer."""
        self.calls += 1
        return await self.network.deliver(self.signer.peer_id, contact, request)

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Do the background work of the record node until it is killed."""
        with self.scope:
            await self.records.run(task_status=task_status)


class Network:
    """Record nodes in memory. Those in `silent` never answer; those in `liars` name identities of the attacker."""

    def __init__(self, nursery: trio.Nursery, seed: int) -> None:
        self.dice = random.Random(seed)
        self.nodes: dict[str, Node] = {}
        self.silent: set[str] = set()
        self.liars: set[str] = set()
        self.invented: list[Contact] = []
        self.paths = PATHS
        self._nursery = nursery

    async def start(self) -> Node:
        """Start a peer that knows no other."""
        node = Node(self, Ed25519Signer(self.dice.randbytes(32)))
        node.records._operations._paths = self.paths
        self.nodes[node.signer.peer_id] = node
        await self._nursery.start(node.run)
        return node

    async def join(self, through: Node) -> Node:
        """Start a peer that joins through another."""
        node = await self.start()
        await node.records.join([contact_of(through.signer.peer_id)])
        return node

    async def grow(self, count: int) -> list[Node]:
        """Start peers that join one after the other, and wait until they know each other."""
        nodes = [await self.start()]
        async with trio.open_nursery() as nursery:
            for _ in range(count - 1):
                nodes.append(node := await self.start())
                nursery.start_soon(node.records.join, [contact_of(nodes[0].signer.peer_id)])
                await trio.sleep(JOINING)
        await trio.sleep(SETTLE)
        return nodes

    def kill(self, nodes: Sequence[Node]) -> None:
        """Make peers accept calls without ever answering."""
        for node in nodes:
            self.silent.add(node.signer.peer_id)
            node.scope.cancel()

    def corrupt(self, nodes: Sequence[Node], attack: str) -> None:
        """Make peers lie about who is near to a point."""
        self.invented = [contact_of(invented_id(self.dice)) for _ in range(IDENTITIES)]
        self.liars = {node.signer.peer_id for node in nodes}
        names = {contact.peer_id for contact in self.invented}
        if attack == SYBILS:
            self.liars |= names
        else:
            self.silent |= names
        for node in nodes:
            node.scope.cancel()

    async def deliver(self, sender: str, contact: Contact, request: bytes) -> bytes:
        """Carry a request to a peer, and its answer back."""
        await trio.sleep(self.dice.uniform(*DELAYS))
        if contact.peer_id in self.silent or sender in self.silent:
            await trio.sleep_forever()
        if contact.peer_id in self.liars:
            answer = encode(self._lie(contact.peer_id, request))
        elif contact.peer_id in self.nodes:
            answer = self.nodes[contact.peer_id].records.answer(sender, request)
        else:
            raise RpcError("no peer is there")
        await trio.sleep(self.dice.uniform(*DELAYS))
        return answer

    def _lie(self, liar: str, request: bytes) -> Answer:
        match decode_request(request):
            case Find(_, key):
                return Found(self._near(key_point(key), liar), ())
            case Locate(_, point):
                return LocateAnswer(self._near(int.from_bytes(point, "big"), liar))
            case Store(_, records):
                return Stored(self._near(key_point(records[0].key), liar), (), ("",) * len(records), 0)

    def _near(self, point: int, liar: str) -> tuple[Contact, ...]:
        return tuple(nearest((c for c in self.invented if c.peer_id != liar), point, K))


def contact_of(peer_id: str) -> Contact:
    """Return the contact of a peer in memory."""
    return Contact(peer_id, (f"/memory/{peer_id}",))


def invented_id(dice: random.Random) -> str:
    """Return the peer id of a new identity."""
    return Ed25519Signer(dice.randbytes(32)).peer_id


@dataclass(slots=True)
class Finds:
    """The outcomes of finds."""

    calls: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    found: list[bool] = field(default_factory=list)

    async def add(self, node: Node, key: bytes) -> None:
        """Let a peer find the records under a key."""
        calls, began = node.calls, trio.current_time()
        records = await node.records.find(key)
        self.seconds.append(trio.current_time() - began)
        self.calls.append(node.calls - calls)
        self.found.append(bool(records))

    def extend(self, others: Finds) -> None:
        """Add the outcomes of other finds."""
        self.calls += others.calls
        self.seconds += others.seconds
        self.found += others.found


async def honest(peers: int, dead: float, finders: int, seed: int) -> Finds:
    """Let finders look for the records of one publisher each, among peers of which some are dead."""
    finds = Finds()
    async with trio.open_nursery() as nursery:
        network = Network(nursery, seed)
        nodes = await network.grow(peers)
        keys = [network.dice.randbytes(32) for _ in range(finders)]
        for key in keys:
            await network.dice.choice(nodes).records.publish(key, b"here", ttl=TTL)
        killed = network.dice.sample(nodes, round(dead * peers))
        network.kill(killed)
        living = [node for node in nodes if node not in killed]
        for key, node in zip(keys, network.dice.sample(living, len(living)), strict=False):
            await finds.add(node, key)
        nursery.cancel_scope.cancel()
    return finds


async def attacked(
    peers: int, hostile: float, newcomers: int, attack: str, paths: int, seed: int
) -> dict[str, Finds]:
    """Let newcomers look for two records while a fraction of the peers lies: published before that, and since."""
    finds = {BEFORE: Finds(), AFTER: Finds()}
    async with trio.open_nursery() as nursery:
        network = Network(nursery, seed)
        nodes = await network.grow(peers)
        liars = network.dice.sample(nodes, round(hostile * peers))
        truthful = [node for node in nodes if node not in liars]
        keys = {published: network.dice.randbytes(32) for published in finds}
        publisher = network.dice.choice(truthful)
        await publisher.records.publish(keys[BEFORE], b"here", ttl=TTL)
        network.corrupt(liars, attack)
        network.paths = paths
        for node in truthful:
            node.records._operations._paths = paths
        await publisher.records.publish(keys[AFTER], b"here", ttl=TTL)
        for published in list(finds) * newcomers:
            node = await network.join(network.dice.choice(truthful))
            await finds[published].add(node, keys[published])
            node.scope.cancel()
        nursery.cancel_scope.cancel()
    return finds


def add_arguments(parser: argparse.ArgumentParser, *, small: bool) -> None:
    """The options of this benchmark."""
    parser.add_argument(
        "--peers", default="8" if small else "8,50,200", help="honest networks of these sizes"
    )
    parser.add_argument("--dead", default="0,0.3", help="fractions of the honest networks that are dead")
    parser.add_argument("--finders", type=int, default=4 if small else 40)
    parser.add_argument(
        "--attacked", type=int, default=20 if small else 40, help="peers of attacked networks"
    )
    parser.add_argument("--hostile", default="0.3" if small else "0.1,0.2,0.3", help="fractions that lie")
    parser.add_argument("--attacks", default=f"{SYBILS},{GHOSTS}", help="identities that answer, or never do")
    parser.add_argument("--paths", default=f"1,{PATHS}", help="paths of a lookup in attacked networks")
    parser.add_argument(
        "--newcomers", type=int, default=2 if small else 8, help="for each record of each attacked network"
    )
    parser.add_argument(
        "--networks", type=int, default=1 if small else 3, help="attacked networks of each kind"
    )
    parser.add_argument("--seed", type=int, default=0)


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Measure, and report."""
    for peers in map(int, filter(None, arguments.peers.split(","))):
        for dead in map(float, arguments.dead.split(",")):
            report.note(f"{NAME}: {peers} peers, {dead:.0%} dead")
            measure_honest(peers, dead, arguments, report)
    for hostile in map(float, filter(None, arguments.hostile.split(","))):
        for attack in arguments.attacks.split(","):
            for paths in map(int, arguments.paths.split(",")):
                report.note(f"{NAME}: {hostile:.0%} hostile with {attack}, {paths} paths")
                measure_attack(hostile, attack, paths, arguments, report)


def measure_honest(peers: int, dead: float, arguments: argparse.Namespace, report: Report) -> None:
    """Measure finds among honest peers."""

    async def main() -> Finds:
        return await honest(peers, dead, arguments.finders, arguments.seed)

    finds = simulate(main, seed=arguments.seed)
    conditions: dict[str, Any] = {"peers": peers, "dead": dead}
    report.figure(NAME, "calls of a find", "", finds.calls, **conditions)
    report.figure(NAME, "calls of a find, mean", "", [sum(finds.calls) / len(finds.calls)], **conditions)
    report.figure(NAME, "time of a find", "s, virtual", finds.seconds, **conditions)
    report.figure(NAME, "time, mean", "s, virtual", [sum(finds.seconds) / len(finds.seconds)], **conditions)
    report.figure(NAME, "finds without the record", "", [finds.found.count(False)], **conditions)


def measure_attack(
    hostile: float, attack: str, paths: int, arguments: argparse.Namespace, report: Report
) -> None:
    """Measure newcomers' finds while peers lie."""
    every = {BEFORE: Finds(), AFTER: Finds()}
    for seed in range(arguments.seed, arguments.seed + arguments.networks):

        async def main(seed: int = seed) -> dict[str, Finds]:
            return await attacked(arguments.attacked, hostile, arguments.newcomers, attack, paths, seed)

        for published, finds in simulate(main, seed=seed).items():
            every[published].extend(finds)
    for published, finds in every.items():
        conditions: dict[str, Any] = {
            "hostile": hostile,
            "with": attack,
            "paths": paths,
            "published": published,
        }
        rate = 100 * sum(finds.found) / len(finds.found)
        report.figure(NAME, "newcomers that find the record", "%", [rate], **conditions)
        report.figure(NAME, "calls of a newcomer's find", "", finds.calls, **conditions)
        report.figure(NAME, "time of a newcomer's find", "s, virtual", finds.seconds, **conditions)
