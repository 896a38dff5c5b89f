"""The trials in labs: pairs of peers, punching, a change of networks, a relay that is killed, forty peers.

scripts/benchmarks/nat.py prints the figures, and the tests beside this file assert the bars for a few of them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations_with_replacement

from tests.nat.crew import DAEMON, DAEMON_PORT, KEEP_LOGS, LYING_DAEMON, Crew, Process
from tests.nat.lab import Host, Kind, Lab, lab
from tests.nat.namespaces import LabError
from tests.nat.team import DIRECT, MAPPED, PUNCHED, RELAYED, Member, Team, way

SAME = "same router"
PAIRS: tuple[tuple[Kind, Kind], ...] = tuple(combinations_with_replacement(Kind, 2))
PAIR_SECONDS = 90.0
SETTLE_SECONDS = 20.0
SETTLED_ROUNDS = 3
"""Rounds at the end of a trial, in which two peers that can meet directly do so."""
OTHER_HOME = "192.168.178"
FORTY = {Kind.PUBLIC: 5, Kind.FORWARDED: 7, Kind.UPNP: 4, Kind.CONE: 13, Kind.SYMMETRIC: 6, Kind.CGNAT: 5}
"""Kinds of forty peers: 28 of them are behind routers through which no port is open at the beginning."""
STARTED_AT_ONCE = 4
START_SECONDS = 60.0


@dataclass
class Stage:
    """A lab with its processes and the daemons through which peers meet."""

    lab: Lab
    crew: Crew
    daemons: list[tuple[Process, str]]

    @property
    def bootstrap(self) -> list[str]:
        """The addresses of the daemons, of both versions of IP."""
        found = []
        for process, printed in self.daemons:
            host, peer_id = process.host, printed.rpartition("/")[2]
            places = [f"/ip4/{host.address}", *([f"/ip6/{host.address6}"] if host.address6 else [])]
            found += [f"{place}/tcp/{DAEMON_PORT}/p2p/{peer_id}" for place in places]
        return found

    def relayed_bytes(self) -> int:
        """Return the bytes that the daemons have sent: control traffic and what is relayed, as they are in no group."""
        return sum(process.host.bytes()[0] for process, _ in self.daemons)


@contextmanager
def stage(
    daemons: int = 1, delay_ms: float = 0.0, entry: str = DAEMON, *, ipv6: bool = False
) -> Iterator[Stage]:
    """Provide a lab with public daemons, all of one network."""
    with lab(delay_ms, ipv6=ipv6) as made, Crew(made) as crew:
        found: list[tuple[Process, str]] = []
        for _ in range(daemons):
            known = [word for _, address in found for word in ("--bootstrap", address)]
            host = made.site(Kind.PUBLIC).hosts[0]
            found.append(crew.daemon(host, "--verbose", *known, entry=entry))
        yield Stage(made, crew, found)


def may_be(first: Kind, second: Kind) -> tuple[str, ...]:
    """Return the ways in which peers of two sites may be connected."""
    kinds = {first, second}
    if kinds & {Kind.PUBLIC, Kind.FORWARDED}:
        return (DIRECT,)
    if Kind.UPNP in kinds:
        return (MAPPED,)
    # A port of a symmetric router cannot be foretold. The other side's can, so that luck and skill may punch.
    # Two routers that reject let only SYNs through that cross on the way, which takes some time in a lab with a delay
    # and nearly none in one without.
    if kinds == {Kind.DUAL}:
        return (PUNCHED,)  # over IPv6
    symmetric = kinds & {Kind.SYMMETRIC, Kind.DUAL}
    return (PUNCHED, RELAYED) if symmetric or kinds == {Kind.REJECTING} else (PUNCHED,)


@dataclass(kw_only=True)
class PairOutcome:
    """The outcome of a trial with two peers."""

    name: str
    allowed: tuple[str, ...]
    way: str = RELAYED
    first_success: float | None = None
    """Seconds from the start of the peers to the first ``Success`` of the later one; ``None`` without one."""
    rounds: int = 0
    relayed: float = 0.0
    """Bytes that the daemon sent, of the bytes that the peers sent to each other in all rounds."""
    relayed_later: float = 0.0
    """The same for the last rounds."""
    exchange: float = 0.0
    """Median seconds of the exchanges of the last rounds."""
    paths: tuple[str, ...] = ()
    """The carriers of the tensors in the last rounds: lanes or streams."""
    links: tuple[str, ...] = ()
    """The connection in the last rounds, as the peers themselves describe it."""
    sentences: tuple[str, ...] = ()
    wrong: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    log: str = ""

    @property
    def problems(self) -> list[str]:
        """The defects of this outcome."""
        found = list(self.wrong)
        if self.first_success is None:
            found.append(f"no success: {self.reasons[-1] if self.reasons else 'no round has ended'}")
        elif self.way not in self.allowed:
            found.append(f"{self.way} instead of {' or '.join(self.allowed)}")
        elif self.way != RELAYED and self.relayed_later > 0.25:
            found.append(f"{self.relayed_later:.0%} of the bytes are relayed although the way is {self.way}")
        return found


def pair(
    first: Kind,
    second: Kind,
    *,
    same_router: bool = False,
    rounds: int = 3,
    elements: int = 250_000,
    seconds: float = PAIR_SECONDS,
    delay_ms: float = 0.0,
) -> PairOutcome:
    """Let two peers meet in a lab of their own."""
    with stage(delay_ms=delay_ms, ipv6=Kind.DUAL in (first, second)) as set_up:
        site = set_up.lab.site(first, 2 if same_router else 1)
        other = site if same_router else set_up.lab.site(second)
        name = f"{first}, {SAME}" if same_router else f"{first} and {second}"
        allowed = (DIRECT,) if same_router else may_be(first, second)
        return _meet(set_up, site.hosts[0], other.hosts[-1], name, allowed, rounds, elements, seconds)


def _meet(
    set_up: Stage,
    first: Host,
    second: Host,
    name: str,
    allowed: tuple[str, ...],
    rounds: int,
    elements: int,
    seconds: float,
) -> PairOutcome:
    team = Team(set_up.crew, set_up.bootstrap, elements=elements)
    for host in (first, second):
        team.add(host)
    outcome = PairOutcome(name=name, allowed=allowed)
    deadline = time.monotonic() + seconds
    before = set_up.relayed_bytes()

    def left() -> float:
        return max(deadline - time.monotonic(), 0.0)

    if team.run(left(), team.all_succeeded(rounds)):
        # Relays come first and give way to a direct connection, if there can be one.
        patience = SETTLE_SECONDS if RELAYED not in allowed else SETTLE_SECONDS / 4
        team.run(min(left(), patience), lambda: way(first, second) == allowed[0])
        settled, at = set_up.relayed_bytes(), _sent(team)
        team.run(left(), team.all_succeeded(SETTLED_ROUNDS))
        outcome.relayed_later = _share(set_up.relayed_bytes() - settled, _sent(team) - at)
        outcome.way = way(first, second)
    outcome.relayed = _share(set_up.relayed_bytes() - before, _sent(team))
    _describe(outcome, team)
    team.end()
    return outcome


def _describe(outcome: PairOutcome, team: Team) -> None:
    outcome.rounds = min(len(member.successes) for member in team.members)
    if outcome.rounds:
        outcome.first_success = max(member.successes[0]["since"] for member in team.members)
        last = [result for member in team.members for result in member.successes[-SETTLED_ROUNDS:]]
        outcome.exchange = statistics.median(result["exchange"] for result in last)
        outcome.paths = tuple(sorted({path for result in last for path in result["paths"].values()}))
        outcome.links = tuple(sorted({link for result in last for link in result["links"].values()}))
    outcome.sentences = tuple(member.sentence for member in team.members)
    outcome.wrong = team.wrong()
    outcome.reasons = [reason for member in team.members for reason in member.reasons]
    outcome.log = team.log()


def _sent(team: Team) -> int:
    return sum(result["sent"] for member in team.members for result in member.successes)


def _share(part: int, whole: int) -> float:
    return min(part / whole, 1.0) if whole else 0.0


@dataclass(kw_only=True)
class PunchOutcome:
    """The tries in which two peers behind routers that keep ports got a direct connection."""

    tries: int
    seconds: list[float]
    """Of each success: from the start of the peers to the direct connection."""
    failures: list[str]


def punch(
    tries: int,
    *,
    seconds: float = 40.0,
    kinds: tuple[Kind, Kind] = (Kind.CONE, Kind.CONE),
    delay_ms: float = 0.0,
) -> PunchOutcome:
    """Let two new peers behind two routers meet, again and again."""
    found = PunchOutcome(tries=tries, seconds=[], failures=[])
    with stage(delay_ms=delay_ms) as set_up:
        first, second = (set_up.lab.site(kind).hosts[0] for kind in kinds)
        for _ in range(tries):
            team = Team(set_up.crew, set_up.bootstrap)
            began = time.monotonic()
            for host in (first, second):
                team.add(host)
            if team.run(seconds, lambda: way(first, second) == PUNCHED):
                found.seconds.append(time.monotonic() - began)
            else:
                found.failures.append(team.log())
            team.end()
            for member in team.members:
                member.process.close()
    return found


@dataclass(kw_only=True)
class FaultOutcome:
    """The cost of a fault for the members of a group."""

    rounds: int
    """Successful rounds of the member that had the fewest."""
    lost_by_victim: int
    """Rounds of the member concerned that did not end with a ``Success`` after the fault."""
    lost_by_others: int
    repaired: float | None
    """Seconds from the fault to the end of the next round in which all members contributed."""
    ways: str
    """The connections of the members at the end: each way with its number of pairs."""
    wrong: list[str]
    reasons: list[str]
    log: str


def move(
    kinds: Sequence[Kind] = (Kind.PUBLIC, Kind.CONE, Kind.CONE, Kind.CONE),
    *,
    rounds: int = 20,
    seconds: float = 240.0,
    elements: int = 10_000,
) -> FaultOutcome:
    """Let the last of some peers change its network in the middle of their rounds."""
    with stage() as set_up:
        made = set_up.lab
        hosts = [made.site(kind).hosts[0] for kind in kinds]
        other = made.site(kinds[-1], 0, lan=OTHER_HOME)
        team = _group(set_up, hosts, elements=elements)
        return _disturb(team, team.members[-1], lambda: made.move(hosts[-1], other), rounds, seconds)


def forget(*, rounds: int = 10, seconds: float = 150.0) -> FaultOutcome:
    """Let a router forget all connections in the middle of rounds."""
    with stage() as set_up:
        hosts = [set_up.lab.site(kind).hosts[0] for kind in (Kind.PUBLIC, Kind.CONE, Kind.CONE)]
        team = _group(set_up, hosts)
        site = hosts[-1].site
        return _disturb(team, team.members[-1], lambda: set_up.lab.forget(site), rounds, seconds)


def idle(*, pauses: int = 2, pause: float = 40.0, forgets_after: int = 20) -> list[str]:
    """Let routers forget connections that are idle for less than the pause between two rounds.

    Returns:
        The reasons of the rounds that failed after each peer had been in one.
    """
    with stage() as set_up:
        hosts = [set_up.lab.site(kind).hosts[0] for kind in (Kind.PUBLIC, Kind.CONE, Kind.CONE)]
        for host in hosts[1:]:
            set_up.lab.forget_idle(host.site, forgets_after)
        team = Team(set_up.crew, set_up.bootstrap, elements=200_000, pause=pause, group_size=3)
        for host in hosts:
            team.add(host)
        if not team.run(START_SECONDS, team.all_succeeded(1)):
            raise LabError(f"no round before the first pause:\n{team.log()}")
        before = {member.peer_id: len(member.rounds) for member in team.members}
        if not team.run(pauses * (pause + START_SECONDS), team.all_succeeded(pauses)):
            raise LabError(f"no rounds after the pauses:\n{team.log()}")
        failed = [
            found["reason"]
            for member in team.members
            for found in member.rounds[before[member.peer_id] :]
            if found["kind"] == "Failed"
        ]
        team.end()
        return failed


def relay_killed(*, rounds: int = 10, seconds: float = 150.0, elements: int = 500_000) -> FaultOutcome:
    """Kill the daemon that relays most, in the middle of rounds of two peers behind symmetric routers."""
    return _with_relays(Process.kill, rounds, seconds, elements, DAEMON)


def relay_lies(*, rounds: int = 10, seconds: float = 150.0, elements: int = 500_000) -> FaultOutcome:
    """Let the daemon that relays most change bytes, in the middle of rounds of two such peers."""
    return _with_relays(lambda relay: relay.tell("lie"), rounds, seconds, elements, LYING_DAEMON)


def _with_relays(
    fault: Callable[[Process], None], rounds: int, seconds: float, elements: int, entry: str
) -> FaultOutcome:
    with stage(daemons=2, entry=entry) as set_up:
        hosts = [set_up.lab.site(Kind.SYMMETRIC).hosts[0] for _ in range(2)]
        team = _group(set_up, hosts, elements=elements)
        return _disturb(team, team.members[-1], lambda: fault(_busiest(set_up, team)), rounds, seconds)


def _busiest(set_up: Stage, team: Team) -> Process:
    """Return the daemon that sends most while the peers average."""
    before = [process.host.bytes()[0] for process, _ in set_up.daemons]
    team.run(3.0)
    grown = [
        process.host.bytes()[0] - count for (process, _), count in zip(set_up.daemons, before, strict=True)
    ]
    return set_up.daemons[grown.index(max(grown))][0]


def _group(set_up: Stage, hosts: Sequence[Host], elements: int = 10_000) -> Team:
    """Start one group that rests little between its rounds, so that a fault is in the middle of one."""
    team = Team(
        set_up.crew, set_up.bootstrap, elements=elements, pause=0.3, group_size=len(hosts), match_timeout=10.0
    )
    for host in hosts:
        team.add(host)
    return team


def _disturb(
    team: Team, victim: Member, fault: Callable[[], None], rounds: int, seconds: float
) -> FaultOutcome:
    """Run half of the rounds, cause a fault, and run the other half.

    Raises:
        LabError: the first half did not end.
    """
    deadline = time.monotonic() + seconds
    if not team.run(seconds / 2, team.all_succeeded(rounds // 2)):
        raise LabError(f"no rounds before the fault:\n{team.log()}")
    ended = {member.peer_id: len(member.rounds) for member in team.members}
    fault()
    at = time.monotonic()
    team.run(deadline - at, team.all_succeeded(rounds - rounds // 2))

    def lost(member: Member) -> int:
        return sum(found["kind"] != "Success" for found in member.rounds[ended[member.peer_id] :])

    whole = (
        found["at"] - at
        for found in victim.successes
        if found["at"] > at
        and len(found["weights"]) == len(team.members)
        and found["at"] - found["took"] > at
    )
    outcome = FaultOutcome(
        rounds=min(len(member.successes) for member in team.members),
        lost_by_victim=lost(victim),
        lost_by_others=max(lost(member) for member in team.members if member is not victim),
        repaired=min(whole, default=None),
        ways=_ways([member.host for member in team.members]),
        wrong=team.wrong(),
        reasons=[reason for member in team.members for reason in member.reasons],
        log=team.log(),
    )
    team.end()
    return outcome


def _ways(hosts: Sequence[Host]) -> str:
    found = Counter(
        way(first, second) for number, first in enumerate(hosts) for second in hosts[number + 1 :]
    )
    return ", ".join(f"{count} {name}" for name, count in found.most_common())


@dataclass(kw_only=True)
class CrowdOutcome:
    """The outcome of a trial with many peers of mixed kinds."""

    peers: int
    rounds: int
    """Rounds of all peers that were counted."""
    succeeded: int
    full: int
    """Of these: in a group of the full size."""
    by_kind: dict[str, float]
    """The fraction of rounds that succeeded, by kind of site."""
    seconds: list[float]
    """Of each successful round."""
    relayed: int
    """Bytes that the daemons have sent, which are in no group."""
    carried: list[int]
    """Bytes that each public peer has sent, those of its own rounds too."""
    sent: int
    """Bytes that all peers sent in successful rounds."""
    took: float
    wrong: list[str]
    reasons: Counter[str]
    log: str


def crowd(
    kinds: dict[Kind, int],
    *,
    rounds: int = 20,
    group_size: int = 8,
    elements: int = 20_000,
    pause: float = 0.5,
    seconds: float = 900.0,
) -> CrowdOutcome:
    """Let many peers average, each at a site of its own; count the first ``rounds`` rounds of each.

    Args:
        pause: seconds of a peer's own work between two rounds.

    Raises:
        LabError: a peer does not start.
    """
    with stage() as set_up:
        team = Team(
            set_up.crew,
            set_up.bootstrap,
            elements=elements,
            pause=pause,
            group_size=group_size,
            match_timeout=30.0,
            exchange_timeout=60.0,
        )
        began = time.monotonic()
        for kind in (kind for kind, count in kinds.items() for _ in range(count)):
            team.add(set_up.lab.site(kind).hosts[0], verbose=bool(os.environ.get(KEEP_LOGS)))
            # All at once, forty processes would get less of two processors than a handshake needs within its bound.
            if len(team.members) % STARTED_AT_ONCE == 0 and not team.run(START_SECONDS, team.all_open):
                raise LabError(
                    f"{STARTED_AT_ONCE} peers did not start in {START_SECONDS:.0f} s:\n{team.log()}"
                )
        team.run(seconds, lambda: all(len(member.rounds) >= rounds for member in team.members))
        took = time.monotonic() - began
        return _count(team, set_up, rounds, group_size, took)


def _count(team: Team, set_up: Stage, rounds: int, group_size: int, took: float) -> CrowdOutcome:
    counted = {member.peer_id: member.rounds[:rounds] for member in team.members}
    by_kind: dict[str, list[bool]] = {}
    for member in team.members:
        successes = [found["kind"] == "Success" for found in counted[member.peer_id]]
        by_kind.setdefault(member.host.site.kind, []).extend(successes or [False])
    everything = [found for found_rounds in counted.values() for found in found_rounds]
    good = [found for found in everything if found["kind"] == "Success"]
    outcome = CrowdOutcome(
        peers=len(team.members),
        rounds=rounds * len(team.members),
        succeeded=len(good),
        full=sum(len(found["weights"]) == group_size for found in good),
        by_kind={kind: sum(found) / len(found) for kind, found in by_kind.items()},
        seconds=[found["duration"] for found in good],
        relayed=set_up.relayed_bytes(),
        carried=[member.host.bytes()[0] for member in team.members if member.host.site.kind is Kind.PUBLIC],
        sent=_sent(team),
        took=took,
        wrong=team.wrong(),
        reasons=Counter(reason for member in team.members for reason in member.reasons),
        log=team.log(),
    )
    team.end()
    return outcome
