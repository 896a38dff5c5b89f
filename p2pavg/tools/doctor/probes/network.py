"""Facts that other peers tell: their clocks and versions, this machine's reachability, and the bandwidth."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import trio

from p2pavg.allreduce.messages import PROTOCOL as EXCHANGE_PROTOCOL
from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import GLANCE_SECONDS
from p2pavg.matchmaking.messages import PROTOCOL as MATCH_PROTOCOL
from p2pavg.net.addresses import parse_listen_address
from p2pavg.net.nat.reach.messages import DialBackOutcome
from p2pavg.net.nat.reach.reachability import NOT_KNOWN_YET, Kind, Reachability
from p2pavg.net.nat.reach.service import ask_dial_back, ask_to_look
from p2pavg.net.transport import Stream, Transport
from p2pavg.peer.peer import Peer
from p2pavg.runs.records.bandwidth import PROTOCOL as BANDWIDTH_PROTOCOL
from p2pavg.runs.records.bandwidth import measure
from p2pavg.runs.records.greeting import ASKED_AT_ONCE, MIN_SECONDS_BETWEEN, Greeter
from p2pavg.runs.records.hello import HelloAnswer
from p2pavg.state.messages import PROTOCOL as STATE_PROTOCOL
from p2pavg.tools.doctor.probes.addresses import LONG_PROBE_SECONDS, QUICK_PROBE_SECONDS
from p2pavg.tools.doctor.rules.network import Announced, NetworkReach
from p2pavg.tools.doctor.rules.run import Measured
from p2pavg.verification.evidence.accusation import PROTOCOL as EVIDENCE_PROTOCOL
from p2pavg_dht import PROTOCOL as RECORDS_PROTOCOL
from p2pavg_dht import Contact

PROTOCOLS = (RECORDS_PROTOCOL, MATCH_PROTOCOL, EXCHANGE_PROTOCOL, EVIDENCE_PROTOCOL, STATE_PROTOCOL)
"""The protocols whose versions are compared with those of other peers."""

logger = logging.getLogger(__name__)

DIALLING_PEERS = 3
DIAL_TRIES = 4
CLOCK_TRIES = 3
MEASURED_PEERS = 3
MAX_ERROR_CHARS = 200


async def ask_clocks(
    peer: Peer, wall_clock: Callable[[], float], heard: Callable[[tuple[HelloAnswer, ...]], None]
) -> None:
    """Ask a few peers, and call ``heard`` with all answers so far.

    A peer answers one question in half a second, and the peer's own greeter asks too. So some are asked again.

    Args:
        wall_clock: this machine's clock, uncorrected.
    """
    most: tuple[HelloAnswer, ...] = ()
    for _ in range(CLOCK_TRIES):
        greeter = Greeter(
            peer.context.transport,
            wall_clock=wall_clock,
            protocols=PROTOCOLS,
            runs=lambda: 0,
            contacts=lambda: peer.records.contacts,
        )
        most = max(most, await greeter.poll(), key=len)
        heard(most)
        if len(most) >= min(len(peer.records.contacts), ASKED_AT_ONCE):
            return
        await trio.sleep(MIN_SECONDS_BETWEEN)


# ------------------------------------------------------------------ reachability and bandwidth


async def wait_for_reach(transport: Transport, seconds: float) -> NetworkReach:
    """Return the reachability as soon as dials of other peers have shown it, or what is known after ``seconds``."""
    with trio.move_on_after(seconds):
        while not _is_shown(transport.reachability):  # noqa: ASYNC110 - a transport does not tell of changes
            await trio.sleep(GLANCE_SECONDS)
    found = transport.reachability
    return NetworkReach(kind=str(found.kind), sentence=found.sentence, outer_hosts=found.outer_hosts)


def _is_shown(found: Reachability) -> bool:
    return found.kind is not Kind.UNKNOWN and not found.sentence.startswith(NOT_KNOWN_YET)


async def try_announced(peer: Peer, addresses: Collection[str], seconds: float) -> list[Announced]:
    """Ask a few connected peers to dial the addresses that this peer would announce.

    A peer dials only the host at which it sees this machine, so it is asked for that first.

    Args:
        seconds: after which what is known by then counts.
    """
    transport, wanted = peer.context.transport, not_tried(addresses)
    asked = [c.peer_id for c in peer.records.contacts if transport.is_connected(c.peer_id)][:DIALLING_PEERS]
    answers: dict[str, list[_Answer]] = {each.address: [] for each in wanted}

    async def ask(peer_id: str) -> None:
        for each in wanted:
            answers[each.address].append(await _dial_back(transport, peer_id, each.host, each.port))

    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for peer_id in asked:
                nursery.start_soon(ask, peer_id)
    return [
        replace(
            each,
            seen_at=tuple(answer.seen_at for answer in answers[each.address] if answer.seen_at),
            reached=sum(answer.reached for answer in answers[each.address]),
            failures=tuple(answer.failure for answer in answers[each.address] if answer.failure),
        )
        for each in wanted
    ]


def not_tried(addresses: Collection[str]) -> list[Announced]:
    """Return addresses of which nothing is known."""
    parsed = [(text, parse_listen_address(text)) for text in addresses]
    return [
        Announced(
            address=text,
            host=str(address.value_for_protocol("ip4" if "ip4" in address else "ip6")),
            port=int(str(address.value_for_protocol("tcp"))),
        )
        for text, address in parsed
    ]


@dataclass(frozen=True, slots=True)
class _Answer:
    seen_at: str = ""
    reached: bool = False
    failure: str = ""


async def _dial_back(transport: Transport, peer_id: str, host: str, port: int) -> _Answer:
    """Ask one peer, again if it is busy with a question that this peer's transport has asked by itself."""
    try:
        seen = (await ask_to_look(transport, peer_id)).host
        if seen != host:
            return _Answer(seen)
        for _ in range(DIAL_TRIES):
            answer = await ask_dial_back(transport, peer_id, port)
            if answer.outcome is not DialBackOutcome.REFUSED:
                break
            await trio.sleep(GLANCE_SECONDS * 5)
    except UnreachableError as error:
        logger.info("%s said nothing about an address to announce: %s", peer_id, error)
        return _Answer()
    if answer.outcome is DialBackOutcome.REACHED:
        return _Answer(seen, reached=True)
    return _Answer(
        seen, failure=answer.reason[:MAX_ERROR_CHARS] if answer.outcome is DialBackOutcome.FAILED else ""
    )


async def measure_some(peer: Peer, members: Collection[str]) -> list[Measured]:
    """Measure the bandwidth to three peers, one after the other: members of the run first."""
    contacts = sorted(peer.records.contacts, key=lambda contact: contact.peer_id not in members)
    transport = peer.context.transport
    return [await _measure(transport, contact) for contact in contacts[:MEASURED_PEERS]]


async def _measure(transport: Transport, contact: Contact) -> Measured:
    peer_id, addresses = contact.peer_id, contact.addresses
    stream: Stream | None = None
    try:
        with trio.move_on_after(LONG_PROBE_SECONDS):
            stream = await transport.open_stream(
                peer_id, BANDWIDTH_PROTOCOL, addresses=addresses, timeout=QUICK_PROBE_SECONDS
            )
            found = await measure(stream)
            return Measured(
                peer_id=peer_id, up_mbps=found.up_mbps, down_mbps=found.down_mbps, seconds=found.seconds
            )
    except (UnreachableError, StreamBrokenError, RemoteProtocolError, ClosedError) as error:
        return Measured(peer_id=peer_id, error=str(error)[:MAX_ERROR_CHARS])
    finally:
        if stream is not None:
            await stream.reset()
    return Measured(peer_id=peer_id, error=f"no result within {LONG_PROBE_SECONDS:.0f} s; the link is slow")
