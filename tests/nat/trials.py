"""The trials in labs: pairs of peers, a change of networks, routers that forget, a relay that is killed.

scripts/benchmarks/nat.py prints the figures of these and of more, and the tests beside this file assert the bars.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.nat.crew import DAEMON, DAEMON_PORT, Crew, Process
from tests.nat.lab import Host, Kind, Lab, lab
from tests.nat.namespaces import LabError
from tests.nat.team import DIRECT, MAPPED, PUNCHED, RELAYED, Member, Team, way

SAME = "same router"
PAIR_SECONDS = 90.0
SETTLE_SECONDS = 20.0
SETTLED_ROUNDS = 3
"""Rounds at the end of a trial, in which two peers that can meet directly do so."""
OTHER_HOME = "192.168.178"
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
        settled, at = set_up.relayed_bytes(), sent(team)
        team.run(left(), team.all_succeeded(SETTLED_ROUNDS))
        outcome.relayed_later = _share(set_up.relayed_bytes() - settled, sent(team) - at)
        outcome.way = way(first, second)
    outcome.relayed = _share(set_up.relayed_bytes() - before, sent(team))
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


def sent(team: Team) -> int:
    return sum(result["sent"] for member in team.members for result in member.successes)


def _share(part: int, whole: int) -> float:
    return min(part / whole, 1.0) if whole else 0.0


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
        team = group(set_up, hosts, elements=elements)
        return disturb(team, team.members[-1], lambda: made.move(hosts[-1], other), rounds, seconds)


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
    return with_relays(Process.kill, rounds, seconds, elements, DAEMON)


def with_relays(
    fault: Callable[[Process], None], rounds: int, seconds: float, elements: int, entry: str
) -> FaultOutcome:
    with stage(daemons=2, entry=entry) as set_up:
        hosts = [set_up.lab.site(Kind.SYMMETRIC).hosts[0] for _ in range(2)]
        team = group(set_up, hosts, elements=elements)
        return disturb(team, team.members[-1], lambda: fault(_busiest(set_up, team)), rounds, seconds)


def _busiest(set_up: Stage, team: Team) -> Process:
    """Return the daemon that sends most while the peers average."""
    before = [process.host.bytes()[0] for process, _ in set_up.daemons]
    team.run(3.0)
    grown = [
        process.host.bytes()[0] - count for (process, _), count in zip(set_up.daemons, before, strict=True)
    ]
    return set_up.daemons[grown.index(max(grown))][0]


def group(set_up: Stage, hosts: Sequence[Host], elements: int = 10_000) -> Team:
    """Start one group that rests little between its rounds, so that a fault is in the middle of one."""
    team = Team(
        set_up.crew, set_up.bootstrap, elements=elements, pause=0.3, group_size=len(hosts), match_timeout=10.0
    )
    for host in hosts:
        team.add(host)
    return team


def disturb(
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
