"""A peer that expects its last group again, and the messages that a group saves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from p2pavg.base.limits import GLANCE_SECONDS
from p2pavg.group.candidate import Candidate
from p2pavg.matchmaking.actions import Open, Send
from p2pavg.matchmaking.attempt_state import Memory
from p2pavg.matchmaking.messages import Joined, LeaderStatus
from p2pavg.matchmaking.reunion import (
    EVERYONE_KEEPS,
    LEAST_MATCH_TIMEOUT,
    MOST_OTHERS,
    LastGroup,
    holds_back,
    last_group,
)
from p2pavg.matchmaking.rules import Matchmaking
from p2pavg.matchmaking.timing import HEARTBEAT_SECONDS, RECORD_TTL_SECONDS, REUNION_SECONDS
from p2pavg.runs.records.run_records import MAX_MATES
from tests.unit.matchmaking.bus import EPOCH, candidate, settings

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


class TestHoldingBack:
    LAST = LastGroup(KEY, "a", frozenset("abc"), frozenset("abc"))
    USUAL: ClassVar[dict[str, Any]] = {
        "key": KEY,
        "target": 3,
        "expected": (),
        "match_timeout": 30.0,
        "looked": 1.0,
        "network": EVERYONE_KEEPS,
    }

    def holds_back(self, last: LastGroup | None = LAST, me: str = "b", **changes: Any) -> bool:
        return holds_back(me, last, **(self.USUAL | changes))

    def test_a_member_waits_for_the_leader_of_its_last_group(self) -> None:
        assert self.holds_back()
        assert self.holds_back(target=2)
        assert self.holds_back(expected=("a", "c"))

    def test_a_group_that_is_the_whole_network_may_be_large(self) -> None:
        members = frozenset({"b", *map(str, range(MOST_OTHERS))})
        last = replace(self.LAST, members=members, holders=members)
        assert self.holds_back(last, network=len(members))
        assert not self.holds_back(last, network=len(members) + 1)

    def test_the_leader_itself_does_not(self) -> None:
        assert not self.holds_back(me="a")

    @pytest.mark.parametrize(
        "change",
        [
            {"target": 4},
            {"expected": ("a", "d")},
            {"key": OTHER_KEY},
            {"match_timeout": LEAST_MATCH_TIMEOUT - 0.1},
            {"looked": RECORD_TTL_SECONDS},
            {"network": EVERYONE_KEEPS + 1},
            {"last": None},
            {"last": replace(LAST, members=frozenset(map(str, range(MOST_OTHERS + 2))))},
        ],
        ids=[
            "larger group",
            "another one expected",
            "another place",
            "impatient",
            "long ago",
            "large network",
            "none",
            "large",
        ],
    )
    def test_it_does_not_if_the_last_group_may_not_do(self, change: dict[str, Any]) -> None:
        assert not self.holds_back(**change)

    def test_auxiliaries_are_no_members_that_a_group_needs(self) -> None:
        members = [candidate(1, EPOCH), candidate(2, EPOCH), candidate(3, EPOCH, auxiliary=True)]
        group = last_group(KEY, members)
        ids = [member.peer_id for member in members]
        assert group == LastGroup(KEY, ids[0], frozenset(ids), frozenset(ids[:2]))

    def test_a_round_without_members_that_finished_leaves_no_group(self) -> None:
        assert last_group(KEY, []) is None

    def test_a_leader_gives_its_record_to_all_members_of_such_a_group(self) -> None:
        assert MOST_OTHERS <= MAX_MATES


class TestStrangers:
    COMPANION = candidate(2, EPOCH + 1)

    def waiting(self, target: int = 3, memory: Memory | None = None) -> Matchmaking:
        """Return the rules of a peer that hopes for its last group."""
        return Matchmaking(
            candidate(1, EPOCH + 2),
            settings(target),
            EPOCH,
            memory,
            companions=frozenset({self.COMPANION.peer_id}),
            hold_back=REUNION_SECONDS,
        )

    def test_a_stranger_that_is_seen_ends_the_wait(self) -> None:
        """The group would not be the whole run."""
        rules = self.waiting()
        assert rules.state.strangers_from == EPOCH + REUNION_SECONDS
        assert [type(action) for action in rules.discovered([candidate(3, EPOCH + 1)], EPOCH)] == [Open]
        assert rules.state.strangers_from == EPOCH

    @pytest.mark.parametrize(
        "other",
        [COMPANION, candidate(3, EPOCH + 1, auxiliary=True), candidate(3, EPOCH + 1, state=b"o")],
        ids=["companion", "auxiliary", "other state"],
    )
    def test_others_do_not_end_the_wait(self, other: Candidate) -> None:
        rules = self.waiting()
        rules.discovered([other], EPOCH)
        assert rules.state.strangers_from == EPOCH + REUNION_SECONDS

    def test_an_unproven_companion_is_asked_after_the_wait(self) -> None:
        """Such as one that has wasted this peer's time."""
        rules = self.waiting(target=2)
        assert rules.discovered([self.COMPANION], EPOCH) == []
        assert rules.wake_at() <= EPOCH + REUNION_SECONDS
        assert [type(action) for action in rules.tick(EPOCH + REUNION_SECONDS)] == [Open]

    def test_a_member_of_the_last_group_is_asked_at_once(self) -> None:
        memory = Memory()
        memory.finished_with([candidate(2, EPOCH - 10)])
        assert [
            type(action) for action in self.waiting(memory=memory).discovered([self.COMPANION], EPOCH)
        ] == [Open]


class TestStatus:
    def test_followers_are_told_soon_and_not_one_by_one_that_the_group_has_grown(self) -> None:
        me, followers = candidate(1, EPOCH + 1), [candidate(n, EPOCH + n) for n in (2, 3, 4)]
        rules = Matchmaking(me, settings(5), EPOCH)
        said = [action for follower in followers for action in rules.asked(follower, EPOCH)]
        assert [type(action.message) for action in said if isinstance(action, Send)] == 3 * [Joined]
        assert rules.wake_at() <= EPOCH + GLANCE_SECONDS
        told = rules.tick(EPOCH + GLANCE_SECONDS)
        statuses = [action for action in told if isinstance(action, Send)]
        assert {action.peer_id for action in statuses} == {follower.peer_id for follower in followers}
        assert {action.message for action in statuses} == {LeaderStatus(4, False)}
        assert rules.tick(EPOCH + 2 * GLANCE_SECONDS) == []
        assert rules.tick(EPOCH + GLANCE_SECONDS + HEARTBEAT_SECONDS) != []
