"""A donor serves members of its run, and no joiner takes more of it than its limits allow."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio
from msgspec import structs

from p2pavg.base.errors import StreamBrokenError
from p2pavg.base.limits import LOOK_SECONDS, REPLY_SECONDS, STALL_SECONDS
from p2pavg.net.transport import Stream, receive_message, send_message
from p2pavg.peer.peer import Peer
from p2pavg.runs.membership.membership import Membership
from p2pavg.state.donor.service import MAX_SESSIONS, MAX_SESSIONS_PER_PEER, stored_key
from p2pavg.state.donor.serving import MAX_REQUESTS, Offered
from p2pavg.state.joiner.sessions import open_sessions
from p2pavg.state.messages import PROTOCOL, AskPieces, Cancel, SessionHello, Welcome
from p2pavg.testing import MemoryNetwork, simulated_peers
from p2pavg.testing.simulation import EPOCH, simulated_signer
from tests.simulation.swarm import LAN
from tests.simulation.test_evidence import evidence_against
from tests.simulation.test_state import RUN, check_fetch, company, fetch_of, name
from tests.unit.runs.membership.runs import Authority
from tests.unit.state.blobs import KIND, Blob, Held


async def hello(peer: Peer, to: Peer, key: bytes = b"", certificate: bytes = b"") -> tuple[Stream, str]:
    """Open a session by hand; return the stream and the refusal."""
    stream = await peer.context.transport.open_stream(to.id, PROTOCOL, addresses=to.addresses, timeout=5.0)
    await send_message(stream, SessionHello(key or stored_key(RUN, None), certificate, b"").encode())
    answer = await receive_message(stream)
    return stream, "it closed the stream" if answer is None else Welcome.decode(answer).refusal


async def is_served(peer: Peer, to: Peer, blob: Blob) -> bool:
    async with open_sessions(peer.context, peer.lobby, key=stored_key(RUN, None)) as sessions:
        with trio.move_on_after(5.0):
            await check_fetch(fetch_of(sessions, blob, [to]), blob)
            return True
    return False


async def test_one_joiner_has_few_sessions() -> None:
    blob = Blob(0, 5, 10_000)
    async with company(1, blob) as (_network, peers, _held, _sessions):
        streams = [await hello(peers[0], peers[1]) for _ in range(MAX_SESSIONS_PER_PEER)]
        assert [refusal for _, refusal in streams] == [""] * MAX_SESSIONS_PER_PEER
        _, refusal = await hello(peers[0], peers[1])
        assert refusal == f"it has {MAX_SESSIONS_PER_PEER} sessions already"
        await streams[0][0].reset()
        await trio.sleep(1.0)
        assert await is_served(peers[0], peers[1], blob)


async def test_all_joiners_together_have_a_bounded_number_of_sessions() -> None:
    count = MAX_SESSIONS // MAX_SESSIONS_PER_PEER
    async with simulated_peers(MemoryNetwork(latency=LAN), count + 2) as peers:
        peers[0].state.join(RUN, None, Offered(Held(Blob(0, 5, 10_000))))
        for peer in peers[2:]:
            for _ in range(MAX_SESSIONS_PER_PEER):
                assert (await hello(peer, peers[0]))[1] == ""
        assert (await hello(peers[1], peers[0]))[1] == f"this peer serves {MAX_SESSIONS} joiners already"
        await trio.sleep(STALL_SECONDS + 5.0)
        assert (await hello(peers[1], peers[0]))[1] == "", "idle sessions have ended"


async def test_streams_without_a_hello_keep_no_joiner_out() -> None:
    blob = Blob(0, 5, 10_000)
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers:
        peers[0].state.join(RUN, None, Offered(Held(blob)))
        for _ in range(20):
            await peers[1].context.transport.open_stream(
                peers[0].id, PROTOCOL, addresses=peers[0].addresses, timeout=5.0
            )
        await trio.sleep(0.1)
        assert peers[0].state._greeted.total() == MAX_SESSIONS_PER_PEER
        assert await is_served(peers[2], peers[0], blob)
        await trio.sleep(REPLY_SECONDS)
        assert not peers[0].state._greeted


ASK = AskPieces(1, KIND, Blob(0, 5, 1 << 20).id, 0, 5)


async def beyond_its_requests(stream: Stream) -> None:
    for number in range(MAX_REQUESTS + 2):
        await send_message(stream, structs.replace(ASK, number=number).encode())


async def cancelling_without_end(stream: Stream) -> None:
    for number in range(1000):
        await send_message(stream, structs.replace(ASK, number=number).encode())
        await send_message(stream, Cancel(number).encode())


async def the_same_number_twice(stream: Stream) -> None:
    for _ in range(2):
        await send_message(stream, ASK.encode())


async def reading_nothing(stream: Stream) -> None:
    await send_message(stream, ASK.encode())


async def nonsense(stream: Stream) -> None:
    await send_message(stream, b"nonsense")


ATTACKS = [beyond_its_requests, cancelling_without_end, the_same_number_twice, reading_nothing, nonsense]


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_joiner_beyond_its_limits_loses_its_session(
    attack: Callable[[Stream], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    blob = Blob(0, 5, 1 << 20)
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers:
        peers[0].state.join(RUN, None, Offered(Held(blob)))
        stream, refusal = await hello(peers[1], peers[0])
        assert refusal == ""
        with suppress(StreamBrokenError):
            await attack(stream)
        assert await is_served(peers[2], peers[0], blob)
        await trio.sleep(STALL_SECONDS + 2.0 if attack is reading_nothing else 1.0)
        assert not peers[0].state._served
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# ---------------------------------------------------------------------- membership


async def test_states_are_shown_to_members_only() -> None:
    blob = Blob(0, 5, 10_000)
    authority = Authority()
    members = [
        Membership(
            authority.access(simulated_signer(index), not_before=EPOCH, expires=EPOCH + 86400.0), name(index)
        )
        for index in range(3)
    ]
    async with simulated_peers(MemoryNetwork(latency=LAN), 4) as peers:
        peers[0].state.join(RUN, members[0], Offered(Held(blob)))
        key = stored_key(RUN, members[0])
        refusals = {
            "its own certificate": await hello(peers[1], peers[0], key, members[1].access.certificate),
            "none": await hello(peers[3], peers[0], key, b""),
            "another peer's": await hello(peers[3], peers[0], key, members[1].access.certificate),
            "an open run's key": await hello(peers[1], peers[0], stored_key(RUN, None)),
        }
        said = {case: refusal for case, (_, refusal) in refusals.items()}
        assert said.pop("its own certificate") == ""
        assert said.pop("an open run's key") == "this peer holds no states of that run"
        assert all(said.values()), said
        async with open_sessions(
            peers[2].context, peers[2].lobby, key=key, certificate=members[2].access.certificate
        ) as sessions:
            await check_fetch(fetch_of(sessions, blob, peers[:1]), blob)


async def test_an_excluded_peer_is_shown_nothing_and_loses_its_session() -> None:
    blob = Blob(0, 5, 10_000)
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers:
        peers[0].state.join(RUN, None, Offered(Held(blob)))
        accusations = peers[0].evidence.join(RUN, None)
        stream, refusal = await hello(peers[1], peers[0])
        assert refusal == ""
        accusations.accuse(evidence_against(simulated_signer(1)))
        with trio.fail_after(2 * LOOK_SECONDS):
            assert await receive_message(stream) is None
        _, refusal = await hello(peers[1], peers[0])
        assert "it is excluded from the run by evidence" in refusal
        assert await is_served(peers[2], peers[0], blob)


async def test_all_users_of_a_run_are_asked() -> None:
    blobs = Blob(0, 5, 10_000), Blob(1, 5, 10_000)
    async with company(1, blobs[0]) as (_network, peers, held, sessions):
        second = Held(blobs[1])
        peers[1].state.join(RUN, None, Offered(second))
        for blob in blobs:
            await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
        peers[1].state.leave(RUN, None, held[0])
        await check_fetch(fetch_of(sessions, blobs[1], peers[1:]), blobs[1])
        peers[1].state.leave(RUN, None, second)
        assert not peers[1].state._runs
