"""First messages of strangers: what costs nothing is checked before a signature is, and processor time is charged."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import trio

from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError
from p2pavg.group.candidate import Candidate, sign_candidate
from p2pavg.group.roster import Roster
from p2pavg.matchmaking.messages import (
    MAX_FIRST_BYTES,
    PROTOCOL,
    Declined,
    GroupProposal,
    Joined,
    JoinRequest,
    Message,
    decode,
    encode,
)
from p2pavg.net.limits.call_budget import LONGEST_DELAY, CallBudget, CallRates
from p2pavg.net.limits.first_messages import FirstMessages
from p2pavg.net.transport import MAX_CONTROL_BYTES, Stream, receive_message, send_message
from p2pavg.peer.peer import Peer
from p2pavg.testing import MemoryNetwork, simulated_peers
from p2pavg.testing.simulation import simulated_clock, simulated_signer
from p2pavg_dht import record as records
from tests.simulation.swarm import LAN, config, values

MEMBERS = 128
STRANGER = 40
"""Index of the first of the peers that are on no network."""


def signed(index: int, key: bytes, deadline: float = 0.0) -> Candidate:
    now = simulated_clock()
    return sign_candidate(
        simulated_signer(index),
        key=key,
        deadline=now + (deadline or 10.0 + index),
        expiration_time=now + 600.0,
        weight=1.0 if index < STRANGER + MEMBERS // 2 else 0.0,
        bandwidth=100.0,
        codec="fp32",
        auxiliary=index >= STRANGER + MEMBERS // 2,
        addresses=(f"/ip4/10.0.0.{index % 250}/tcp/4001",),
    )


def proposal(key: bytes) -> GroupProposal:
    """Return a proposal of as many members as one may have, each with a signature that was not seen before."""
    members = tuple(signed(STRANGER + index, key) for index in range(MEMBERS))
    records._genuine.cache_clear()
    return GroupProposal(Roster(members=members, shares=(1,) * MEMBERS, proposal=0))


def verified() -> int:
    """Return how many signatures of records were verified."""
    return records._genuine.cache_info().misses


async def answer_to(
    sender: Peer, receiver: Peer, message: bytes, then: Sequence[bytes] = ()
) -> Message | None:
    """Send a message on a new join stream, and return the answer to it; ``None`` if the stream ends without one.

    Args:
        then: is sent after the answer; the stream has ended when this returns.
    """
    stream = await sender.context.transport.open_stream(receiver.id, PROTOCOL, timeout=5.0)
    answer = None
    try:
        await send_message(stream, message)
        answer = await receive_message(stream)
        for more in then:
            await send_message(stream, more)
        with trio.fail_after(20.0):
            while then and await receive_message(stream) is not None:
                pass
    except StreamBrokenError:
        pass
    finally:
        await stream.reset()
    return None if answer is None else decode(answer)


async def test_a_first_message_is_no_longer_than_one_record() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 2) as (stranger, peer):
        assert MAX_FIRST_BYTES < MAX_CONTROL_BYTES / 32
        assert await answer_to(stranger, peer, bytes(MAX_FIRST_BYTES + 1)) is None


async def test_a_peer_of_another_run_is_declined_without_a_look_at_its_signature() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 2) as (stranger, peer):
        ask = encode(JoinRequest(signed(0, hashlib.sha256(b"no run of this peer").digest())))
        records._genuine.cache_clear()
        before = verified()
        answer = await answer_to(stranger, peer, ask)
        assert isinstance(answer, Declined)
        assert "no averager" in answer.reason
        # The answer has no record, so decoding it here verifies nothing either.
        assert verified() == before


@asynccontextmanager
async def looking(peer: Peer) -> AsyncIterator[bytes]:
    """Let a peer look for a group, and yield its ready key."""
    async with peer.averager(config(group_size=2, match_timeout=30.0)) as averager:
        averager.accumulate([values(0)])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(averager.step, wait=None))
            while averager._rounds is None:
                await trio.sleep(0.1)
            await trio.sleep(1.0)
            yield averager._rounds.matchmaker.key
            nursery.cancel_scope.cancel()


async def test_a_first_message_of_another_kind_is_not_verified() -> None:
    """An answer has one record too, and would be taken for a request."""
    async with simulated_peers(MemoryNetwork(latency=LAN), 2) as (stranger, peer), looking(peer) as key:
        sent = encode(Joined(signed(0, key, deadline=500.0)))
        records._genuine.cache_clear()
        before = verified()
        assert await answer_to(stranger, peer, sent) is None
        assert verified() - before <= 1  # a renewal of the peer's own record


async def test_the_record_of_another_peer_is_refused_without_a_look_at_its_signature() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 2) as (stranger, peer), looking(peer) as key:
        asked = [encode(JoinRequest(signed(STRANGER + index, key))) for index in range(3)]
        records._genuine.cache_clear()
        before = verified()
        for ask in asked:
            assert await answer_to(stranger, peer, ask) is None
        assert verified() - before <= 1  # a renewal of the peer's own record


async def test_a_follower_that_sends_a_roster_is_dropped_before_it_is_verified() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 2) as (stranger, peer), looking(peer) as key:
        sent = encode(proposal(key))
        late = encode(JoinRequest(signed(0, key, deadline=500.0)))
        records._genuine.cache_clear()
        before = verified()
        assert isinstance(await answer_to(stranger, peer, late, [sent] * 3), Joined)
        assert verified() - before <= 8  # its own record, and those of the honest peer


# -- the budget


class Sender:
    """The end of a stream, as budgets see it."""

    def __init__(self, remote: str, host: str = "203.0.113.9") -> None:
        self.remote, self.remote_host = remote, host


def stream_of(remote: str, host: str = "203.0.113.9") -> Stream:
    return cast(Stream, Sender(remote, host))


RATES = CallRates(peer_seconds=0.1, peer_burst_seconds=1.0, prefix_factor=2.0)


def spend(messages: FirstMessages, stream: Stream, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Charge a sender with a block that takes some seconds of the loop and of the processor."""
    clock = trio.current_time()
    times = iter([0.0, seconds])
    moments = iter([clock - seconds, clock])
    with monkeypatch.context() as patched:
        patched.setattr(
            "p2pavg.net.limits.first_messages.time", SimpleNamespace(thread_time=lambda: next(times))
        )
        patched.setattr("p2pavg.net.limits.first_messages.trio.current_time", lambda: next(moments))
        with messages.charged(stream):
            pass


async def test_a_sender_in_debt_is_read_later_and_then_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = FirstMessages(CallBudget(RATES))
    sender = stream_of("stranger")
    began = trio.current_time()
    await messages.admit(sender)
    assert trio.current_time() == began
    spend(messages, sender, 0.75, monkeypatch)  # with the overhead, an eighth of a second more than the burst
    await messages.admit(sender)
    assert trio.current_time() - began == pytest.approx(0.125 / 0.1)
    spend(messages, sender, 1.0, monkeypatch)
    with pytest.raises(RemoteProtocolError, match=f"the budget of the next {LONGEST_DELAY:.0f} s"):
        await messages.admit(sender)
    await messages.admit(stream_of("another", "198.51.100.1"))


async def test_identities_of_one_network_share_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = FirstMessages(CallBudget(RATES))
    for number in range(4):
        spend(messages, stream_of(f"stranger {number}"), 0.6, monkeypatch)
    with pytest.raises(RemoteProtocolError, match="busy"):
        await messages.admit(stream_of("newcomer", "203.0.113.77"))
    await messages.admit(stream_of("newcomer", "198.51.100.1"))


async def test_time_in_which_the_loop_did_something_else_is_not_charged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A training loop that holds the interpreter is not the sender's fault."""
    messages = FirstMessages(CallBudget(RATES))
    sender = stream_of("stranger")
    with monkeypatch.context() as patched:
        moments = iter([0.0, 1000.0])
        patched.setattr("p2pavg.net.limits.first_messages.trio.current_time", lambda: next(moments))
        with messages.charged(sender):
            pass
    await messages.admit(sender)
