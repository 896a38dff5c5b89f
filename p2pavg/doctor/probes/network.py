"""Facts that other peers tell: their clocks and versions, this machine's reachability, and the bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Collection

import trio

from p2pavg.allreduce.messages import PROTOCOL as EXCHANGE_PROTOCOL
from p2pavg.doctor.rules.network import Reach
from p2pavg.doctor.rules.run import Measured
from p2pavg.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.evidence.messages import PROTOCOL as EVIDENCE_PROTOCOL
from p2pavg.matchmaking.messages import PROTOCOL as MATCH_PROTOCOL
from p2pavg.net.reach.reachability import NOT_KNOWN_YET, Kind, Reachability
from p2pavg.net.transport import Stream, Transport
from p2pavg.peer import Peer
from p2pavg.records.bandwidth import PROTOCOL as BANDWIDTH_PROTOCOL
from p2pavg.records.bandwidth import measure
from p2pavg.records.greeting import ASKED_AT_ONCE, MIN_SECONDS_BETWEEN, Greeter
from p2pavg.records.hello import Heard
from p2pavg.state.messages import PROTOCOL as STATE_PROTOCOL
from p2pavg_dht import PROTOCOL as RECORDS_PROTOCOL
from p2pavg_dht import Contact

PROTOCOLS = (RECORDS_PROTOCOL, MATCH_PROTOCOL, EXCHANGE_PROTOCOL, EVIDENCE_PROTOCOL, STATE_PROTOCOL)
"""The protocols whose versions are compared with those of other peers."""

CLOCK_TRIES = 3
MEASURED_PEERS = 3
MEASURE_SECONDS = 4.0  # of one peer
STREAM_SECONDS = 2.0
POLL_SECONDS = 0.2
MAX_ERROR_CHARS = 200


async def ask_clocks(
    peer: Peer, wall_clock: Callable[[], float], heard: Callable[[tuple[Heard, ...]], None]
) -> None:
    """Ask a few peers, and call ``heard`` with all answers so far.

    A peer answers one question in half a second, and the peer's own greeter asks too. So some are asked again.

    Args:
        wall_clock: this machine's clock, uncorrected.
    """
    most: tuple[Heard, ...] = ()
    for _ in range(CLOCK_TRIES):
        greeter = Greeter(
            peer.context.transport,
            wall_clock=wall_clock,
            protocols=PROTOCOLS,
            runs=lambda: 0,
            contacts=lambda: peer.records.contacts,
        )
        most = max(most, await greeter.look(), key=len)
        heard(most)
        if len(most) >= min(len(peer.records.contacts), ASKED_AT_ONCE):
            return
        await trio.sleep(MIN_SECONDS_BETWEEN)


# ------------------------------------------------------------------ reachability and bandwidth


async def wait_for_reach(transport: Transport, seconds: float) -> Reach:
    """Return the reachability as soon as dials of other peers have shown it, or what is known after ``seconds``."""
    with trio.move_on_after(seconds):
        while not _is_shown(transport.reachability):  # noqa: ASYNC110 - a transport does not tell of changes
            await trio.sleep(POLL_SECONDS)
    found = transport.reachability
    return Reach(kind=str(found.kind), sentence=found.sentence, outer_hosts=found.outer_hosts)


def _is_shown(found: Reachability) -> bool:
    return found.kind is not Kind.UNKNOWN and not found.sentence.startswith(NOT_KNOWN_YET)


async def measure_some(peer: Peer, members: Collection[str]) -> list[Measured]:
    """Measure the bandwidth to three peers, one after the other: members of the run first."""
    contacts = sorted(peer.records.contacts, key=lambda contact: contact.peer_id not in members)
    transport = peer.context.transport
    return [await _measure(transport, contact) for contact in contacts[:MEASURED_PEERS]]


async def _measure(transport: Transport, contact: Contact) -> Measured:
    peer_id, addresses = contact.peer_id, contact.addresses
    stream: Stream | None = None
    try:
        with trio.move_on_after(MEASURE_SECONDS):
            stream = await transport.open_stream(
                peer_id, BANDWIDTH_PROTOCOL, addresses=addresses, timeout=STREAM_SECONDS
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
    return Measured(peer_id=peer_id, error=f"no result within {MEASURE_SECONDS:.0f} s; the link is slow")
