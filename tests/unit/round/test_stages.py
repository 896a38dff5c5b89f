"""A round whose group is looked for in one place after the other: when a search ends, and what the caller hears."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from p2pavg.base.result import NoPeersCode
from p2pavg.group.places.gossip import SearchPlace, SearchStage
from p2pavg.matchmaking.actions import GaveUp, Report
from p2pavg.matchmaking.matchmaker import RoundOffer
from p2pavg.round.roles import RoundRole
from p2pavg.round.round import Round
from p2pavg.round.rounds import Rounds

SECONDS = 2.0
FIRST, LAST = (
    SearchStage(SearchPlace(place=b"first"), SECONDS),
    SearchStage(SearchPlace(place=b"last"), math.inf),
)
Search = Callable[[Any], Awaitable[GaveUp]]


class Matchmaker:
    """Searches in each place as it was told, and notes when each search began."""

    ready_peers = 1
    exchange_begun = None

    def __init__(self, searches: dict[bytes, Search]) -> None:
        self.began: dict[bytes, float] = {}
        self._searches = searches

    async def find_group(self, **given: Any) -> GaveUp:
        place = given["meeting"].place
        self.began[place] = trio.current_time()
        return await self._searches[place](SimpleNamespace(**given))

    def waits_for(self) -> str:
        return "others"


def round_of(searches: dict[bytes, Search]) -> tuple[Round[Any], Matchmaker]:
    """Return a round without a network that looks in two places."""

    async def offer() -> RoundOffer:
        return RoundOffer()

    async def why_alone() -> GaveUp:
        return GaveUp("")

    matchmaker = Matchmaker(searches)
    role = SimpleNamespace(
        offer=offer, auxiliary=False, alone=lambda *words: words, give_back=lambda: None, state=b""
    )
    rounds = SimpleNamespace(
        matchmaker=matchmaker,
        context=SimpleNamespace(lobby=SimpleNamespace(expect=lambda *_: SimpleNamespace(close=lambda: None))),
        settings=SimpleNamespace(target=2, run_id="run"),
        why_alone=why_alone,
    )
    return Round(cast(Rounds, rounds), cast("RoundRole[Any]", role), stages=(FIRST, LAST)), matchmaker


async def until_over(found: Round[Any]) -> None:
    """Let the round run to its result."""
    with trio.fail_after(60.0):  # on the virtual clock
        await found.run()


async def search_for_ever(_given: Any) -> GaveUp:
    await trio.sleep_forever()
    raise AssertionError


async def give_up(_given: Any) -> GaveUp:
    return GaveUp("there is no group", NoPeersCode.NO_GROUP)


async def test_a_search_in_one_place_ends_with_its_time() -> None:
    found, matchmaker = round_of({b"first": search_for_ever, b"last": give_up})
    began = trio.current_time()
    await until_over(found)
    assert matchmaker.began[b"last"] - began == pytest.approx(SECONDS)
    assert found.result == ("there is no group", NoPeersCode.NO_GROUP)


async def test_a_place_without_a_group_is_left_at_once() -> None:
    found, matchmaker = round_of({b"first": give_up, b"last": give_up})
    began = trio.current_time()
    await until_over(found)
    assert matchmaker.began == {b"first": began, b"last": began}


async def test_a_group_that_others_count_on_is_not_left_when_the_time_is_over() -> None:
    """If it does not come about, the search goes on in the next place at once."""

    async def form(given: Any) -> GaveUp:
        await trio.sleep(SECONDS / 2)
        given.listener.expects(b"group")
        await trio.sleep(SECONDS)
        given.listener.expects(None)
        return await search_for_ever(given)

    found, matchmaker = round_of({b"first": form, b"last": give_up})
    began = trio.current_time()
    await until_over(found)
    assert matchmaker.began[b"last"] - began == pytest.approx(1.5 * SECONDS)


async def test_a_group_that_does_not_come_about_in_time_does_not_end_the_search() -> None:
    async def form(given: Any) -> GaveUp:
        given.listener.expects(b"group")
        await trio.sleep(SECONDS / 4)
        given.listener.expects(None)
        return await search_for_ever(given)

    found, matchmaker = round_of({b"first": form, b"last": give_up})
    began = trio.current_time()
    await until_over(found)
    assert matchmaker.began[b"last"] - began == pytest.approx(SECONDS)


async def test_the_caller_hears_of_the_last_place_only() -> None:
    """``step`` returns when a match timeout has passed. Stages before the last one are shorter."""

    async def report(given: Any) -> GaveUp:
        given.listener.searched(Report(1, f"in {given.meeting.place.decode()}"))
        await trio.sleep(1.0)
        return GaveUp("")

    found, _ = round_of({b"first": report, b"last": report})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(found.run)
        with trio.fail_after(10.0):
            await found.changed()
        heard = found.take_report()
        assert heard is not None
        assert heard.reason == "in last"


async def test_a_search_is_cancelled_in_any_place() -> None:
    for seconds in (SECONDS / 2, 2 * SECONDS):
        found, _ = round_of({b"first": search_for_ever, b"last": search_for_ever})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(found.run)
            await trio.sleep(seconds)
            assert found.cancel_matchmaking("enough")
        assert found.result == ("enough", NoPeersCode.CANCELLED)
