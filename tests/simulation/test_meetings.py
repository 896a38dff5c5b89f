"""Places: peers of a run that look for their group in different places do not see each other."""

from __future__ import annotations

from functools import partial

import pytest
import trio

import p2pavg
from p2pavg.group.places.gossip import MAX_PLACE_BYTES, SearchPlace
from p2pavg.peer.peer import Peer
from p2pavg.testing import MemoryNetwork, simulated_peers
from tests.simulation.swarm import LAN, config, values

HERE, THERE = SearchPlace(place=b"here"), SearchPlace(place=b"there")


async def step_at(
    peer: Peer, meetings: list[SearchPlace | None], results: list[list[p2pavg.RoundResult]], index: int
) -> None:
    """Average once at each place; append the results."""
    async with peer.averager(config(group_size=2)) as averager:
        for meeting in meetings:
            averager.clear()
            averager.accumulate([values(index)])
            results[index].append(await averager.step(wait=None, meeting=meeting))


async def run(plans: list[list[SearchPlace | None]]) -> tuple[list[str], list[list[p2pavg.RoundResult]]]:
    """Let peers average at the places of their plans; return their ids and results."""
    results: list[list[p2pavg.RoundResult]] = [[] for _ in plans]
    async with simulated_peers(MemoryNetwork(latency=LAN), len(plans)) as peers:
        async with trio.open_nursery() as nursery:
            for index, (peer, plan) in enumerate(zip(peers, plans, strict=True)):
                nursery.start_soon(partial(step_at, peer, plan, results, index))
        return [peer.id for peer in peers], results


def groups_of(results: list[list[p2pavg.RoundResult]], step: int = 0) -> list[set[str]]:
    found = []
    for mine in results:
        result = mine[step]
        assert isinstance(result, p2pavg.Success), result
        found.append(set(result.peers))
    return found


async def test_peers_meet_in_their_place_only() -> None:
    ids, results = await run([[HERE], [THERE], [HERE], [THERE]])
    groups = groups_of(results)
    assert groups[0] == groups[2] == {ids[0], ids[2]}
    assert groups[1] == groups[3] == {ids[1], ids[3]}


async def test_a_peer_goes_to_another_place_for_its_next_round() -> None:
    ids, results = await run([[HERE, THERE], [THERE, THERE], [HERE, None], [THERE, None]])
    second = groups_of(results, 1)
    assert second[0] == second[1] == {ids[0], ids[1]}
    assert second[2] == second[3] == {ids[2], ids[3]}


async def test_a_peer_that_is_alone_in_its_place_meets_no_peer_of_another() -> None:
    _, results = await run([[HERE], [None], [None]])
    assert isinstance(results[0][0], p2pavg.NoPeers)
    assert isinstance(results[1][0], p2pavg.Success)


async def test_peers_that_avoid_each_other_form_other_pairs() -> None:
    """Without it, the pair that has just finished a round would be the first to meet again."""
    results: list[list[p2pavg.RoundResult]] = [[] for _ in range(4)]
    async with simulated_peers(MemoryNetwork(latency=LAN), 4) as peers, trio.open_nursery() as nursery:
        ids = [peer.id for peer in peers]
        for index, peer in enumerate(peers):
            partner = SearchPlace(avoid=frozenset({ids[index ^ 1]}))
            nursery.start_soon(partial(step_at, peer, [partner], results, index))
    assert all(group not in ({ids[0], ids[1]}, {ids[2], ids[3]}) for group in groups_of(results))


async def test_patience_replaces_the_match_timeout() -> None:
    began = trio.current_time()
    _, results = await run([[SearchPlace(patience=2.0)]])
    assert isinstance(results[0][0], p2pavg.NoPeers)
    assert trio.current_time() < began + 9.0, "on the virtual clock"


@pytest.mark.parametrize(
    "values_", [{"place": b"x" * (MAX_PLACE_BYTES + 1)}, {"place": "text"}, {"patience": 0.0}]
)
def test_a_meeting_out_of_range_is_refused(values_: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        SearchPlace(**values_)  # type: ignore[arg-type]
