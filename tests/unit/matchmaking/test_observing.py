"""The rules for peers of different states, and for groups in which some members only observe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2pavg.base.limits import MAX_GROUP_SIZE
from p2pavg.group.candidate import Candidate
from p2pavg.group.participation import ByCapability, Participation, RandomFraction
from p2pavg.matchmaking.admission import UNEXPECTED_OBSERVERS
from p2pavg.matchmaking.attempt_state import AttemptPhase
from p2pavg.matchmaking.messages import (
    Accept,
    Declined,
    GroupProposal,
    Joined,
    JoinRequest,
    LeaderStatus,
    Nudge,
    Refuse,
)
from p2pavg.matchmaking.own_group import OwnGroup
from p2pavg.matchmaking.rules import Matchmaking
from p2pavg.matchmaking.timing import DUE_SECONDS
from tests.unit.matchmaking.bus import (
    EPOCH,
    MATCH_TIMEOUT,
    SIGNERS,
    Attempt,
    Bus,
    candidate,
    following,
    opened,
    roster_of,
    sent,
    settings,
)


def ready(bus: Bus, index: int, **how: Any) -> Attempt:
    """Announce one more peer, which sees the peers that were ready before it."""
    bus.advance(0.01)
    attempt = bus.announce(index, **how)
    bus.discover(attempt)
    bus.settle()
    return attempt


def matchmaking(
    me: Candidate, *known: Candidate, target: int = 4, rule: Participation | None = None
) -> Matchmaking:
    rules = Matchmaking(me, settings(target, rule=rule), EPOCH)
    rules.discovered(known, EPOCH)
    return rules


class TestStates:
    def test_a_candidate_of_another_state_is_declined(self) -> None:
        rules = matchmaking(candidate(0, EPOCH + 1, state=b"7"))
        for state in (b"8", b"", b"7\0"):
            [answer] = sent(rules.asked(candidate(1, EPOCH + 2, state=state), EPOCH))
            assert isinstance(answer, Declined)
            assert "another state" in answer.reason
        assert not rules.group.followers
        assert Joined(rules.state.me) in sent(rules.asked(candidate(1, EPOCH + 2, state=b"7"), EPOCH))

    def test_an_earlier_candidate_of_another_state_is_not_asked(self) -> None:
        rules = Matchmaking(candidate(1, EPOCH + 2, state=b"7"), settings(), EPOCH)
        same = candidate(2, EPOCH + 1.5, state=b"7")
        other = candidate(0, EPOCH + 1, state=b"8")
        assert opened(rules.discovered([other], EPOCH)) == []
        assert rules.state.phase is AttemptPhase.LEADING
        assert opened(rules.discovered([same], EPOCH)) == [(JoinRequest, same)]

    def test_a_later_candidate_of_another_state_is_not_nudged(self) -> None:
        rules = Matchmaking(candidate(1, EPOCH + 2, state=b"7"), settings(), EPOCH)
        other, same = candidate(0, EPOCH + 9, state=b"8"), candidate(2, EPOCH + 9, state=b"7")
        assert opened(rules.discovered([other, same], EPOCH)) == [(Nudge, same)]

    def test_a_candidate_of_another_state_is_not_ready(self) -> None:
        rules = matchmaking(candidate(1, EPOCH + 2, state=b"7"), candidate(0, EPOCH + 1, state=b"8"))
        assert rules.ready_peers == 1
        rules.discovered([candidate(2, EPOCH + 9, state=b"7")], EPOCH)
        assert rules.ready_peers == 2

    def test_an_asked_peer_that_answers_with_another_state_is_left(self) -> None:
        known, newer = candidate(0, EPOCH + 1, state=b"7"), candidate(0, EPOCH + 3, state=b"8")
        rules = matchmaking(candidate(1, EPOCH + 9, state=b"7"), known)
        rules.told_by_leader(known.peer_id, Joined(newer), EPOCH)
        assert rules.state.phase is AttemptPhase.LEADING

    @pytest.mark.parametrize("state", [b"", b"7", b"\xff" * 32])
    def test_an_auxiliary_helps_with_any_state(self, state: bytes) -> None:
        bus = Bus()
        helper = bus.announce(9, auxiliary=True, target=2)
        attempts = [ready(bus, index, target=2, state=state) for index in range(2)]
        assert helper.formed is not None
        assert [member.auxiliary for member in helper.formed.members] == [False, False, True]
        assert all(attempt.formed == helper.formed for attempt in attempts)


class TestObservers:
    def test_an_auxiliary_takes_the_leaders_choice_of_observers(self) -> None:
        """It knows only the text of the peers' rule."""
        bus = Bus()
        helper = bus.announce(9, auxiliary=True, target=2)
        rule = RandomFraction(0.5)
        attempts = [ready(bus, index, target=2, rule=rule) for index in range(2)]
        assert helper.formed is not None
        assert len(helper.formed.observers) == 1
        assert all(attempt.formed == helper.formed for attempt in attempts)

    @pytest.mark.parametrize(
        ("rule", "weights", "observing", "accepted"),
        [
            (None, (1.0, 1.0, 1.0), {1}, False),
            (None, (1.0, 1.0, 0.0), {1, 2}, False),
            (ByCapability(tags=("gpu",)), (1.0, 1.0, 1.0), set(), False),
            (ByCapability(tags=("gpu",)), (1.0, 1.0, 1.0), {0, 1}, False),
            (ByCapability(tags=("gpu",)), (1.0, 1.0, 1.0), {2}, True),
            (ByCapability(), (1.0, 1.0, 1.0), {2}, False),
        ],
        ids=str,
    )
    def test_a_roster_is_accepted_only_if_its_observers_follow_from_the_rule(
        self, rule: Participation | None, weights: tuple[float, ...], observing: set[int], accepted: bool
    ) -> None:
        """So a leader can neither waste a member's work nor count a contribution that the rule excludes."""
        tags = [("gpu",), ("gpu",), ()]
        members = tuple(
            candidate(index, EPOCH + 1 + index, weight=weights[index], tags=tags[index]) for index in range(3)
        )
        leader, me, _ = members
        rules = following(leader, me, rule=rule)
        roster = roster_of(*members, observers=[members[index].peer_id for index in observing])
        [answer] = sent(rules.told_by_leader(leader.peer_id, GroupProposal(roster), EPOCH))
        if accepted:
            assert answer == Accept(roster.group_id)
        else:
            assert isinstance(answer, Refuse)
            assert "observers do not follow" in answer.reason
            assert rules.state.phase is AttemptPhase.LEADING


class TestNoContributor:
    def test_the_report_gives_the_reason_and_a_contributor_completes_the_group(self) -> None:
        bus = Bus()
        attempts = [ready(bus, index, weight=0.0) for index in range(3)]
        bus.run(MATCH_TIMEOUT)
        assert all(attempt.active for attempt in attempts)
        [(_, report)] = attempts[0].reports
        assert report.reason == "3 joined, and none of them has anything to contribute"
        assert report.ready_peers == 3
        attempts.append(ready(bus, 3))
        assert all(attempt.formed == attempts[0].formed for attempt in attempts)
        assert attempts[0].formed is not None
        assert attempts[0].formed.contributors == (attempts[3].me,)

    def test_a_contributor_that_joins_after_the_deadline_is_waited_for_no_longer(self) -> None:
        """The group is not full, and its deadline is over. It goes ahead at its next timer."""
        bus = Bus()
        attempts = [ready(bus, index, weight=0.0) for index in range(2)]
        bus.run(MATCH_TIMEOUT + 1.0)
        attempts.append(ready(bus, 2))
        bus.run(MATCH_TIMEOUT)
        assert all(attempt.formed for attempt in attempts)

    def test_a_full_group_of_observers_has_room_for_a_contributor(self) -> None:
        bus = Bus()
        attempts = [ready(bus, index, target=2, weight=0.0) for index in range(2)]
        attempts.append(ready(bus, 2, target=2))
        assert all(attempt.formed for attempt in attempts), "at once"

    def test_a_full_group_of_observers_has_no_room_for_another_observer(self) -> None:
        """Not even with a weight: a group that grew without end could not be proposed."""
        bus = Bus()
        rule = ByCapability(tags=("gpu",))
        leader, *_ = [ready(bus, index, target=2, rule=rule) for index in range(6)]
        assert leader.rules.group.holders == 2

    def test_a_leader_whose_only_contributor_leaves_while_it_proposes_gathers_again(self) -> None:
        leader, observer = (candidate(index, EPOCH + 1 + index, weight=0.0) for index in range(2))
        only = candidate(2, EPOCH + 3)
        rules = matchmaking(leader, target=3)
        rules.asked(observer, EPOCH)
        assert any(isinstance(message, GroupProposal) for message in sent(rules.asked(only, EPOCH)))
        rules.lost(only.peer_id, "gone", EPOCH + 1)
        assert rules.state.phase is AttemptPhase.LEADING
        assert rules.state.roster is None


class TestExpectedContributors:
    """Groups that know how many contributors they wait for: those of an optimizer whose run takes in newcomers."""

    def test_an_unexpected_observer_takes_no_contributors_place(self) -> None:
        bus = Bus()
        attempts = [ready(bus, index, target=3, contributors=3) for index in range(2)]
        attempts.append(ready(bus, 2, target=3, contributors=3, weight=0.0))
        assert all(attempt.active for attempt in attempts)
        attempts.append(ready(bus, 3, target=3, contributors=3))
        assert all(attempt.formed for attempt in attempts), "at once"
        assert attempts[0].formed is not None
        assert len(attempts[0].formed.contributors) == 3

    def test_an_expected_observer_completes_the_group(self) -> None:
        bus = Bus()
        attempts = [ready(bus, index, target=3, contributors=2) for index in range(2)]
        assert all(attempt.active for attempt in attempts)
        attempts.append(ready(bus, 2, target=3, contributors=2, weight=0.0))
        assert all(attempt.formed for attempt in attempts), "at once"

    def test_no_observer_is_needed_in_place_of_a_contributor(self) -> None:
        bus = Bus()
        attempts = [ready(bus, index, target=3, contributors=2) for index in range(3)]
        assert all(attempt.formed for attempt in attempts), "at once"

    def test_unexpected_observers_are_few(self) -> None:
        """Strangers could send any number, and each of them takes the bytes of one average from the group."""
        bus = Bus()
        leader = ready(bus, 0, target=3, contributors=2)
        for index in range(1, 10):
            ready(bus, index, target=3, contributors=2, weight=0.0)
        assert leader.rules.group.holders == 1 + 1 + UNEXPECTED_OBSERVERS
        assert ready(bus, 10, target=3, contributors=2).formed == leader.formed

    def test_observers_leave_room_for_all_contributors_of_the_largest_group(self) -> None:
        bus = Bus()
        leader = ready(bus, 0, target=64, contributors=63)
        ready(bus, 1, target=64, contributors=63, weight=0.0)
        ready(bus, 2, target=64, contributors=63, weight=0.0)
        assert leader.rules.group.holders == 2

    def test_at_the_deadline_the_group_goes_ahead_without_the_expected_contributors(self) -> None:
        bus = Bus()
        attempts = [ready(bus, index, target=3, contributors=3) for index in range(2)]
        bus.run(MATCH_TIMEOUT)
        assert all(attempt.formed for attempt in attempts)

    def test_a_leader_that_lacks_contributors_is_not_left(self) -> None:
        """It is not due: as many peers as the target are ready, but too few of them contribute."""
        leader, me, observer = (candidate(i, EPOCH + 60 + i, weight=float(i < 2)) for i in range(3))
        for contributors, leaves in ((2, True), (3, False)):
            rules = Matchmaking(me, settings(3, contributors=contributors), EPOCH)
            rules.discovered([leader, observer], EPOCH)
            rules.told_by_leader(leader.peer_id, Joined(leader), EPOCH)
            rules.discovered([observer], EPOCH + DUE_SECONDS - 0.1)
            rules.told_by_leader(leader.peer_id, LeaderStatus(2, False), EPOCH + DUE_SECONDS)
            rules.tick(EPOCH + DUE_SECONDS + 0.1)
            assert (rules.state.phase is AttemptPhase.LEADING) == leaves


class TestTarget:
    def test_the_leaders_target_counts(self) -> None:
        """The leader's target is two, so it does not wait for four members as the other peer would."""
        bus = Bus()
        first, second = ready(bus, 0, target=2), ready(bus, 1, target=4)
        assert first.formed is not None
        assert first.formed == second.formed
        assert bus.now < EPOCH + 1


class TestExpectedMembers:
    """Groups that know with whom they are to be: a newcomer that contributes must not displace one of them."""

    def test_an_unexpected_contributor_takes_no_expected_members_place(self) -> None:
        bus = Bus()
        ids = [signer.peer_id for signer in SIGNERS]
        leader = ready(bus, 0, target=2, expected=ids[1:2])
        newcomer = ready(bus, 2, target=3, expected=ids[:2])
        assert leader.active
        expected = ready(bus, 1, target=2, expected=ids[:1])
        assert leader.formed is not None, "at once"
        assert [member.peer_id for member in leader.formed.members] == [ids[0], ids[2], ids[1]]
        assert leader.formed == newcomer.formed == expected.formed

    def test_places_that_the_expected_members_leave_are_open_to_all(self) -> None:
        bus = Bus()
        ids = [signer.peer_id for signer in SIGNERS]
        attempts = [ready(bus, index, target=3, expected=ids[1:2]) for index in range(2)]
        attempts.append(ready(bus, 5, target=3))
        assert all(attempt.formed for attempt in attempts), "at once"

    def test_without_the_expected_members_the_group_goes_ahead_at_the_deadline(self) -> None:
        bus = Bus()
        leader = ready(bus, 0, target=2, expected=[SIGNERS[1].peer_id])
        newcomer = ready(bus, 2, target=2)
        assert leader.active
        bus.run(MATCH_TIMEOUT)
        assert leader.formed is not None
        assert leader.formed == newcomer.formed

    def test_strangers_leave_room_for_all_expected_members_of_the_largest_group(self) -> None:
        bus = Bus()
        expected = [SIGNERS[index].peer_id for index in range(10)] + [f"peer {i}" for i in range(46)]
        leader = ready(bus, 0, target=1 + len(expected), expected=expected)
        for index in range(10, 30):
            ready(bus, index, target=64)
        strangers = MAX_GROUP_SIZE - 1 - len(expected)
        assert len(leader.rules.group.followers) == strangers == leader.rules.group.extra
        for index in range(1, 10):
            ready(bus, index, target=64)
        assert len(leader.rules.group.followers) == strangers + 9

    def test_the_largest_group_is_complete_whoever_is_missing(self) -> None:
        state = matchmaking(candidate(0, EPOCH + 1)).state
        state.settings = replace(state.settings, target=2, expected=frozenset(["somebody"]))
        group = OwnGroup(state)
        group.followers = {f"peer {index}": candidate(1, EPOCH + 2) for index in range(MAX_GROUP_SIZE - 1)}
        assert group.is_full
        group.followers.popitem()
        assert not group.is_full
