"""States are fetched from several donors over a simulated network, whatever the donors do."""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio

from p2pavg.base.errors import StateError
from p2pavg.base.limits import STALL_SECONDS
from p2pavg.net.transport import Buffer, Stream, receive_message, send_message
from p2pavg.peer.peer import Peer
from p2pavg.state.average import MAX_MANIFEST_BYTES, FewSignersError, read_manifest
from p2pavg.state.donor.service import stored_key
from p2pavg.state.donor.serving import SEND_BYTES, YIELD_SECONDS, Offered, spared_bytes
from p2pavg.state.joiner.fetching import BlobDownload, DownloadProgress, Wanted
from p2pavg.state.joiner.pieces import MAX_RANGES, STALLED_SECONDS
from p2pavg.state.joiner.sessions import MAX_FETCHES, Sessions, open_sessions
from p2pavg.state.joiner.sink import MemorySink, Sink
from p2pavg.state.messages import MAX_RANGE, PROTOCOL, BlobManifest, Frame, FrameKind, Welcome, encode_frame
from p2pavg.testing import MemoryNetwork, simulated_peers
from p2pavg.testing.simulation import simulated_signer
from tests.simulation.swarm import LAN
from tests.unit.state.blobs import KIND, Blob, Held
from tests.unit.state.test_average import expected, logged, roster_of, trusts

RUN = "sim"
FAST_ETHERNET = 100e6 / 8


def name(index: int) -> str:
    return simulated_signer(index).peer_id


@asynccontextmanager
async def company(
    donors: int, *blobs: Blob, bandwidth: float | None = None
) -> AsyncIterator[tuple[MemoryNetwork, list[Peer], list[Held], Sessions]]:
    """Open a joiner, which is the first peer, and donors that hold some blobs."""
    network = MemoryNetwork(latency=LAN, bandwidth=bandwidth)
    async with simulated_peers(network, donors + 1) as peers:
        held = [Held(*blobs) for _ in range(donors)]
        for peer, holdings in zip(peers[1:], held, strict=True):
            peer.state.join(RUN, None, Offered(holdings))
        async with open_sessions(peers[0].context, peers[0].lobby, key=stored_key(RUN, None)) as sessions:
            yield network, peers, held, sessions


def fetch_of(sessions: Sessions, blob: Blob, peers: Sequence[Peer], **options: object) -> BlobDownload:
    fetch = BlobDownload(sessions, blob.wanted, lambda manifest: MemorySink(manifest.sizes), **options)  # type: ignore[arg-type]
    fetch.set_donors({peer.id: peer.addresses for peer in peers})
    return fetch


async def check_fetch(fetch: BlobDownload, blob: Blob) -> float:
    """Run a fetch; return the seconds that it took."""
    began = trio.current_time()
    sink = await fetch.run()
    assert bytes(sink.take()) == blob.data
    return trio.current_time() - began


def when_sent(held: Held, count: int, then: Callable[[], None]) -> None:
    """Call a function when a donor reads its ``count``-th piece, before it sends it."""

    def change(_index: int, piece: bytes) -> bytes:
        if len(held.sent) == count:
            then()
        return piece

    held.change = change


def sent(held: Sequence[Held]) -> int:
    return sum(len(each.sent) for each in held)


# ---------------------------------------------------------------------- honest donors


async def test_a_donor_counts_what_it_sends_to_each_joiner() -> None:
    blob, sent = Blob(0, 5, 100_000), Counter[str]()
    async with company(1, blob) as (_, peers, [held], sessions):
        donor = peers[1].state
        donor.leave(RUN, None, held)
        donor.join(RUN, None, Offered(held, on_sent=lambda peer_id, count: sent.update({peer_id: count})))
        await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
    # The manifest counts, too.
    assert len(blob.data) <= sent.pop(peers[0].id) < len(blob.data) + 10_000
    assert not sent


async def test_a_blob_that_was_taken_stays_in_no_memory() -> None:
    """The sessions with its donors go on: more is asked of them."""
    blob = Blob(0, 20, 100_000, 17)
    async with company(2, blob) as (_network, peers, _held, sessions):
        sink = await fetch_of(sessions, blob, peers[1:]).run()
        gone = weakref.ref(sink)
        sink.close()
        del sink
        gc.collect()
        assert gone() is None


async def test_three_donors_are_at_least_two_and_a_half_times_as_fast_as_one() -> None:
    blob = Blob(0, 60, 1 << 20)
    seconds = {}
    for count in (1, 3):
        async with company(count, blob, bandwidth=FAST_ETHERNET) as (_network, peers, held, sessions):
            fetch = fetch_of(sessions, blob, peers[1:])
            seconds[count] = await check_fetch(fetch, blob)
            assert sent(held) <= 1.05 * len(blob.pieces)
    assert seconds[1] < 1.1 * len(blob.data) / FAST_ETHERNET
    assert seconds[1] >= 2.5 * seconds[3], seconds


async def test_sessions_are_used_again_for_the_next_blob() -> None:
    blobs = [Blob(seed, 3, 10_000) for seed in range(5)]
    async with company(2, *blobs) as (_network, peers, _held, sessions):
        await check_fetch(fetch_of(sessions, blobs[0], peers[1:]), blobs[0])
        first = dict(sessions._open)
        assert first.keys() == {name(1), name(2)}
        for blob in blobs[1:]:
            await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
        assert dict(sessions._open) == first


async def test_several_blobs_are_fetched_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    blobs = [Blob(seed, 10, 100_000) for seed in range(5 * MAX_FETCHES)]
    async with company(2, *blobs, bandwidth=FAST_ETHERNET) as (_network, peers, _held, sessions):
        async with trio.open_nursery() as nursery:
            for blob in blobs:
                nursery.start_soon(check_fetch, fetch_of(sessions, blob, peers[1:]), blob)
        assert "is not asked for a state for now" not in caplog.text, "no session was lost"


async def test_an_idle_session_is_ended_and_opened_again() -> None:
    blob = Blob(0, 5, 10_000)
    async with company(1, blob) as (_network, peers, _held, sessions):
        await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
        await trio.sleep(STALL_SECONDS + 5.0)
        assert not sessions._open
        assert not peers[1].state._served
        await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)


async def test_progress_says_how_far_it_is() -> None:
    blob = Blob(0, 40, 1 << 20)
    seen: list[DownloadProgress] = []
    async with company(2, blob, bandwidth=FAST_ETHERNET) as (_network, peers, _held, sessions):
        await check_fetch(fetch_of(sessions, blob, peers[1:], on_progress=seen.append), blob)
    middle = seen[len(seen) // 2]
    assert middle.total == len(blob.data)
    assert [each.done for each in seen] == sorted(each.done for each in seen)
    assert seen[-1].done == middle.total
    assert middle.rate == pytest.approx(2 * FAST_ETHERNET, rel=0.2)
    assert middle.seconds_left == pytest.approx((middle.total - middle.done) / middle.rate)
    assert middle.rates.keys() == {name(1), name(2)}
    assert all(rate == pytest.approx(FAST_ETHERNET, rel=0.2) for rate in middle.rates.values())


async def test_a_donor_that_is_named_later_helps() -> None:
    blob = Blob(0, 60, 1 << 20)
    async with company(2, blob, bandwidth=FAST_ETHERNET) as (_network, peers, held, sessions):
        fetch = fetch_of(sessions, blob, peers[1:2])

        def name_both() -> None:
            fetch.set_donors({peer.id: peer.addresses for peer in peers[1:]})

        when_sent(held[0], 15, name_both)
        await check_fetch(fetch, blob)
        assert len(held[1].sent) > 15


async def test_a_donor_that_is_not_named_any_more_is_asked_nothing_more() -> None:
    blob = Blob(0, 60, 1 << 20)
    async with company(2, blob, bandwidth=FAST_ETHERNET) as (_network, peers, held, sessions):
        fetch = fetch_of(sessions, blob, peers[1:])
        when_sent(held[0], 10, lambda: fetch.set_donors({peers[2].id: peers[2].addresses}))
        await check_fetch(fetch, blob)
        assert len(held[0].sent) <= 10 + 1


async def test_a_transfer_waits_while_a_round_exchanges_but_does_not_starve() -> None:
    blob = Blob(0, 8, 1 << 20)
    seconds = {}
    for busy in (False, True):
        async with company(1, bandwidth=FAST_ETHERNET) as (_network, peers, _held, sessions):
            peers[1].state.join(RUN, None, Offered(Held(blob), is_busy=lambda busy=busy: busy))  # type: ignore[misc]
            seconds[busy] = await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
    waits = len(blob.data) / SEND_BYTES
    assert seconds[True] == pytest.approx(waits * YIELD_SECONDS, rel=0.2)
    assert seconds[False] < 1.0


async def test_small_pieces_wait_as_long_as_large_ones_of_as_many_bytes() -> None:
    blob = Blob(0, 64, 1 << 16)
    async with company(1, bandwidth=FAST_ETHERNET) as (_network, peers, _held, sessions):
        peers[1].state.join(RUN, None, Offered(Held(blob), is_busy=lambda: True))
        seconds = await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
    assert seconds == pytest.approx(len(blob.data) / SEND_BYTES * YIELD_SECONDS, rel=0.3)


async def test_a_round_has_nearly_all_of_a_slow_link() -> None:
    """256 KiB a second would be half of it."""
    blob, mbps = Blob(0, 4, 1 << 20), 5.0
    async with company(1, bandwidth=mbps * 1e6 / 8) as (_network, peers, _held, sessions):
        peers[1].state.join(RUN, None, Offered(Held(blob), is_busy=lambda: True, bandwidth=lambda: mbps))
        seconds = await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
    assert len(blob.data) / seconds < 0.1 * mbps * 1e6 / 8


@pytest.mark.parametrize(
    ("mbps", "spared"), [(0.0, SEND_BYTES), (0.1, 16384), (5.0, 49152), (1e4, SEND_BYTES)]
)
def test_what_a_round_leaves_to_states_depends_on_the_link(mbps: float, spared: int) -> None:
    assert spared_bytes(mbps) == spared


# ---------------------------------------------------------------------- donors that fail


async def test_a_donor_that_is_killed_is_replaced() -> None:
    at = 7
    blob = Blob(0, 60, 1 << 20)
    async with company(3, blob, bandwidth=FAST_ETHERNET) as (network, peers, held, sessions):
        when_sent(held[0], at, lambda: network.crash(name(1)))
        await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
        assert sent(held) <= len(blob.pieces) + 2 * MAX_RANGE
        assert not sessions.excluded


async def test_the_loss_of_all_donors_is_reported_in_time() -> None:
    blob = Blob(0, 60, 1 << 20)
    async with company(2, blob, bandwidth=FAST_ETHERNET) as (network, peers, held, sessions):
        for index, holdings in enumerate(held, 1):
            when_sent(holdings, 5, lambda index=index: network.crash(name(index)))  # type: ignore[misc]
        began = trio.current_time()
        with pytest.raises(StateError, match="no donor is left: ") as caught:
            await fetch_of(sessions, blob, peers[1:], patience=20.0).run()
        assert trio.current_time() - began < 40.0
        assert all(f"{name(index)}: " in str(caught.value) for index in (1, 2))
        assert not peers[0].lobby.tickets


async def test_no_donors_at_all_are_reported() -> None:
    async with company(0) as (_network, _peers, _held, sessions):
        with pytest.raises(StateError, match="no donor is left: none was named"):
            await fetch_of(sessions, Blob(0, 1, 10), []).run()


async def test_a_donor_that_comes_back_goes_on() -> None:
    blob = Blob(0, 30, 1 << 20)
    async with company(1, blob, bandwidth=FAST_ETHERNET) as (network, peers, held, sessions):
        when_sent(held[0], 10, lambda: network.disconnect(name(0), name(1)))
        await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
        assert len(held[0].sent) < 30 + 2 * MAX_RANGE


async def test_a_slow_donor_is_taken_over() -> None:
    blob = Blob(0, 60, 1 << 20)
    async with company(2, blob, bandwidth=FAST_ETHERNET) as (network, peers, held, sessions):
        network.limit(name(1), 50_000)
        seconds = await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
        alone = len(blob.data) / FAST_ETHERNET
        assert seconds < 1.2 * alone + 1.0, "one piece of the slow donor takes 20 s"
        assert sent(held) <= len(blob.pieces) + 2 * MAX_RANGES


async def test_a_silent_donor_costs_seconds() -> None:
    """Nothing tells the joiner that the donor has stopped."""
    blob = Blob(0, 60, 1 << 20)
    async with company(2, blob, bandwidth=FAST_ETHERNET) as (network, peers, held, sessions):
        when_sent(held[0], 5, lambda: network.stop(name(1)))
        seconds = await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
        assert seconds < len(blob.data) / FAST_ETHERNET + STALLED_SECONDS + 1.0


async def test_a_donor_without_the_blob_refuses_and_the_others_send_it() -> None:
    blob = Blob(0, 20, 100_000)
    async with company(2, blob) as (_network, peers, held, sessions):
        held[0].blobs.clear()
        await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
        assert not held[0].sent
        assert not sessions.excluded


async def test_refusals_of_all_donors_are_reported() -> None:
    blob = Blob(0, 20, 100_000)
    async with company(2) as (_network, peers, _held, sessions):
        with pytest.raises(StateError, match="it refuses: it does not hold this state"):
            await fetch_of(sessions, blob, peers[1:]).run()
        peers[1].state.leave(RUN, None, _held[0])
        with pytest.raises(StateError, match="this peer holds no states of that run"):
            await fetch_of(sessions, blob, peers[1:2]).run()


async def test_a_blob_that_a_donor_lets_go_is_fetched_from_the_others() -> None:
    blob = Blob(0, 30, 100_000)
    async with company(2, blob) as (_network, peers, held, sessions):
        held[0].change = lambda _index, piece: piece if len(held[0].sent) < 4 else None
        await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
        assert not sessions.excluded


# ---------------------------------------------------------------------- hostile donors


async def test_a_donor_that_sends_a_wrong_piece_is_excluded_by_name(caplog: pytest.LogCaptureFixture) -> None:
    blobs = Blob(0, 30, 1 << 20), Blob(1, 10, 1 << 20)
    async with company(3, *blobs, bandwidth=FAST_ETHERNET) as (_network, peers, held, sessions):
        wrong: list[int] = []

        def change(index: int, piece: bytes) -> bytes:
            if len(held[0].sent) < 6:
                return piece
            wrong.append(index)
            return piece[:-1] + bytes([piece[-1] ^ 1])

        held[0].change = change
        fetch = fetch_of(sessions, blobs[0], peers[1:])
        await check_fetch(fetch, blobs[0])
        assert fetch.excluded.keys() == {name(1)}
        expected = f"sent piece {wrong[0]} of {blobs[0].id.hex()[:16]}… with digest "
        assert fetch.excluded[name(1)].startswith(expected)
        assert f"instead of {blobs[0].digests[wrong[0]].hex()}" in fetch.excluded[name(1)]
        assert sum(expected in record.getMessage() for record in caplog.records) == 1
        before = len(held[0].sent)
        assert before <= 6 + 2 * MAX_RANGE
        await check_fetch(fetch_of(sessions, blobs[1], peers[1:]), blobs[1])
        assert len(held[0].sent) == before, "it is asked for other blobs neither"


async def test_a_donor_that_sends_another_manifest_is_excluded() -> None:
    blob, other = Blob(0, 20, 100_000), Blob(1, 20, 100_000)
    async with company(2) as (_network, peers, held, sessions):
        held[0].blobs[blob.id] = other
        held[1].blobs[blob.id] = blob
        fetch = fetch_of(sessions, blob, peers[1:2])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(check_fetch, fetch, blob)
            await trio.sleep(2.0)
            fetch.set_donors({peer.id: peer.addresses for peer in peers[1:]})
        assert "sent a manifest that is not the one of" in fetch.excluded[name(1)]


async def test_an_exception_over_a_manifest_costs_its_donor_only(caplog: pytest.LogCaptureFixture) -> None:
    blob = Blob(0, 20, 100_000)
    async with company(2, blob) as (_network, peers, _held, sessions):
        tries: list[int] = []

        def read(data: bytes) -> BlobManifest:
            tries.append(1)
            if len(tries) == 1:
                raise KeyError("a bug")
            return blob.read_manifest(data)

        fetch = fetch_of(sessions, blob, peers[1:])
        fetch._wanted = replace(blob.wanted, read_manifest=read)
        await check_fetch(fetch, blob)
        assert len(fetch.excluded) == 1
        assert "This is a bug of p2pavg" in caplog.text


def raw(*frames: bytes) -> Callable[[Stream], Awaitable[None]]:
    """Return a donor that welcomes, waits for a request, and sends some bytes whatever it is asked."""

    async def serve(stream: Stream) -> None:
        await receive_message(stream)
        await send_message(stream, Welcome("").encode())
        await receive_message(stream)
        for frame in frames:
            await stream.send_all(frame)
        await trio.sleep_forever()

    return serve


HUGE = (1 << 32) - 1
HOSTILE = {
    "nonsense": (b"x" * 100,),
    "a manifest of 4 GiB": (encode_frame(Frame(FrameKind.MANIFEST, 1, 0, HUGE)),),
    "a reason that is no text": (encode_frame(Frame(FrameKind.REFUSAL, 1, 0, 2)), b"\xff\xff"),
}


@pytest.mark.parametrize("attack", HOSTILE)
async def test_a_donor_that_sends_damage_costs_itself_only(
    attack: str, caplog: pytest.LogCaptureFixture
) -> None:
    blob = Blob(0, 20, 100_000)
    async with company(2, blob) as (_network, peers, _held, sessions):
        peers[1].context.transport.serve(PROTOCOL, raw(*HOSTILE[attack]))
        seconds = await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
        assert seconds < 5.0
        with pytest.raises(StateError, match=f"no donor is left: {name(1)}: "):
            await fetch_of(sessions, blob, peers[1:2]).run()
    assert "bug of p2pavg" not in caplog.text


# ---------------------------------------------------------------------- the joiner


@pytest.mark.parametrize("after", [0.0005, 0.5])
async def test_a_joiner_that_is_cancelled_leaves_nothing_behind(after: float) -> None:
    blob = Blob(0, 60, 1 << 20)
    network = MemoryNetwork(latency=LAN, bandwidth=FAST_ETHERNET)
    async with simulated_peers(network, 3) as peers:
        for peer in peers[1:]:
            peer.state.join(RUN, None, Offered(Held(blob)))
        with trio.move_on_after(after):
            async with open_sessions(peers[0].context, peers[0].lobby, key=stored_key(RUN, None)) as sessions:
                await fetch_of(sessions, blob, peers[1:]).run()
        assert not peers[0].lobby.tickets
        await trio.sleep(2.0)
        for peer in peers[1:]:
            assert not peer.state._served
            assert not peer.state._greeted
        async with open_sessions(peers[0].context, peers[0].lobby, key=stored_key(RUN, None)) as sessions:
            await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)


async def test_a_fetch_that_is_cancelled_leaves_its_sessions_to_the_next() -> None:
    blobs = Blob(0, 60, 1 << 20), Blob(1, 10, 1 << 20)
    async with company(2, *blobs, bandwidth=FAST_ETHERNET) as (_network, peers, held, sessions):
        with trio.move_on_after(1.0):
            await fetch_of(sessions, blobs[0], peers[1:]).run()
        first = dict(sessions._open)
        asked = sent(held)
        seconds = await check_fetch(fetch_of(sessions, blobs[1], peers[1:]), blobs[1])
        assert dict(sessions._open) == first
        assert sent(held) - asked <= len(blobs[1].pieces) + 2, "what was asked before is sent no more"
        assert seconds < 0.7 * len(blobs[1].data) / FAST_ETHERNET + 0.5


async def test_a_full_disk_ends_the_download_and_blames_no_donor() -> None:
    blob = Blob(0, 30, 1 << 20)
    closed: list[Sink] = []

    class Full(MemorySink):
        def put(self, index: int, piece: Buffer) -> None:
            raise StateError("the disk of here is full")

        def close(self) -> None:
            closed.append(self)

    async with company(2, blob, bandwidth=FAST_ETHERNET) as (_network, peers, _held, sessions):
        fetch = BlobDownload(sessions, blob.wanted, lambda manifest: Full(manifest.sizes))
        fetch.set_donors({peer.id: peer.addresses for peer in peers[1:]})
        with trio.fail_after(10.0), pytest.raises(StateError, match="the disk of here is full"):
            await fetch.run()
        assert closed
        assert not fetch.excluded


async def test_an_average_with_too_few_signers_of_today_costs_no_donor_its_place() -> None:
    """A signer's certificate was revoked since. The donors have done no wrong, and give a snapshot next."""
    roster, average, snapshot = roster_of(3), Blob(1, 1, 1), Blob(0, 5, 1000)
    average.id, average.manifest = roster.group_id, logged(roster, signers=(0, 2)).manifest()

    def read(data: bytes) -> BlobManifest:
        found = read_manifest(data, expected(roster, trusts=trusts(0, 1)))
        return BlobManifest(sizes=found.sizes, digests=found.digests)

    async with company(3, snapshot, average) as (_, peers, _, sessions):
        wanted = Wanted(KIND, roster.group_id, MAX_MANIFEST_BYTES, read)
        fetch = BlobDownload(sessions, wanted, lambda found: MemorySink(found.sizes))
        fetch.set_donors({peer.id: peer.addresses for peer in peers[1:]})
        with pytest.raises(StateError, match="1 members of the run have signed"):
            await fetch.run()
        assert not sessions.excluded
        await check_fetch(fetch_of(sessions, snapshot, peers[1:]), snapshot)


async def test_a_donor_that_leaves_signatures_out_keeps_no_one_from_another_donors_average(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blob = Blob(0, 5, 1000)

    def read(data: bytes) -> BlobManifest:
        if data != blob.manifest:
            raise FewSignersError("1 members of the run have signed")
        return as_it_is(data)

    as_it_is = blob.read_manifest
    async with company(2, blob) as (_, peers, held, sessions):
        monkeypatch.setattr(held[0], "manifest", lambda _kind, _blob_id: b"stripped")
        monkeypatch.setattr(blob, "read_manifest", read)
        await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
