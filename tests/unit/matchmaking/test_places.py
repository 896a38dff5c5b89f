"""A leader keeps places for candidates that exchange directly, and puts no candidate off for long or for ever."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from p2pavg.base.limits import ASK_AGAIN_SECONDS
from p2pavg.group.candidate import Candidate
from p2pavg.group.reach import Reach
from p2pavg.matchmaking.actions import Actions, Send
from p2pavg.matchmaking.admission import WAITS_FOR_DIRECT, WAITS_FOR_RELAYED
from p2pavg.matchmaking.attempt_state import MAX_PUT_OFF, Memory
from p2pavg.matchmaking.messages import Declined, Joined
from p2pavg.matchmaking.rules import Matchmaking
from p2pavg.matchmaking.timing import DUE_SECONDS, PUT_OFF_SECONDS
from tests.unit.matchmaking.bus import EPOCH, MATCH_TIMEOUT, Bus, candidate, settings

NEAR = PUT_OFF_SECONDS + ASK_AGAIN_SECONDS


def peers(kinds: str, *, deadline: float = EPOCH + MATCH_TIMEOUT) -> list[Candidate]:
    """Return candidates that are dialable (d), punchable (p) or relayed (r), in the order of their deadlines."""
    return [
        candidate(index, deadline + 0.01 * index, reach=Reach("dpr".index(kind)))
        for index, kind in enumerate(kinds)
    ]


def leading(
    me: Candidate, *, target: int, followers: Sequence[Candidate] = (), memory: Memory | None = None
) -> Matchmaking:
    """Return the rules of a leader that has these followers."""
    rules = Matchmaking(me, settings(target), EPOCH, memory)
    for follower in followers:
        assert answer(rules.asked(follower, EPOCH), follower) is None
    return rules


def answer(actions: Actions, to: Candidate) -> str | None:
    """Return the reason for which a candidate was declined, or ``None`` if it has joined."""
    [message] = [a.message for a in actions if isinstance(a, Send) and a.peer_id == to.peer_id][:1]
    assert isinstance(message, Joined | Declined)
    return message.reason if isinstance(message, Declined) else None


@pytest.mark.parametrize(
    ("members", "ready", "asking", "target", "reason"),
    [
        # Punchable candidates fill the group, and a relayed one would exchange with them through a relay.
        ("d", "pp", "r", 3, WAITS_FOR_DIRECT),
        ("p", "pp", "r", 3, WAITS_FOR_DIRECT),
        ("dp", "d", "r", 3, WAITS_FOR_DIRECT),
        # All pairs of a relayed member with members that can be dialled are direct.
        ("d", "dd", "r", 3, None),
        # A second relayed member has one relayed pair.
        ("dr", "dd", "r", 4, WAITS_FOR_DIRECT),
        # There is room for all that are ready.
        ("d", "pp", "r", 4, None),
        ("p", "p", "r", 3, None),
        # A punchable candidate suits a group with a relayed member no better than another relayed one.
        ("dr", "pp", "r", 4, None),
        # Earlier candidates lead groups of their own, and come to no later leader.
        ("p", "dd", "r", 3, None),
        # Relayed candidates among each other wait for no other.
        ("r", "rr", "r", 3, None),
        ("d", "rr", "r", 3, None),
        # The third peer that can be dialled leads the relayed ones that this group has no place for.
        ("dd", "ppr", "d", 4, WAITS_FOR_RELAYED),
        ("dd", "rrr", "d", 4, WAITS_FOR_RELAYED),
        ("dd", "pr", "d", 5, None),
        ("dd", "ppp", "d", 4, None),
        ("d", "rrr", "d", 4, None),
        # Punchable candidates are never put off.
        ("dr", "ddd", "p", 4, None),
    ],
)
def test_places_are_kept_for_better_candidates(
    members: str, ready: str, asking: str, target: int, reason: str | None
) -> None:
    me, *others = peers(members + ready + asking)
    followers, found, candidate_ = others[: len(members) - 1], others[len(members) - 1 : -1], others[-1]
    rules = leading(me, target=target, followers=followers)
    rules.discovered([*found, candidate_], EPOCH)
    assert answer(rules.asked(candidate_, EPOCH), candidate_) == reason


class TestNoCandidateStarves:
    me, better, also, relayed = peers("dppr")

    def ready(self, memory: Memory | None = None) -> Matchmaking:
        rules = leading(self.me, target=3, memory=memory)
        rules.discovered([self.better, self.also, self.relayed], EPOCH)
        return rules

    def test_it_is_put_off_for_a_short_time_only(self) -> None:
        rules = self.ready()
        assert answer(rules.asked(self.relayed, EPOCH), self.relayed) == WAITS_FOR_DIRECT
        just_before = EPOCH + PUT_OFF_SECONDS - 0.01
        assert answer(rules.asked(self.relayed, just_before), self.relayed) == WAITS_FOR_DIRECT
        assert answer(rules.asked(self.relayed, EPOCH + PUT_OFF_SECONDS), self.relayed) is None
        assert PUT_OFF_SECONDS + ASK_AGAIN_SECONDS < DUE_SECONDS

    def test_it_is_not_put_off_in_two_attempts_without_a_round_between_them(self) -> None:
        memory = Memory()
        first = self.ready(memory)
        assert answer(first.asked(self.relayed, EPOCH), self.relayed) == WAITS_FOR_DIRECT
        self.me, *_ = peers("d", deadline=EPOCH + MATCH_TIMEOUT - 1.0)
        assert answer(self.ready(memory).asked(self.relayed, EPOCH), self.relayed) is None
        *_, before = peers("dppr", deadline=EPOCH)
        memory.finished_with([before])
        assert answer(self.ready(memory).asked(self.relayed, EPOCH), self.relayed) == WAITS_FOR_DIRECT

    def test_it_is_not_put_off_near_the_deadline(self) -> None:
        for left, reason in ((NEAR + 0.1, WAITS_FOR_DIRECT), (NEAR - 0.1, None), (-1.0, None)):
            self.me, *_ = peers("d", deadline=EPOCH + left)
            assert answer(self.ready().asked(self.relayed, EPOCH), self.relayed) == reason

    def test_candidates_that_are_gone_keep_no_places(self) -> None:
        rules = self.ready()
        rules.not_nudged(self.better.peer_id, "refused", EPOCH)
        assert answer(rules.asked(self.relayed, EPOCH), self.relayed) is None

    def test_candidates_of_another_state_and_auxiliaries_keep_no_places(self) -> None:
        rules = leading(self.me, target=3)
        helping = candidate(1, EPOCH + 3000.0, auxiliary=True)
        other = candidate(2, EPOCH + 20.0, state=b"other")
        rules.discovered([helping, other, self.relayed], EPOCH)
        assert answer(rules.asked(self.relayed, EPOCH), self.relayed) is None

    def test_a_relayed_auxiliary_is_taken_at_once(self) -> None:
        rules = self.ready()
        helping = candidate(5, EPOCH + 3000.0, auxiliary=True, reach=Reach.RELAYED)
        assert answer(rules.asked(helping, EPOCH), helping) is None

    def test_the_memory_of_those_put_off_is_bounded(self) -> None:
        memory = Memory()
        assert all(memory.may_put_off(f"peer {index}", EPOCH, EPOCH) for index in range(MAX_PUT_OFF + 10))
        assert len(memory._put_off) == MAX_PUT_OFF

    def test_a_clock_that_is_set_back_puts_no_candidate_off_for_longer(self) -> None:
        memory = Memory()
        assert memory.may_put_off("peer", EPOCH, EPOCH)
        assert not memory.may_put_off("peer", EPOCH, EPOCH - 3600.0)


def test_relayed_peers_among_themselves_form_a_group_at_once() -> None:
    bus = Bus()
    for index in range(4):
        bus.announce(index, reach=Reach.RELAYED)
        bus.advance(0.001)
    for attempt in list(bus.attempts.values()):
        bus.discover(attempt)
    bus.settle()
    assert all(attempt.formed is not None for attempt in bus.attempts.values())


def test_a_peer_that_is_always_one_too_many_is_in_every_second_round() -> None:
    """Seven of eight peers exchange directly, and groups have seven members. The relayed peer asks first each time."""
    bus, rounds = Bus(), list[bool]()
    for _ in range(8):
        for index, kind in enumerate("dppppppr"):
            bus.announce(index, target=7, reach=Reach("dpr".index(kind)))
            bus.advance(0.001)
        for attempt in list(bus.attempts.values()):
            if attempt.me.reach is Reach.DIALABLE:
                bus.discover(attempt)
        for _ in range(3):
            for attempt in reversed(list(bus.attempts.values())):
                bus.discover(attempt)
            bus.run(1.0)
        last = list(bus.attempts.values())[-1]
        assert last.me.reach is Reach.RELAYED
        rounds.append(last.formed is not None)
        for attempt in list(bus.attempts.values()):
            if attempt.formed is not None:
                others = [one for one in attempt.formed.members if one.peer_id != attempt.me.peer_id]
                attempt.rules.state.memory.finished_with(others)
            bus.crash(attempt)
    assert rounds == [False, True] * 4
