"""The rules one by one, as conversations of two to five peers."""

from __future__ import annotations

import dataclasses

import pytest

from p2pavg.base.limits import (
    ASK_AGAIN_SECONDS,
    GLANCE_SECONDS,
    HOLD_OFF_SECONDS,
    REPLY_SECONDS,
    ROUND_TRIPS_SECONDS,
)
from p2pavg.group.candidate import Candidate
from p2pavg.group.reach import Reach
from p2pavg.group.roster import Roster
from p2pavg.matchmaking.actions import Actions, Close, Expect, Formed, Report, Send
from p2pavg.matchmaking.attempt_state import AttemptPhase
from p2pavg.matchmaking.messages import (
    Accept,
    Declined,
    GroupCommit,
    GroupProposal,
    Joined,
    JoinRequest,
    LeaderStatus,
    Nudge,
    Refuse,
)
from p2pavg.matchmaking.rules import Matchmaking
from p2pavg.matchmaking.timing import LEADER_SILENCE_SECONDS, PROPOSAL_ANSWER_SECONDS, RECORD_TTL_SECONDS
from tests.unit.matchmaking.bus import (
    EPOCH,
    MATCH_TIMEOUT,
    Attempt,
    Bus,
    candidate,
    following,
    opened,
    roster_of,
    row,
    sent,
    settings,
)


def announce_all(bus: Bus, *indices: int, target: int = 4, minimum: int = 2) -> list[Attempt]:
    """Announce peers one after another; each sees the peers before it."""
    attempts = []
    for index in indices:
        bus.advance(0.01)
        attempts.append(bus.announce(index, target=target, minimum=minimum))
        bus.discover(attempts[-1])
        bus.settle()
    return attempts


def matchmaking(me: Candidate, *known: Candidate, target: int = 4, minimum: int = 2) -> Matchmaking:
    rules = Matchmaking(me, settings(target, minimum), EPOCH)
    rules.discovered(known, EPOCH)
    return rules


def declined(actions: Actions) -> Declined:
    [answer] = [message for message in sent(actions) if isinstance(message, Declined)]
    return answer


class TestForming:
    def test_a_complete_group_forms_without_waiting_and_the_first_to_announce_leads(self) -> None:
        bus = Bus()
        attempts = announce_all(bus, 3, 2, 1, 0)
        assert len({attempt.formed.group_id for attempt in attempts if attempt.formed}) == 1
        assert bus.now < EPOCH + 1
        assert attempts[0].formed is not None
        assert attempts[0].formed.members[0] == attempts[0].me

    def test_two_peers_that_announced_at_once_meet_by_a_nudge(self) -> None:
        bus = Bus()
        first = bus.announce(0, target=2)
        bus.advance(0.01)
        second = bus.announce(1, target=2)
        bus.discover(first)  # only the earlier peer sees the other one
        bus.settle()
        assert first.formed is not None
        assert second.formed is not None

    def test_a_peer_that_asks_an_earlier_candidate_nudges_later_ones_only_if_it_is_declined(self) -> None:
        early, me, late = row(3)
        rules = Matchmaking(me, settings(), EPOCH)
        assert opened(rules.discovered([early, late], EPOCH)) == [(JoinRequest, early)]
        answer = rules.told_by_leader(early.peer_id, Declined("full"), EPOCH)
        assert (Nudge, late) in opened(answer)

    def test_a_peer_whose_question_is_lost_nudges_later_candidates(self) -> None:
        early, me, late = row(3)
        rules = Matchmaking(me, settings(), EPOCH)
        rules.discovered([early, late], EPOCH)
        assert (Nudge, late) in opened(rules.lost_leader(early.peer_id, "refused", EPOCH, reachable=False))

    def test_peers_that_begin_at_once_nudge_as_often_as_there_are_peers(self) -> None:
        bus, sent = Bus(), 0
        attempts = [bus.announce(index, target=8) for index in range(8)]
        for attempt in attempts:
            bus.discover(attempt)
            sent += len(bus.nudges)
            bus.settle()
        assert len({attempt.formed.group_id for attempt in attempts if attempt.formed}) == 1
        assert sent <= len(attempts)

    def test_a_leader_that_finds_an_earlier_one_brings_its_followers(self) -> None:
        bus = Bus()
        early = bus.announce(0)
        bus.published.clear()  # no peer can find it for now
        late = announce_all(bus, 1, 2, 3)
        assert late[0].rules.group.followers
        bus.published[early.me.peer_id] = early.me
        bus.discover(late[0])
        bus.settle()
        assert early.formed is not None
        assert len(early.formed.members) == 4

    def test_streams_are_expected_before_the_roster_is_accepted(self) -> None:
        leader, me = row(2)
        rules = following(leader, me)
        roster = roster_of(leader, me)
        actions = rules.told_by_leader(leader.peer_id, GroupProposal(roster), EPOCH)
        assert [type(action) for action in actions] == [Expect, Send]
        assert actions[0] == Expect(roster.group_id, "others may hear of the commit first")


class TestDeadlines:
    def test_a_dead_candidate_does_not_count_as_ready(self) -> None:
        bus = Bus()
        dead = bus.announce(0)
        bus.crash(dead)
        [lone] = announce_all(bus, 1)
        bus.advance(MATCH_TIMEOUT)
        assert lone.gave_up is not None

    def test_followers_hear_from_their_leader_while_they_wait(self) -> None:
        bus = Bus()
        attempts = announce_all(bus, 0, 1, minimum=4)
        for _ in range(10):
            bus.run(2.0)
            assert attempts[1].rules.state.phase is AttemptPhase.FOLLOWING

    def test_a_silent_leader_is_left(self) -> None:
        leader, me = candidate(0, EPOCH + 5), candidate(1, EPOCH + 20)
        rules = following(leader, me)
        actions = rules.tick(EPOCH + LEADER_SILENCE_SECONDS)
        assert rules.state.phase is AttemptPhase.LEADING
        assert Close(leader.peer_id, "silent for 6 s", upward=True) in actions
        assert rules.ready_peers == 1

    @pytest.mark.parametrize(("decided", "seconds"), [(False, [11, 22]), (True, [10, 20])])
    def test_a_follower_reports_at_its_deadline_and_after_each_match_timeout(
        self, decided: bool, seconds: list[int]
    ) -> None:
        """A second later, if its leader has not said that it is over: that word may be on its way."""
        leader, me = candidate(0, EPOCH + 100), candidate(1, EPOCH + MATCH_TIMEOUT, reach=Reach.PUNCHABLE)
        rules, reported = following(leader, me), []
        for second in range(1, 26):
            actions = rules.told_by_leader(leader.peer_id, LeaderStatus(2, decided), EPOCH + second)
            reported += [second for action in actions if isinstance(action, Report)]
        assert reported == seconds

    def test_an_unreachable_candidate_is_asked_again_later(self) -> None:
        other, me = candidate(0, EPOCH + 50), candidate(1, EPOCH + 60)
        rules = matchmaking(me, other)
        rules.lost_leader(other.peer_id, "no answer", EPOCH, reachable=False)
        assert rules.state.leader is None
        rules.tick(EPOCH + HOLD_OFF_SECONDS)
        assert rules.state.phase is AttemptPhase.ASKING


class TestAsking:
    def test_an_earlier_candidate_is_declined_and_asked_in_turn(self) -> None:
        early, me = candidate(0, EPOCH + 1), candidate(1, EPOCH + 2)
        rules = matchmaking(me)
        actions = rules.asked(early, EPOCH)
        assert declined(actions).over
        assert rules.state.leader == early

    def test_a_follower_names_its_leader(self) -> None:
        leader, me, other = (candidate(index, EPOCH + index) for index in (1, 2, 3))
        rules = following(leader, me)
        assert declined(rules.asked(other, EPOCH)).leader == leader
        assert not rules.group.followers

    def test_a_full_group_that_waits_for_an_auxiliary_takes_no_other_contributor(self) -> None:
        bus = Bus()
        helper = bus.announce(9, auxiliary=True, target=2)
        leader = bus.announce(0, target=2)
        bus.discover(leader)
        bus.nudges.clear()
        second = candidate(1, bus.now + 20)
        leader.rules.asked(second, bus.now)
        assert leader.rules.state.phase is AttemptPhase.LEADING, "it waits for the auxiliary"
        third = candidate(2, bus.now + 20)
        assert declined(leader.rules.asked(third, bus.now)).taken == (second.peer_id,)
        assert helper.active

    def test_a_candidate_with_another_codec_is_declined(self) -> None:
        rules = matchmaking(candidate(0, EPOCH + 1))
        assert "int8:256" in declined(rules.asked(candidate(1, EPOCH + 2, codec="int8:256"), EPOCH)).reason

    def test_a_candidate_with_another_codec_is_neither_asked_nor_ready(self) -> None:
        other = candidate(0, EPOCH + 1, codec="int8:256")
        rules = matchmaking(candidate(1, EPOCH + 2), other)
        assert rules.state.phase is AttemptPhase.LEADING
        assert rules.ready_peers == 1

    def test_an_expired_record_is_declined(self) -> None:
        rules = matchmaking(candidate(0, EPOCH + 1))
        assert "expired" in declined(rules.asked(candidate(1, EPOCH - 3601), EPOCH)).reason

    @pytest.mark.parametrize("index", [0, 2], ids=["earlier", "later"])
    def test_a_candidate_of_another_place_is_declined_and_never_asked(self, index: int) -> None:
        """A roster of both raised an error that ended the program."""
        me, other = (
            candidate(1, EPOCH + 2),
            candidate(index, EPOCH + 1 + index, key=b"another place".ljust(32)),
        )
        rules = matchmaking(me, target=3)
        assert declined(rules.asked(other, EPOCH))
        rules.nudged(other, EPOCH)
        assert (rules.state.phase, rules.ready_peers) == (AttemptPhase.LEADING, 1)
        rules.tick(EPOCH + 2)

    def test_a_candidate_whose_record_was_read_on_a_level_is_asked(self) -> None:
        """Records of a level have its key, and join requests that of the common place."""
        on_a_level = candidate(0, EPOCH + 1, key=b"a place on a level".ljust(32))
        assert matchmaking(candidate(1, EPOCH + 2), on_a_level).state.phase is AttemptPhase.ASKING

    def test_a_peer_does_not_ask_itself_when_another_one_names_it_as_a_leader(self) -> None:
        before, other, me = candidate(1, EPOCH + 1), candidate(0, EPOCH + 2), candidate(1, EPOCH + 9)
        rules = matchmaking(me, other)
        actions = rules.told_by_leader(other.peer_id, Declined("follows another leader", before), EPOCH)
        assert opened(actions) == []

    def test_a_peer_that_declines_and_names_itself_is_not_asked_again_at_once(self) -> None:
        early, me, late = row(3)
        rules = Matchmaking(me, settings(), EPOCH)
        rules.discovered([early, late], EPOCH)
        answer = opened(rules.told_by_leader(early.peer_id, Declined("follows another leader", early), EPOCH))
        assert (JoinRequest, early) not in answer
        assert (Nudge, late) in answer

    @pytest.mark.parametrize("seconds", [-8000.0, 8000.0])
    def test_a_candidate_with_an_implausible_deadline_is_not_followed(self, seconds: float) -> None:
        other = dataclasses.replace(candidate(0, EPOCH), deadline=EPOCH + seconds)
        assert matchmaking(candidate(1, EPOCH + 2), other).state.phase is AttemptPhase.LEADING

    def test_an_attempt_that_is_over_is_not_asked_again_but_the_next_one_is(self) -> None:
        other, me = candidate(0, EPOCH + 1), candidate(1, EPOCH + 9)
        rules = matchmaking(me, other)
        rules.told_by_leader(other.peer_id, Declined("over", over=True), EPOCH)
        rules.discovered([other], EPOCH + 5)
        assert rules.state.leader is None
        rules.discovered([candidate(0, EPOCH + 8)], EPOCH + 5)
        assert rules.state.phase is AttemptPhase.ASKING

    def test_a_declined_peer_does_not_ask_the_members_that_the_answer_names(self) -> None:
        first, second, third, me = row(4)
        rules = matchmaking(me, first, second, third)
        rules.told_by_leader(first.peer_id, Declined("full", taken=(second.peer_id,)), EPOCH)
        assert rules.state.leader == third

    @pytest.mark.parametrize("committed", [False, True])
    def test_a_member_names_the_others_once_their_roster_is_agreed(self, committed: bool) -> None:
        leader, me, third, stranger = row(4)
        rules = following(leader, me)
        roster = roster_of(leader, me, third)
        assert declined(rules.asked(stranger, EPOCH)).leader == leader
        rules.told_by_leader(leader.peer_id, GroupProposal(roster), EPOCH)
        if committed:
            rules.told_by_leader(leader.peer_id, GroupCommit(roster.group_id), EPOCH)
        answer = declined(rules.asked(stranger, EPOCH))
        assert answer.taken == (leader.peer_id, third.peer_id)
        assert answer.leader is None, "it takes nobody now"
        assert answer.over == committed

    def test_a_banned_peer_is_neither_asked_nor_admitted(self) -> None:
        early, late, me = candidate(0, EPOCH + 1), candidate(2, EPOCH + 9), candidate(1, EPOCH + 2)
        rules = matchmaking(me)
        rules.state.peers.ban(early.peer_id, "it lied")
        rules.state.peers.ban(late.peer_id, "it lied")
        rules.discovered([early], EPOCH)
        assert rules.state.phase is AttemptPhase.LEADING
        assert declined(rules.asked(late, EPOCH)).reason == "it lied"

    def test_the_asked_peer_may_be_in_a_newer_attempt(self) -> None:
        """Its answer names that attempt. Otherwise its roster, which names it too, would be refused."""
        known, newer, me = candidate(0, EPOCH + 1), candidate(0, EPOCH + 3), candidate(1, EPOCH + 9)
        rules = matchmaking(me, known)
        rules.told_by_leader(known.peer_id, Joined(newer), EPOCH)
        roster = roster_of(newer, me)
        actions = rules.told_by_leader(newer.peer_id, GroupProposal(roster), EPOCH)
        assert Accept(roster.group_id) in sent(actions)

    def test_the_asked_peer_may_not_be_in_a_later_attempt_than_this_peer(self) -> None:
        known, later, me = candidate(0, EPOCH + 1), candidate(0, EPOCH + 10), candidate(1, EPOCH + 9)
        rules = matchmaking(me, known)
        rules.told_by_leader(known.peer_id, Joined(later), EPOCH)
        assert rules.state.phase is AttemptPhase.LEADING

    def test_two_peers_that_ask_each_other_at_once_still_meet(self) -> None:
        """One peer asks an attempt that is over. When it is declined, the stream in the other direction must stay."""
        bus = Bus()
        old = bus.announce(1, target=2)
        bus.advance(1.0)
        first = bus.announce(0, target=2)
        bus.discover(first)  # asks 1, whose attempt ends meanwhile
        bus.advance(1.0)
        second = bus.announce(1, target=2)
        bus.discover(second)  # asks 0
        assert bus.links[0].asked is old
        bus.links[0].asked = second  # the same peer answers in its new attempt
        bus.settle()
        assert first.formed is not None
        assert second.formed is not None


class TestStandingInTheWay:
    """A silent or lying peer must not keep the others from forming a group."""

    @pytest.mark.parametrize("over", [False, True], ids=["declines", "says that its attempt is over"])
    def test_a_peers_statements_about_others_are_believed_briefly(self, over: bool) -> None:
        liar, honest, me = row(3, 50)
        rules = matchmaking(me, liar, honest)
        rules.told_by_leader(liar.peer_id, Declined("no", taken=(honest.peer_id,), over=over), EPOCH)
        rules.tick(EPOCH + ASK_AGAIN_SECONDS)
        assert rules.state.leader == honest, "and not the liar first again"

    def test_names_of_a_peer_whose_attempts_end_again_and_again_count_once(self) -> None:
        """It begins one attempt after the other, and says each time that the honest one was in its group."""
        liar, honest, me = candidate(0, EPOCH + 50), candidate(1, EPOCH + 55), candidate(2, EPOCH + 60)
        rules = matchmaking(me, liar, honest)
        over = Declined("over", taken=(honest.peer_id,), over=True)
        rules.told_by_leader(liar.peer_id, over, EPOCH)
        rules.nudged(candidate(0, EPOCH + 51), EPOCH + 0.9)
        assert rules.state.leader == candidate(0, EPOCH + 51)
        rules.told_by_leader(liar.peer_id, over, EPOCH + ASK_AGAIN_SECONDS)
        rules.tick(EPOCH + ASK_AGAIN_SECONDS)
        assert rules.state.leader == honest

    def test_peers_that_do_not_answer_are_asked_last(self) -> None:
        silent, honest, me = row(3, 50)
        rules = matchmaking(me, silent)
        rules.lost_leader(silent.peer_id, "no answer", EPOCH, reachable=False)
        rules.tick(EPOCH + HOLD_OFF_SECONDS - 1)
        rules.lost_leader(silent.peer_id, "no answer", EPOCH, reachable=False)
        rules.discovered([silent, honest], EPOCH + HOLD_OFF_SECONDS + 1)
        assert rules.state.leader == honest

    def test_a_leader_that_forms_no_group_is_left(self) -> None:
        leader, me = candidate(0, EPOCH - 60), candidate(1, EPOCH + MATCH_TIMEOUT)
        rules = following(leader, me)
        now = EPOCH
        while rules.state.leader == leader and now < EPOCH + 1000:
            now += 1.0
            rules.told_by_leader(leader.peer_id, LeaderStatus(3, False), now)
            rules.tick(now)
        assert now <= EPOCH + 2 * MATCH_TIMEOUT + ROUND_TRIPS_SECONDS

    def test_a_follower_that_does_not_answer_a_roster_is_held_off_twice_as_long_each_time(self) -> None:
        leader, silent = candidate(0, EPOCH + 500), candidate(1, EPOCH + 600)
        rules = matchmaking(leader, target=2)
        now = EPOCH
        for times in range(3):
            rules.asked(silent, now)
            now = rules.wake_at()
            rules.tick(now)
            end = now + HOLD_OFF_SECONDS * 2**times
            assert "no answer" in declined(rules.asked(silent, end - 0.01)).reason
            now = end

    def test_a_slow_follower_whose_system_answers_is_waited_for_and_no_other_one_leaves(self) -> None:
        me, quick, slow = row(3, 500)
        leader, now = matchmaking(me, target=3), EPOCH
        for each in (quick, slow):
            leader.asked(each, now)
        roster = leader.state.roster
        assert roster is not None
        leader.told(quick.peer_id, Accept(roster.group_id), now)
        repeated: Actions = []
        while now < EPOCH + 7:
            now = leader.wake_at()
            repeated += leader.tick(now, answering=[slow.peer_id])
        # A status would withdraw the proposal, and silence of 6 s would make the quick one leave.
        assert sent(repeated) == 6 * [GroupProposal(roster)]
        assert Formed(roster, "all accepted") in leader.told(slow.peer_id, Accept(roster.group_id), now)

    @pytest.mark.parametrize(
        ("answers", "seconds"), [(False, PROPOSAL_ANSWER_SECONDS), (True, REPLY_SECONDS)]
    )
    def test_a_follower_that_only_seems_slow_is_dropped(self, answers: bool, seconds: float) -> None:
        leader, silent, now = (
            matchmaking(candidate(0, EPOCH + 500), target=2),
            candidate(1, EPOCH + 600),
            EPOCH,
        )
        leader.asked(silent, now)
        while leader.state.phase is AttemptPhase.PROPOSING:
            now = leader.wake_at()
            leader.tick(now, answering=[silent.peer_id] if answers else [])
        assert now == EPOCH + seconds
        assert "no answer" in declined(leader.asked(silent, now + HOLD_OFF_SECONDS - 0.01)).reason

    def test_a_second_slow_follower_gets_no_more_patience(self) -> None:
        me, *others = row(4, 5)
        leader, now = matchmaking(me, target=4), EPOCH
        for each in others:
            leader.asked(each, now)
        while now < EPOCH + REPLY_SECONDS:
            roster = leader.state.roster
            assert roster is not None
            for each in others[:2]:
                leader.told(each.peer_id, Accept(roster.group_id), now)
            now = leader.wake_at()
            leader.tick(now, answering=[each.peer_id for each in others])
        assert leader.group.followers.keys() == {each.peer_id for each in others[:2]}
        while leader.group.followers:
            now = leader.wake_at()
            leader.tick(now, answering=[each.peer_id for each in others])
        assert now == EPOCH + REPLY_SECONDS + PROPOSAL_ANSWER_SECONDS

    @pytest.mark.parametrize("deadline", [1, 5], ids=["a due leader", "a leader that is due later"])
    def test_a_leader_gains_no_time_by_repeating_a_proposal(self, deadline: int) -> None:
        leader, me = candidate(0, EPOCH + deadline), candidate(1, EPOCH + 6)
        follower, now = following(leader, me, target=2), EPOCH + 3
        roster = roster_of(leader, me)
        for second in (0.0, 2.0, 4.0, 6.0, 8.0, REPLY_SECONDS):
            follower.told_by_leader(leader.peer_id, GroupProposal(roster), now + second)
        now += REPLY_SECONDS + ROUND_TRIPS_SECONDS
        follower.tick(now - 0.01)
        assert follower.state.phase is AttemptPhase.ACCEPTED
        follower.tick(now)
        assert follower.state.leader is None

    def test_a_follower_that_was_slow_once_is_in_the_group_later(self) -> None:
        bus = Bus()
        first, second = announce_all(bus, 0, 1, target=3)
        bus.discover(first)
        # The proposal is sent, and is delivered too late.
        bus.advance(MATCH_TIMEOUT + PROPOSAL_ANSWER_SECONDS)
        assert first.active
        assert second.gave_up
        second = bus.announce(1, target=3)
        for _ in range(30):
            for attempt in (first, second):
                bus.discover(attempt)
            bus.run(1.0)
        assert first.formed is not None
        assert first.formed == second.formed

    def test_an_auxiliary_is_nudged_and_waited_for_once(self) -> None:
        leader = candidate(0, EPOCH + 5)
        helper, again = (candidate(9, EPOCH + seconds, auxiliary=True) for seconds in (3000, 3001))
        rules = matchmaking(leader, helper, target=2)
        rules.tick(EPOCH + GLANCE_SECONDS)
        rules.discovered([again], EPOCH + 1)
        rules.asked(candidate(1, EPOCH + 6), EPOCH + 1)
        assert rules.state.phase is AttemptPhase.PROPOSING

    def test_an_auxiliary_does_not_lead_even_another_auxiliary(self) -> None:
        me, later = (candidate(index, EPOCH + 3000 + index, auxiliary=True) for index in (8, 9))
        rules = Matchmaking(me, settings(), EPOCH)
        assert "does not lead" in declined(rules.asked(later, EPOCH)).reason

    def test_a_candidate_that_no_record_names_any_more_is_forgotten(self) -> None:
        other, me = candidate(1, EPOCH + 90), candidate(0, EPOCH + 80)
        rules = matchmaking(me, other)
        rules.tick(EPOCH + 2 * RECORD_TTL_SECONDS)
        assert rules.ready_peers == 1


class TestProposing:
    def test_a_member_lost_before_the_commit_is_left_out(self) -> None:
        bus = Bus()
        attempts = announce_all(bus, 0, 1, 2)
        bus.run(MATCH_TIMEOUT - 0.1)
        bus.advance(0.1)  # the leader proposes, and nothing is delivered
        assert attempts[0].rules.state.phase is AttemptPhase.PROPOSING
        bus.crash(attempts[2])
        bus.settle()
        assert attempts[0].formed is not None
        assert len(attempts[0].formed.members) == 2
        assert attempts[1].formed == attempts[0].formed

    def test_a_member_that_does_not_answer_is_left_out(self) -> None:
        leader, silent, me = row(3)
        rules = matchmaking(leader)
        rules.asked(silent, EPOCH)
        rules.asked(me, EPOCH)
        rules.tick(EPOCH + 1)
        assert rules.state.roster is not None
        rules.told(me.peer_id, Accept(rules.state.roster.group_id), EPOCH + 1)
        rules.tick(rules.wake_at())
        assert rules.state.roster.members == (leader, me)

    def test_an_answer_to_a_withdrawn_proposal_counts_for_nothing(self) -> None:
        leader, one, two = row(3)
        rules = matchmaking(leader, target=3)
        rules.asked(one, EPOCH)
        rules.asked(two, EPOCH)
        assert rules.state.roster is not None
        old = rules.state.roster.group_id
        rules.lost(two.peer_id, "gone", EPOCH)
        assert rules.group.holders == 2
        rules.asked(dataclasses.replace(two), EPOCH)
        rules.told(one.peer_id, Accept(old), EPOCH)
        rules.told(two.peer_id, Accept(old), EPOCH)
        assert rules.state.phase is AttemptPhase.PROPOSING

    def test_an_accepted_roster_is_withdrawn_when_the_leader_gathers_again(self) -> None:
        leader, me = row(2)
        rules = following(leader, me)
        roster = roster_of(leader, me)
        rules.told_by_leader(leader.peer_id, GroupProposal(roster), EPOCH)
        actions = rules.told_by_leader(leader.peer_id, LeaderStatus(2, False), EPOCH)
        assert Expect(None, "the leader withdrew its proposal") in actions
        rules.told_by_leader(leader.peer_id, GroupCommit(roster.group_id), EPOCH)
        assert rules.state.phase is AttemptPhase.LEADING, (
            "a commit of what was withdrawn breaks the conversation"
        )

    @pytest.mark.parametrize(
        ("what", "why"),
        [
            ("without me", "without this peer"),
            ("other weight", "without this peer"),
            ("other leader", "another peer leads"),
            ("greedy shares", "bandwidths"),
            ("expired member", "expired"),
            ("banned member", "lied"),
        ],
    )
    def test_a_roster_that_was_not_agreed_is_refused_and_its_leader_left(self, what: str, why: str) -> None:
        leader, me, third = row(3)
        members = {
            "without me": (leader, third),
            "other weight": (leader, candidate(1, EPOCH + 2, weight=7.0)),
            "other leader": (third, me),
            "expired member": (leader, me, candidate(3, EPOCH - 3700)),
        }.get(what, (leader, me, third))
        shares = settings().cutter.cut(members)
        if what == "greedy shares":
            shares = (0, sum(shares), 0)
        rules = following(leader, me)
        if what == "banned member":
            rules.state.peers.ban(third.peer_id, "it lied")
        roster = Roster(members=members, shares=shares, proposal=1)
        actions = rules.told_by_leader(leader.peer_id, GroupProposal(roster), EPOCH)
        [refusal] = sent(actions)
        assert isinstance(refusal, Refuse)
        assert why in refusal.reason
        assert rules.state.phase is AttemptPhase.LEADING
        rules.discovered([leader], EPOCH)
        assert rules.state.phase is AttemptPhase.LEADING, "it is not asked again"

    def test_an_auxiliary_refuses_a_share_above_its_limit(self) -> None:
        leader, other = candidate(0, EPOCH + 1), candidate(1, EPOCH + 2)
        me = candidate(2, EPOCH + 3000, auxiliary=True)
        rules = Matchmaking(me, dataclasses.replace(settings(), max_share=100), EPOCH)
        rules.discovered([leader], EPOCH)
        rules.told_by_leader(leader.peer_id, Joined(leader), EPOCH)
        roster = roster_of(leader, other, me)
        actions = rules.told_by_leader(leader.peer_id, GroupProposal(roster), EPOCH)
        assert any(isinstance(message, Refuse) for message in sent(actions))

    def test_a_message_that_does_not_fit_ends_the_conversation(self) -> None:
        leader, late = row(2)
        rules = matchmaking(leader)
        rules.asked(late, EPOCH)
        rules.told(late.peer_id, JoinRequest(late), EPOCH)
        assert not rules.group.followers


class TestAuxiliaries:
    def test_an_auxiliary_never_leads_and_never_counts(self) -> None:
        bus = Bus()
        bus.announce(9, auxiliary=True)
        [lone] = announce_all(bus, 0)
        bus.advance(MATCH_TIMEOUT)
        assert lone.gave_up is not None

    def test_an_auxiliary_that_does_not_come_is_waited_for_briefly(self) -> None:
        bus = Bus()
        bus.announce(9, auxiliary=True, target=2)
        first, second = (bus.announce(index, target=2) for index in (0, 1))
        bus.discover(first)
        bus.nudges.clear()  # lost
        bus.discover(second)
        bus.nudges.clear()
        while found := bus.deliverable():
            bus.deliver(*found[0])
        assert first.active
        bus.advance(GLANCE_SECONDS)
        bus.settle()
        assert first.formed is not None
        assert len(first.formed.members) == 2

    def test_a_dead_auxiliary_is_not_waited_for(self) -> None:
        bus = Bus()
        helper = bus.announce(9, auxiliary=True, target=2)
        bus.crash(helper)
        attempts = announce_all(bus, 0, 1, target=2)
        assert all(attempt.formed for attempt in attempts)


class TestWordOfACommit:
    """A leader may die while it tells one member after another that it has committed."""

    def accepted(self) -> tuple[Matchmaking, Candidate, Candidate, bytes]:
        leader, other, me = row(3, 5)
        rules = following(leader, me)
        roster = roster_of(leader, other, me)
        rules.told_by_leader(leader.peer_id, GroupProposal(roster), EPOCH)
        assert rules.state.phase is AttemptPhase.ACCEPTED
        return rules, leader, other, roster.group_id

    def test_another_members_stream_proves_the_commit_when_the_leader_is_lost(self) -> None:
        for lost_first in (False, True):
            rules, leader, other, group_id = self.accepted()
            if lost_first:
                assert rules.lost_leader(leader.peer_id, "it died", EPOCH + 1) == []
                rules.exchange_begun(group_id, other.peer_id)
            else:
                assert rules.exchange_begun(group_id, other.peer_id) == []
                rules.lost_leader(leader.peer_id, "it died", EPOCH + 1)
            assert rules.state.phase is AttemptPhase.COMMITTED

    def test_another_members_stream_proves_the_commit_when_the_leader_is_silent(self) -> None:
        rules, _, other, group_id = self.accepted()
        rules.exchange_begun(group_id, other.peer_id)
        rules.tick(EPOCH + LEADER_SILENCE_SECONDS)
        assert rules.state.phase is AttemptPhase.COMMITTED

    def test_a_leader_that_is_banned_after_its_commit_keeps_the_group(self) -> None:
        rules, leader, other, group_id = self.accepted()
        rules.exchange_begun(group_id, other.peer_id)
        rules.lost_leader(leader.peer_id, "it died", EPOCH + 1)
        assert rules.expel(leader.peer_id, "revoked", EPOCH + 1) == []
        assert rules.state.phase is AttemptPhase.COMMITTED

    def test_without_a_proof_of_the_commit_the_group_is_given_up_after_a_second(self) -> None:
        rules, leader, _, _ = self.accepted()
        rules.lost_leader(leader.peer_id, "it died", EPOCH + 1)
        assert rules.wake_at() == EPOCH + 1 + ROUND_TRIPS_SECONDS
        assert Expect(None, "its leader was lost, and no member knows of a commit") in rules.tick(
            rules.wake_at()
        )
        assert rules.state.phase is not AttemptPhase.ACCEPTED

    def test_streams_of_strangers_and_of_other_groups_change_nothing(self) -> None:
        rules, leader, other, group_id = self.accepted()
        rules.lost_leader(leader.peer_id, "it died", EPOCH + 1)
        rules.exchange_begun(group_id, candidate(7, EPOCH + 9).peer_id)
        rules.exchange_begun(bytes(32), other.peer_id)
        assert rules.state.phase is AttemptPhase.ACCEPTED
