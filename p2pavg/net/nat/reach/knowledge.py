"""A peer's knowledge of its own reachability: a state machine. No I/O, no clock, no random source.

Rules
=====

1. **Peers at loopback are not asked.** No router is on that path. As long as no peer of another network has answered,
   all addresses of the machine are announced at once: processes of one machine or one local network never wait.
2. **Look.** A few connected peers of different networks say at which host they see this one. The believed hosts are
   those that at least half of the networks name (:mod:`p2pavg.net.nat.reach.facts`). If such a host is an
   address of this machine, no router is between; a firewall still may be.
3. **Dial back.** Each believed host with each listening port, and with the port that a router maps, is an *endpoint*.
   Two peers that see this one at that host, from other hosts, dial it. The endpoint works if at least half of the
   networks that tried say so, and this process has seen their connections (:mod:`p2pavg.net.nat.reach.facts`).
   Where no router is between, peers of other networks that have connected to this one count as well: a firewall that
   lets them in is open, whatever liars say.
4. **Probe.** While no endpoint behind a router works, whoami probes from one fresh port to two or three servers tell
   the kind of the router (:mod:`p2pavg.net.nat.reach.reachability`). The listening port is not used for that: a
   probe would open it in the router for that server, whose dial-back would then prove nothing.
5. **IPv4 decides** the kind, if a peer of another network has seen this one over IPv4: most peers have IPv4 only.
   Working endpoints of both versions are announced.
6. **Announce** what works: first the user's list, then endpoints that others have dialled, then addresses of this
   machine for peers of the same network (public ones until dial-backs fail), then circuits through relays. While no
   peer is there that could try it, a mapping counts as working if the router says that its outer address is public.
7. **Relays are wanted** as soon as a router or a closed firewall is seen, until an endpoint works.
8. **Changes.** When an address of this machine disappears, or no peer sees it at a host where it was seen before, all
   that was learned over that version of IP is forgotten. When one peer changes its observation, all are asked again.

A question is open from :meth:`Knowledge.questions` until :meth:`Knowledge.heard`, and is not asked twice meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from p2pavg.base.hosts import is_loopback, version_of
from p2pavg.base.limits import RETRY_SECONDS
from p2pavg.net.limits.dial_policy import is_private
from p2pavg.net.nat.reach.facts import ENOUGH, VERSIONS, Endpoint, Facts, Mapped, Neighbour
from p2pavg.net.nat.reach.reachability import (
    BEING_TRIED_SENTENCE,
    NOT_ASKED,
    PUBLIC_SENTENCE,
    PUNCHABLE_BARRIERS,
    Barrier,
    Kind,
    Probe,
    Reachability,
    announced,
    behind,
    mapped,
)

REACH_LOOK_SECONDS = 15.0
"""The time between two looks at one peer. A look takes 5 s at most, so a new outer address is noticed within 20 s."""

MAX_OBSERVERS = 6
"""Peers that are asked for their observation again and again. Three networks outvote one that lies."""
MAX_DIRECT = 4
"""Direct addresses that are announced beside circuits: a dialler tries six addresses in all."""


# The questions to other peers, and when they are asked again.


@dataclass(frozen=True, slots=True, kw_only=True)
class AskLook:
    """Ask a peer at which host it sees this one."""

    peer: Neighbour
    reason: str = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskDialBack:
    """Ask a peer to dial this one back at a port."""

    peer: Neighbour
    host: str
    """The host at which that peer sees this one."""
    port: int
    reason: str = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskWhoami:
    """Probe a peer's listener from a local port; ``None`` takes a fresh one."""

    peer: Neighbour
    local_port: int | None = field(compare=False)
    reason: str = field(compare=False)


Question = AskLook | AskDialBack | AskWhoami


class Agenda:
    """The questions that are open, and the moments before which others are not asked again."""

    def __init__(self) -> None:
        self._open: dict[Question, Question] = {}
        self._void: set[Question] = set()
        """Open questions whose answers do not count any more."""
        self._not_before: dict[Question, float] = {}

    def begin(self, question: Question) -> None:
        """Note that a question is being asked."""
        self._open[question] = question

    def end(self, now: float, question: Question, *, answered: bool) -> bool:
        """Note the end of a question. Return false if its answer does not count any more.

        Args:
            question: the object with which it began. An equal one may have begun after it was withdrawn.
        """
        if self._open.get(question) is not question:
            return False
        del self._open[question]
        if question in self._void:
            self._void.discard(question)
            return False
        self._not_before[question] = now + (REACH_LOOK_SECONDS if answered else RETRY_SECONDS)
        return True

    def may_ask(self, now: float, question: Question) -> bool:
        """Return whether a question is not open, and not to be asked later."""
        return question not in self._open and now >= self._not_before.get(question, now)

    @property
    def open(self) -> Sequence[Question]:
        """The open questions, also those whose answers do not count."""
        return list(self._open)

    @property
    def counting(self) -> Sequence[Question]:
        """The open questions whose answers count."""
        return [question for question in self._open if question not in self._void]

    def ignore_dial_backs(self, port: int) -> None:
        """Let the answers to open dial-backs of a port not count. All of them are asked again."""
        of_port = {each for each in self.known if isinstance(each, AskDialBack) and each.port == port}
        self._void |= of_port & self._open.keys()
        self.hurry(of_port)

    def withdraw(self) -> None:
        """Forget all questions. They may be asked again at once: the old ones were asked in another network."""
        self._open.clear()
        self._void.clear()
        self._not_before.clear()

    @property
    def known(self) -> set[Question]:
        """The questions that are open, or asked again later."""
        return {*self._open, *self._not_before}

    def hurry(self, questions: Iterable[Question] | None = None) -> None:
        """Let questions be asked again at once; ``None`` means all."""
        for question in [*self._not_before] if questions is None else questions:
            self._not_before.pop(question, None)


class Knowledge:
    """See the top of this file.

    Args:
        peer_id: this peer's id.
        announce: addresses that the user has named, without a peer id, such as ``/ip4/198.51.100.7/tcp/4001``.
    """

    def __init__(self, peer_id: str, announce: Sequence[str] = ()) -> None:
        self._peer_id = peer_id
        self._announce = tuple(announce)
        self._relays: tuple[str, ...] = ()
        self._circuits: tuple[str, ...] = ()
        self._given: list[tuple[str, str, int, bool]] = []
        self._neighbours: tuple[Neighbour, ...] = ()
        self._facts = Facts()
        self._agenda = Agenda()
        self.network = 0
        """A number that changes when this machine has come into another network."""

    # -- events

    def machine(
        self, interfaces: Collection[str], listening: Sequence[Endpoint], *, source6: str = ""
    ) -> None:
        """Note this machine's addresses, and the hosts and ports at which the listeners can be reached from outside.

        Args:
            interfaces: all IP addresses of the machine.
            listening: no wildcards; in the order in which they are to be announced.
            source6: the address from which the machine connects to other networks over IPv6; empty if it cannot.
        """
        facts = self._facts
        facts.source6 = source6
        before, facts.interfaces = facts.interfaces, frozenset(interfaces)
        facts.listening = tuple(listening)
        facts.meet(self._neighbours)
        # A new address may be a way out that was not there: all questions may be asked again at once.
        if before != facts.interfaces:
            self._agenda.hurry()
        for version in sorted({version_of(host) for host in before - facts.interfaces} & set(VERSIONS)):
            # An address that is gone was perhaps the one over which peers have seen this machine.
            facts.observations.forget(version)
            self._moved(version)

    def connected(self, neighbours: Sequence[Neighbour]) -> None:
        """Note the peers with direct connections. A peer with several ones counts once for each of its hosts."""
        # Neighbours are equal whatever their port, and whichever side dialled. Here a change of these counts, too.
        given = [(found.peer_id, found.host, found.port, found.arrived) for found in neighbours]
        if given == self._given:
            return
        self._given = given
        unique: dict[Neighbour, Neighbour] = {}
        for found in filter(lambda neighbour: version_of(neighbour.host), neighbours):
            # Two connections of one peer tell different things: the one that it made
            # has arrived here, and the other has its port.
            other = unique.get(found, found)
            unique[found] = replace(
                found, port=other.port or found.port, arrived=other.arrived or found.arrived
            )
        self._neighbours = tuple(unique.values())
        self._facts.meet(self._neighbours)
        # When peers that are not connected any more were to be asked is forgotten.
        kept = {found.peer_id for found in neighbours}
        self._agenda.hurry(each for each in self._agenda.known if each.peer.peer_id not in kept)

    def mapped(self, mapping: Mapped | None) -> None:
        """Note the port that a router passes on; ``None`` if there is none any more."""
        for changed in (self._facts.mapping, mapping) if mapping != self._facts.mapping else ():
            if changed is not None:
                # Votes on the old port and on the new one were cast without this
                # mapping. So may be the answers under way.
                self._facts.dial_backs.forget_port(changed.port)
                self._agenda.ignore_dial_backs(changed.port)
        self._facts.mapping = mapping

    def relayed_by(self, relays: Sequence[str], circuits: Sequence[str]) -> None:
        """Note the peers that relay for this one, and the addresses that lead through them."""
        self._relays, self._circuits = tuple(relays), tuple(circuits)

    def heard(self, now: float, question: Question, answer: str | bool | Probe | None) -> None:
        """Note the end of a question. The answer is ignored if the network has changed meanwhile.

        Args:
            now: seconds of a clock that does not run backwards.
            answer: the host for a look, the result for a dial-back, the probe for a whoami; ``None`` if there was no
                answer, or one that says nothing.
        """
        # A question that was asked in the network before says nothing about this one.
        if not self._agenda.end(now, question, answered=answer is not None):
            return
        match question, answer:
            case AskLook(), str():
                self._observed(question.peer, answer)
            case AskLook(), _:
                with self._watching_hosts():
                    self._facts.observations.unanswered(question.peer.peer_id)
            case AskDialBack(), bool():
                endpoint, peer = (question.host, question.port), question.peer
                self._facts.dial_backs.vote(now, endpoint, peer.peer_id, peer.host, reached=answer)
            case AskDialBack(), _:
                self._facts.dial_backs.unanswered((question.host, question.port))
            case AskWhoami(), Probe():
                self._facts.probes[version_of(answer.server_host)].add(answer)

    def _observed(self, peer: Neighbour, host: str) -> None:
        with self._watching_hosts():
            changed = self._facts.observations.add(peer.peer_id, peer.host, host, self._facts.interfaces)
        # One peer sees another host than before. Whether that holds for all, the others are asked at once.
        if changed:
            self._agenda.hurry(each for each in self._agenda.known if isinstance(each, AskLook))

    @contextmanager
    def _watching_hosts(self) -> Iterator[None]:
        """Forget what was learned over a version of IP if none of its believed hosts is left after the block."""
        before = {version: set(self._facts.view(version).hosts) for version in VERSIONS}
        yield
        for version, hosts in before.items():
            # As long as one of the hosts is left, the machine is still in the same network.
            if hosts and not hosts & set(self._facts.view(version).hosts):
                self._moved(version)
        self._facts.dial_backs.keep_hosts(self._facts.outer_hosts)

    def _moved(self, version: int) -> None:
        """Forget what was learned of the network before, except for the newest observations."""
        self._facts.probes[version].forget()
        # The answers to open questions would be about the old network.
        self._agenda.withdraw()
        self._facts.dial_backs.keep_hosts(self._facts.outer_hosts)
        self.network += 1

    # -- questions

    def questions(self, now: float) -> list[Question]:
        """Return the questions to ask now. Each stays open until its end is told with :meth:`heard`."""
        found = self._begun(self._looks(now))
        # A user that names the addresses knows how this peer is reached.
        if not self._announce:
            for version in VERSIONS:
                for endpoint in self._facts.endpoints(version):
                    found += self._begun(self._dial_backs(now, endpoint))
                found += self._begun(self._probes(now, version))
        return found

    def _begun(self, questions: Iterable[Question]) -> list[Question]:
        found = list(questions)
        for question in found:
            self._agenda.begin(question)
        return found

    def _looks(self, now: float) -> Iterator[AskLook]:
        # Peers of different networks stand first, so a few of them are enough to outvote liars of one network.
        for peer in self._facts.askable[:MAX_OBSERVERS]:
            question = AskLook(
                peer=peer, reason="the host at which other peers see this one may have changed"
            )
            if self._agenda.may_ask(now, question):
                yield question

    def _dial_backs(self, now: float, endpoint: Endpoint) -> list[AskDialBack]:
        host, port = endpoint
        if self._facts.works(endpoint) is None:
            peers, reason = self._facts.missing(endpoint), f"port {port} at {host} may work"
        elif now >= self._facts.dial_backs.check_at(endpoint):
            peers, reason = self._facts.dialers(host), f"port {port} at {host} is checked again"
        else:
            return []
        under_way = [
            one
            for one in self._agenda.counting
            if isinstance(one, AskDialBack) and (one.host, one.port) == endpoint
        ]
        # A peer dials one port at a time.
        dialling = {one.peer for one in self._agenda.open if isinstance(one, AskDialBack)}
        questions = [AskDialBack(peer=peer, host=host, port=port, reason=reason) for peer in peers]
        may_ask = [
            question
            for question in questions
            if self._agenda.may_ask(now, question) and question.peer not in dialling
        ]
        # Each dial costs another peer a connection, so no more are asked for than decide.
        return may_ask[: max(0, ENOUGH - len(under_way))]

    def _probes(self, now: float, version: int) -> list[AskWhoami]:
        """Return the next probe, one at a time: the first one's local port is used for the others."""
        view, probes = self._facts.view(version), self._facts.probes[version]
        again = now >= probes.again_at
        # The kind of the router matters only while no port works.
        if not view.routed or self._facts.working(version) or (probes.settled and not again):
            return []
        if any(
            isinstance(one, AskWhoami) and version_of(one.peer.host) == version for one in self._agenda.open
        ):
            return []
        for peer in self._facts.askable:
            # A probe to this peer's own outer address stays inside the router, and
            # tells nothing about its other side.
            if not peer.port or version_of(peer.host) != version or peer.host in view.hosts:
                continue
            # The answers of several servers are compared, so each is probed once.
            if probes.has(peer.host) and not again:
                continue
            question = AskWhoami(
                peer=peer,
                local_port=None if again else probes.local_port,
                reason="the kind of the router is not certain",
            )
            if self._agenda.may_ask(now, question):
                return [question]
        return []

    # -- conclusions

    @property
    def behind_router(self) -> bool:
        """True if a router is between this peer and others, so that mapping a port may help."""
        return any(self._facts.view(version).routed for version in VERSIONS)

    def keeps_ports(self, version: int) -> bool:
        """Return whether a new connection's outer port is its local port, for one version of IP."""
        return self._facts.barrier(version) in (Barrier.KEEPS_PORTS, Barrier.FIREWALL)

    @property
    def relays_wanted(self) -> bool:
        """True if a router or a firewall keeps other peers from dialling this one, as far as is known.

        A router counts until an endpoint works, so that the peer has relays from the first second. IPv6 counts like
        that too, since most homes have a firewall for it.
        """
        facts, version = self._facts, self._facts.deciding_version
        if self._announce or not version or facts.working(version):
            return False
        return version == 6 or facts.view(version).routed or facts.is_closed(version)

    @property
    def reachability(self) -> Reachability:
        """The reachability as far as it is known."""
        kind, sentence = self._kind()
        return Reachability(
            kind=kind,
            sentence=sentence,
            outer_hosts=self._facts.outer_hosts,
            relays=self._relays,
            punch_hosts=self._facts.punch_hosts,
        )

    def _kind(self) -> tuple[Kind, str]:
        """Return the kind of reachability and the sentence.

        Behind a router, this peer counts as closed until a dial-back succeeds. A success takes a round trip, a failure
        seconds: dials to a closed port are dropped without an answer.
        """
        facts, mapping, version = self._facts, self._facts.mapping, self._facts.deciding_version
        if self._announce:
            return Kind.ANNOUNCED, announced(len(self._announce))
        if not version:
            if (found := self._untried_mapping()) is not None:
                return Kind.MAPPED, mapped(found.port, found.protocol)
            return NOT_ASKED.kind, NOT_ASKED.sentence
        if works := facts.working(version):
            if mapping is not None and all(
                port == mapping.port and host not in facts.interfaces for host, port in works
            ):
                return Kind.MAPPED, mapped(mapping.port, mapping.protocol)
            return Kind.PUBLIC, PUBLIC_SENTENCE
        barrier, is_closed = facts.barrier(version), facts.is_closed(version)
        sentence = behind(barrier, len(self._relays)) if is_closed else BEING_TRIED_SENTENCE
        if version == 4 and facts.working(6):
            sentence += "; public over IPv6"
        elif version == 4 and barrier not in PUNCHABLE_BARRIERS and facts.punch_hosts:
            sentence += "; direct connections over IPv6 by hole punching"
        if not is_closed and not facts.view(version).routed:
            return Kind.UNKNOWN, sentence
        return (Kind.PUNCHABLE if barrier in PUNCHABLE_BARRIERS else Kind.RELAYED), sentence

    def _untried_mapping(self) -> Mapped | None:
        """Return the router's mapping if its outer address is public, and no peer outside is there that could try it.

        The first peer of a run at home needs an address for others to join by.
        """
        mapping = self._facts.mapping
        if mapping is None or self._facts.outer_hosts or is_private(mapping.host):
            return None
        return mapping

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses to announce, the best first; each ends in this peer's id."""
        works = [found for version in VERSIONS for found in self._facts.working(version)]
        if (mapping := self._untried_mapping()) is not None:
            works.append((mapping.host, mapping.port))
        own = [
            found for found in self._facts.listening if found not in works and self._may_be_announced(found)
        ]
        found = [f"/ip{version_of(host)}/{host}/tcp/{port}" for host, port in (*works, *own)]
        direct = [f"{text}/p2p/{self._peer_id}" for text in dict.fromkeys((*self._announce, *found))]
        return (*(direct[:MAX_DIRECT] if self._circuits else direct), *self._circuits)

    def _may_be_announced(self, endpoint: Endpoint) -> bool:
        """Return whether an address of this machine is announced although no other peer has dialled it.

        Private ones are for peers of the same network, and public ones count until a dial-back has failed. Loopback
        addresses are announced as long as no peer of another network was seen.
        """
        facts, host = self._facts, endpoint[0]
        if not facts.outer_hosts:
            return True
        if is_loopback(host):
            return False
        if version_of(host) == 6 and not facts.view(6).hosts and facts.view(4).routed:
            # No peer can try it, and routers of homes let no IPv6 in that was not asked for.
            return is_private(host)
        return is_private(host) or facts.works(endpoint) is not False
