"""Entries of companions whose processes end, on a simulated network."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import trio

import p2pavg
from p2pavg.base.limits import CALM_LOOK_SECONDS, GLANCE_SECONDS
from p2pavg.peer.peer import Peer
from p2pavg.runs.records.board import Board
from p2pavg.testing import MemoryNetwork, run_peers
from p2pavg.testing.simulation import simulated_signer
from tests.simulation.swarm import LAN, config

LAST = 2
SOON = GLANCE_SECONDS + 0.5


class Company:
    """Three peers that have averaged together, and published an entry each; then something happens to the last one."""

    def __init__(self, *, averages: bool = True) -> None:
        self.network = MemoryNetwork(latency=LAN)
        self._averages = averages
        self._said = 0
        self._all_said = trio.Event()
        self._ended = trio.Event()
        self.boards: dict[int, Board] = {}
        self.last = simulated_signer(LAST).peer_id

    async def after(self, happens: Callable[[Company], None], seconds: float) -> list[bool]:
        """Return, for each other peer, whether it sees the last one's entry so long after something happened."""
        seen: list[bool] = []

        async def work(peer: Peer, index: int) -> None:
            async with peer.averager(config(group_size=3)) as averager:
                averager.accumulate([torch.ones(10)])
                self.boards[index] = await averager.board("topic")
                if self._averages:
                    assert isinstance(await averager.step(wait=None), p2pavg.Success)
                self.boards[index].publish(b"here", now=True)
                await trio.sleep(2.0)
                self._said += 1
                if self._said == 3:
                    self._all_said.set()
                await self._all_said.wait()
                if index == 0:
                    assert all(self.last in self.boards[each].entries for each in (0, 1))
                    happens(self)
                    await trio.sleep(seconds)
                    seen.extend(self.last in self.boards[each].entries for each in (0, 1))
                    self._ended.set()
                await self._ended.wait()

        await run_peers(self.network, 3, work)
        return seen

    def kill_the_last(self) -> None:
        self.network.crash(self.last)

    def stop_the_last(self) -> None:
        self.network.stop(self.last)

    def disconnect_the_last(self) -> None:
        for index in (0, 1):
            self.network.disconnect(simulated_signer(index).peer_id, self.last)

    def cut_off_the_last(self) -> None:
        self.disconnect_the_last()
        for index in (0, 1):
            self.network.cut(simulated_signer(index).peer_id, self.last)


async def test_a_companion_that_is_killed_loses_its_entries_soon() -> None:
    assert await Company().after(Company.kill_the_last, SOON) == [False, False]


@pytest.mark.parametrize(
    "happens", [Company.stop_the_last, Company.disconnect_the_last, Company.cut_off_the_last]
)
async def test_a_companion_that_cannot_be_reached_keeps_its_entries(
    happens: Callable[[Company], None],
) -> None:
    assert await Company().after(happens, CALM_LOOK_SECONDS + SOON) == [True, True]


async def test_a_peer_of_no_round_keeps_its_entries_until_they_expire() -> None:
    assert await Company(averages=False).after(Company.kill_the_last, SOON) == [True, True]
