"""The limits of the lanes that a peer keeps and holds, and their lifetimes."""

import os

import pytest
import trio
import trio.testing

from p2pavg.base.errors import UnreachableError
from p2pavg.net.lanes import limits, pool
from p2pavg.testing import MemoryNetwork
from p2pavg_dht import Ed25519Signer
from tests.integration.hosts import LOOPBACK, eventually, open_host, seeds, watched
from tests.integration.lanes.company import Inbox, Serving, assert_goes_on, in_thread, keeper, lane_to, pair


@watched
async def test_few_idle_lanes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_IDLE", 5)
    async with pair() as (here, there), open_host(LOOPBACK) as third:
        lanes = [await lane_to(here, there) for _ in range(6)]
        for lane in lanes:
            here.keep_lane(lane)
        assert [lane.aborted for lane in lanes] == [True, True, False, False, False, False]
        more = [await lane_to(here, third) for _ in range(2)]
        for lane in more:
            here.keep_lane(lane)
        assert [lane.aborted for lane in lanes + more] == [True] * 3 + [False] * 5
        assert await lane_to(here, there) is lanes[-1]
        await eventually(lambda: len(keeper(there).lanes) == 3)


@watched
async def test_the_lanes_of_a_peer_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_INBOUND_PER_PEER", 2)
    monkeypatch.setattr(limits, "MAX_INBOUND", 3)
    async with pair() as (here, there), open_host() as third:
        mine = [await lane_to(here, there) for _ in range(2)]
        with pytest.raises(UnreachableError, match="holds 2 lanes already"):
            await lane_to(here, there)
        await lane_to(third, there)
        with pytest.raises(UnreachableError, match="there are 3 lanes already"):
            await lane_to(third, there)
        mine[0].abort()
        await eventually(lambda: len(keeper(there).lanes) == 2)
        await lane_to(here, there)


@watched
async def test_a_peer_of_no_group_gets_few_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UNEXPECTED", 3)
    expected: set[str] = set()
    async with pair() as (here, there), open_host() as third, open_host() as member:
        there.serve_lanes(Serving(Inbox(), wanted=expected))
        for _ in range(limits.MAX_UNEXPECTED_PER_PEER):
            await lane_to(here, there)
        with pytest.raises(UnreachableError, match="in no group with this peer"):
            await lane_to(here, there)
        await lane_to(third, there)
        with pytest.raises(UnreachableError, match="in no group with this peer"):
            await lane_to(third, there)
        expected.add(member.peer_id)
        for _ in range(limits.MAX_UNEXPECTED_PER_PEER + 1):
            await lane_to(member, there)


@watched
async def test_idle_lanes_of_other_peers_make_room_for_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member of an old group that keeps its lanes must not keep out a member of a new group."""
    monkeypatch.setattr(limits, "MAX_INBOUND", 3)
    async with pair() as (here, there), open_host() as member:
        expected = {here.peer_id}
        there.serve_lanes(Serving(Inbox(), wanted=expected))
        lanes = [await lane_to(here, there) for _ in range(3)]
        with pytest.raises(UnreachableError, match="there are 3 lanes already"):
            await lane_to(member, there)
        expected.clear()
        expected.add(member.peer_id)
        await lane_to(member, there)
        await eventually(lambda: [lane.has_ended() for lane in lanes] == [True, False, False])


@watched
async def test_a_lane_that_has_carried_much_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_MAX_LANE_BYTES", 10)
    async with pair() as (here, there):
        lane = await lane_to(here, there)
        await in_thread(lane.send, bytes(11))
        here.keep_lane(lane)
        assert lane.aborted


def test_the_list_of_unreachable_peers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trio, "current_time", lambda: 100.0)
    monkeypatch.setattr(limits, "MAX_NOWHERE", 2)
    nowhere = limits.Nowhere()
    for peer in ("a", "b", "c"):
        nowhere.add(peer, "why", 60.0)
    nowhere.check("a")
    for peer in ("b", "c"):
        with pytest.raises(UnreachableError, match="why"):
            nowhere.check(peer)


@watched
async def test_a_forked_child_closes_its_lanes() -> None:
    async with pair() as (here, there):
        await lane_to(here, there)
        numbers = [lane._connection.fileno() for lane in keeper(here).lanes + keeper(there).lanes]
        assert len(numbers) == 2
        child = os.fork()
        if child == 0:
            still = sum(is_socket(number) for number in numbers)
            os._exit(still)
        _, status = await in_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        await assert_goes_on(there)


def is_socket(number: int) -> bool:
    try:
        return os.fstat(number).st_mode & 0o170000 == 0o140000
    except OSError:
        return False


async def test_a_network_may_have_no_lanes() -> None:
    async with MemoryNetwork().transport(Ed25519Signer(next(seeds))) as here:
        here.serve_lanes(Serving(Inbox()))
        with pytest.raises(UnreachableError, match="this network has no direct lanes"):
            await here.open_lane("another peer", timeout=1.0)
