"""Helper: routers and peers around one :class:`Knowledge`, which answer its questions without a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from p2pavg.net.nat.reach.facts import Neighbour
from p2pavg.net.nat.reach.knowledge import AskDialBack, AskLook, AskWhoami, Knowledge, Question
from p2pavg.net.nat.reach.reachability import Kind, Probe

ME = "me"
HOME, LOOPBACK = "192.168.1.2", "127.0.0.1"
OUTER = "203.0.113.1"
PORT = 4001

A, B, C, D = (
    Neighbour(peer_id=name, host=host, port=4001)
    for name, host in (("a", "198.51.100.1"), ("b", "192.0.2.2"), ("c", "5.0.0.3"), ("d", "6.0.0.4"))
)
"""Public peers, each in another network."""

Answer = str | bool | Probe | None


def keeps(_: Neighbour, local_port: int) -> int:
    """Return the outer port of a router that keeps ports."""
    return local_port


def shifts(_: Neighbour, local_port: int) -> int:
    """Return the outer port of a router that changes ports, and ignores the destination."""
    return local_port + 1000


def symmetric(peer: Neighbour, local_port: int) -> int:
    """Return the outer port of a router that gives each destination another one."""
    return local_port + 1 + ord(peer.peer_id)


@dataclass
class World:
    """The truth about one peer, and the answers of its neighbours; ``lies`` replaces those of some."""

    peers: list[Neighbour] = field(default_factory=lambda: [A, B, C])
    interfaces: list[str] = field(default_factory=lambda: [LOOPBACK, HOME])
    outer: str = OUTER
    """The host at which public peers see this one."""
    source6: str = ""
    """The address of the machine's connections over IPv6."""
    outer6: str = ""
    """The same for neighbours with an IPv6 address."""
    dialable: set[tuple[str, int]] = field(default_factory=set)
    router: Callable[[Neighbour, int], int] = keeps
    announce: tuple[str, ...] = ()
    ports: tuple[int, ...] = (PORT,)
    lies: dict[str, Callable[[Question], Answer]] = field(default_factory=dict)
    now: float = 0.0
    asked: list[Question] = field(default_factory=list)
    fresh_port: int = 50000

    def __post_init__(self) -> None:
        self.knowledge = Knowledge(ME, self.announce)
        self.tell()

    def tell(self) -> None:
        """Tell the machine's addresses and the connected peers."""
        hosts = sorted(self.interfaces, key=LOOPBACK.__eq__)
        listening = [(host, port) for port in self.ports for host in hosts]
        self.knowledge.machine(self.interfaces, listening, source6=self.source6)
        self.knowledge.connected(self.peers)

    def settle(self) -> None:
        """Answer questions until there are none."""
        for _ in range(100):
            questions = self.knowledge.questions(self.now)
            if not questions:
                return
            for question in questions:
                self.asked.append(question)
                self.knowledge.heard(self.now, question, self.answer(question))
        raise AssertionError("the questions do not end")

    def wait(self, seconds: float) -> None:
        """Let time pass, and answer the questions that come in it."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            self.settle()

    def answer(self, question: Question) -> Answer:
        """Return the answer of the peer that is asked."""
        if question.peer.peer_id in self.lies:
            return self.lies[question.peer.peer_id](question)
        return self.truth(question)

    def truth(self, question: Question) -> Answer:
        """Return the honest answer."""
        match question:
            case AskLook():
                return self.outer6 if ":" in question.peer.host else self.outer
            case AskDialBack():
                return (question.host, question.port) in self.dialable
            case AskWhoami():
                local_port = question.local_port or self.fresh_port
                self.fresh_port += 1
                outer_port = self.router(question.peer, local_port)
                return Probe(question.peer.host, local_port, outer_port, self.now)

    def kind(self) -> Kind:
        """Return the kind of reachability, as it is known now."""
        return self.knowledge.reachability.kind

    def text(self, host: str, port: int = PORT) -> str:
        """Return an address of this peer."""
        return f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}/p2p/{ME}"
