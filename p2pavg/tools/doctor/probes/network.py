"""Facts that other peers tell: their clocks and versions, this machine's reachability, and the bandwidth."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import trio

from p2pavg.allreduce.messages import PROTOCOL as EXCHANGE_PROTOCOL
from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import GLANCE_SECONDS
from p2pavg.matchmaking.messages import PROTOCOL as MATCH_PROTOCOL
from p2pavg.net.addresses import parse_listen_address
from p2pavg.net.nat.reach.reachability import NOT_KNOWN_YET, Kind
from p2pavg.net.nat.reach.service import DialBackOutcome, ask_dial_back, ask_to_look
from p2pavg.net.transport import Stream, Transport
from p2pavg.peer.peer import Peer
from p2pavg.runs.records.bandwidth import PROTOCOL as BANDWIDTH_PROTOCOL
from p2pavg.runs.records.bandwidth import measure
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


# ------------------------------------------------------------------ reachability and bandwidth


async def wait_for_reach(transport: Transport, seconds: float) -> NetworkReach:
    """Return the reachability as soon as dials of other peers have shown it, or what is known after ``seconds``."""
    with trio.move_on_after(seconds):
        while True:  # a transport does not tell of changes
            found = transport.reachability
            if found.kind is not Kind.UNKNOWN and not found.sentence.startswith(NOT_KNOWN_YET):
                break
            await trio.sleep(GLANCE_SECONDS)
    return NetworkReach(kind=str(found.kind), sentence=found.sentence, outer_hosts=found.outer_hosts)


async def try_announced(peer: Peer, wanted: Sequence[Announced]) -> None:
    """Ask a few connected peers to dial the addresses that this peer would announce, and note what each says.

    A peer dials only the host at which it sees this machine, so it is asked for that first.
    """
    transport = peer.context.transport
    asked = [c.peer_id for c in peer.records.contacts if transport.is_connected(c.peer_id)][:DIALLING_PEERS]

    async def ask(peer_id: str) -> None:
        for each in wanted:
            try:
                await _dial_back(transport, peer_id, each)
            except UnreachableError as error:
                logger.info("%s said nothing about an address to announce: %s", peer_id, error)

    async with trio.open_nursery() as nursery:
        for peer_id in asked:
            nursery.start_soon(ask, peer_id)


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


async def _dial_back(transport: Transport, peer_id: str, wanted: Announced) -> None:
    """Ask one peer, again if it is busy with a question that this peer's transport has asked by itself."""
    seen = (await ask_to_look(transport, peer_id)).host
    wanted.seen_at.append(seen)
    if seen != wanted.host:
        return
    for _ in range(DIAL_TRIES):
        answer = await ask_dial_back(transport, peer_id, wanted.port)
        if answer.outcome is not DialBackOutcome.REFUSED:
            break
        await trio.sleep(GLANCE_SECONDS * 5)
    if answer.outcome is DialBackOutcome.REACHED:
        wanted.reached += 1
    elif answer.outcome is DialBackOutcome.FAILED and answer.reason:
        wanted.failures.append(answer.reason[:MAX_ERROR_CHARS])


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
