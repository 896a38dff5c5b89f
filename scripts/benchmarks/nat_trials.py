"""Trials in the labs of tests/nat that only the benchmark runs: punching, forty peers, faults that no test causes."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from itertools import combinations_with_replacement

from tests.nat.crew import KEEP_LOGS
from tests.nat.lab import Kind
from tests.nat.namespaces import LabError
from tests.nat.team import PUNCHED, Team, way
from tests.nat.trials import START_SECONDS, FaultOutcome, Stage, disturb, group, sent, stage, with_relays

LYING_DAEMON = "scripts.benchmarks.lying_relay:main"
PAIRS: tuple[tuple[Kind, Kind], ...] = tuple(combinations_with_replacement(Kind, 2))
FORTY = {Kind.PUBLIC: 5, Kind.FORWARDED: 7, Kind.UPNP: 4, Kind.CONE: 13, Kind.SYMMETRIC: 6, Kind.CGNAT: 5}
"""Kinds of forty peers: 28 of them are behind routers through which no port is open at the beginning."""
STARTED_AT_ONCE = 4


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


def forget(*, rounds: int = 10, seconds: float = 150.0) -> FaultOutcome:
    """Let a router forget all connections in the middle of rounds."""
    with stage() as set_up:
        hosts = [set_up.lab.site(kind).hosts[0] for kind in (Kind.PUBLIC, Kind.CONE, Kind.CONE)]
        team = group(set_up, hosts)
        site = hosts[-1].site
        return disturb(team, team.members[-1], lambda: set_up.lab.forget(site), rounds, seconds)


def relay_lies(*, rounds: int = 10, seconds: float = 150.0, elements: int = 500_000) -> FaultOutcome:
    """Let the daemon that relays most change bytes, in the middle of rounds of two such peers."""
    return with_relays(lambda relay: relay.tell("lie"), rounds, seconds, elements, LYING_DAEMON)


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
        sent=sent(team),
        took=took,
        wrong=team.wrong(),
        reasons=Counter(reason for member in team.members for reason in member.reasons),
        log=team.log(),
    )
    team.end()
    return outcome
