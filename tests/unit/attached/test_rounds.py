"""Rounds of attached processes that leave, cancel or ask anew while a round is due."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from p2pavg.base.errors import P2PAvgError
from tests.unit.attached.rounds import OTHER, World, settle, world


async def average_once(of: World) -> int:
    """Average once among the processes ``a``, ``b`` and ``c``; return the serial of the result, which none has read."""
    processes = [of.sit(name) for name in "abc"]
    for name in "abc":
        of.ask(name, 1, "P/a", "P/b", "P/c")
    await settle()
    [(_, serial)] = processes[0].of("committed")
    for process in processes:
        process.messages.clear()
    return int(serial)


class TestWhileAReaderIsWaitedFor:
    """``c`` has not read the last result, and ``a`` and ``b`` have asked for the next one."""

    async def test_a_process_that_cancels_takes_no_part(self, autojump_clock: trio.testing.MockClock) -> None:
        async with world() as of:
            serial = await average_once(of)
            for name in "ab":
                of.rounds.taken(name, serial)
                of.ask(name, 2, "P/a", "P/b")
            await settle()
            assert await of.rounds.cancel("a", 2, "no more")
            of.rounds.taken("c", serial)
            await settle()
            a, b = (of.processes[name] for name in "ab")
            assert a.of("ended") == [(2, "NoPeers", "no more", "cancelled", "", 0)]
            assert not a.of("begun")
            assert not b.of("begun"), "it waits for the process that cancelled"

    async def test_a_process_that_comes_back_is_not_in_the_round_of_its_old_request(
        self, autojump_clock: trio.testing.MockClock
    ) -> None:
        async with world() as of:
            serial = await average_once(of)
            for name in "ab":
                of.rounds.taken(name, serial)
                of.ask(name, 2, "P/a", "P/b")
            await settle()
            of.rounds.leave("a")
            back = of.sit("a")
            of.rounds.taken("c", serial)
            await settle()
            assert not back.messages
            of.ask("a", 1, "P/b")
            await settle()
            assert [number for number, _ in back.of("committed")] == [1]

    async def test_a_process_that_asks_for_another_state_is_not_averaged_under_the_old_one(
        self, autojump_clock: trio.testing.MockClock
    ) -> None:
        async with world() as of:
            serial = await average_once(of)
            for name in "ab":
                of.rounds.taken(name, serial)
                of.ask(name, 2, "P/a", "P/b")
            await settle()
            await of.rounds.cancel("a", 2, "another state")
            of.ask("a", 3, "P/a", "Q", state=OTHER)
            of.rounds.taken("c", serial)
            await settle()
            a, b = (of.processes[name] for name in "ab")
            begun = [{serial for _, serial in guest.of("begun")} for guest in (a, b)]
            assert begun[0]
            assert not begun[0] & begun[1], "two states in one round"

    @pytest.mark.parametrize("missing", [True, False])
    async def test_the_others_begin_when_it_has_read_or_its_time_is_over(
        self, missing: bool, autojump_clock: trio.testing.MockClock
    ) -> None:
        async with world() as of:
            serial = await average_once(of)
            c = of.processes["c"]
            for name in "ab":
                of.rounds.taken(name, serial)
                of.ask(name, 2, "P/a", "P/b")
            await settle()
            assert not of.processes["a"].of("begun")
            if missing:
                await trio.sleep(31.0)
            else:
                of.rounds.taken("c", serial)
                await settle()
            assert of.processes["a"].of("committed")
            assert ("has not read" in c.dropped) is missing


class TestCancelling:
    """While a round of ``a``, ``b`` and ``c`` looks for another peer."""

    @staticmethod
    async def begin(of: World) -> None:
        for name in "abc":
            of.sit(name)
        for name in "abc":
            of.ask(name, 1, "P/a", "P/b", "P/c", "Q")
        await of.averager.looks.wait()
        of.averager.looks = trio.Event()

    async def test_two_at_once_are_both_ended_and_the_third_goes_on(
        self, autojump_clock: trio.testing.MockClock
    ) -> None:
        async with world() as of:
            await self.begin(of)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(of.rounds.cancel, "a", 1, "first")
                nursery.start_soon(of.rounds.cancel, "b", 1, "second")
            await trio.sleep(2.0)
            assert of.processes["a"].of("ended") == [(1, "NoPeers", "first", "cancelled", "", 0)]
            assert of.processes["b"].of("ended") == [(1, "NoPeers", "second", "cancelled", "", 0)]
            assert not of.processes["c"].of("ended")

    async def test_one_that_cancelled_before_a_failure_does_not_end_a_later_round(
        self, autojump_clock: trio.testing.MockClock
    ) -> None:
        async with world() as of:
            await self.begin(of)
            of.averager.error = P2PAvgError("it failed")
            assert await of.rounds.cancel("a", 1, "no more")
            await trio.sleep(2.0)
            assert [fields[1] for fields in of.processes["b"].of("ended")] == ["Failed"]
            for name in "bc":
                of.ask(name, 2, "P/b", "P/c", "Q")
            await of.averager.looks.wait()
            assert await of.rounds.cancel("b", 2, "no more")
            await trio.sleep(2.0)
            assert of.processes["b"].of("ended")[1:] == [(2, "NoPeers", "no more", "cancelled", "", 0)]
            assert not of.processes["c"].of("ended")[1:]

    async def test_one_that_came_back_cancels_its_own_request_only(
        self, autojump_clock: trio.testing.MockClock
    ) -> None:
        async with world() as of:
            await self.begin(of)
            of.rounds.leave("a")
            back = of.sit("a")
            of.ask("a", 1)
            assert await of.rounds.cancel("a", 1, "no more")
            assert back.of("ended") == [(1, "NoPeers", "no more", "cancelled", "", 0)]


class TestFinish:
    """The peer is told to leave."""

    async def test_no_further_round_begins(self, autojump_clock: trio.testing.MockClock) -> None:
        async with world() as of:
            processes = [of.sit(name) for name in "ab"]
            await of.rounds.finish()
            for name in "ab":
                of.ask(name, 1, "P/a", "P/b")
            await trio.sleep(60.0)
            assert not any(process.of("begun") or process.of("ended") for process in processes)

    async def test_a_round_without_a_group_ends_and_its_request_stays(
        self, autojump_clock: trio.testing.MockClock
    ) -> None:
        async with world() as of:
            process = of.sit("a")
            of.ask("a", 1, "another peer")
            await of.averager.looks.wait()
            await of.rounds.finish()
            assert process.of("begun")
            assert not process.of("ended"), "the next peer at this socket takes the request"

    async def test_a_round_that_exchanges_is_waited_for(self, autojump_clock: trio.testing.MockClock) -> None:
        async with world() as of:
            process = of.sit("a")
            of.averager.exchanges = True
            of.ask("a", 1, "another peer")
            await of.averager.looks.wait()
            await trio.sleep(5.0)
            assert of.rounds.is_exchanging
            with trio.move_on_after(30.0) as scope:
                await of.rounds.finish()
            assert scope.cancelled_caught
            assert not process.of("ended")
            of.averager.fail("a member was lost")
            await of.rounds.finish()
            assert len(process.of("ended")) == 1

    async def test_a_result_that_is_not_read_yet_delays_nothing(
        self, autojump_clock: trio.testing.MockClock
    ) -> None:
        async with world() as of:
            await average_once(of)
            of.ask("a", 2, "P/b")
            of.ask("b", 2, "P/a")
            await settle()
            with trio.fail_after(1.0):
                await of.rounds.finish()
            assert not any(process.dropped for process in of.processes.values())
