"""Limits of rosters, candidates and leaders that every peer enforces, and backoff of leaders."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from p2pavg.base.limits import HOLD_OFF_SECONDS, MAX_BACKOFF_SECONDS, MAX_MEMBERS, ROUND_TRIPS_SECONDS
from p2pavg.group.candidate import Candidate, sign_candidate
from p2pavg.matchmaking.actions import Renew
from p2pavg.matchmaking.attempt_state import MAX_BANNED, MAX_LATE, MAX_PROVEN, AttemptPhase, Memory
from p2pavg.matchmaking.messages import (
    Accept,
    Declined,
    GroupProposal,
    Joined,
    LeaderStatus,
    Refuse,
    decode,
    encode,
)
from p2pavg.matchmaking.rules import Matchmaking
from p2pavg.matchmaking.timing import DUE_SECONDS, RENEW_SECONDS, SETTLE_SECONDS
from p2pavg_dht import Ed25519Signer
from tests.unit.matchmaking.bus import (
    EPOCH,
    KEY,
    MATCH_TIMEOUT,
    Bus,
    candidate,
    following,
    roster_of,
    row,
    sent,
    settings,
)

MANY = [Ed25519Signer(bytes([index // 256, index % 256]) * 16) for index in range(MAX_PROVEN + 10)]


def one_of_many(index: int, *, weight: float = 1.0, auxiliary: bool = False) -> Candidate:
    return sign_candidate(
        MANY[index],
        key=KEY,
        deadline=EPOCH + 10.0 + 0.01 * index,
        expiration_time=EPOCH + 3600.0,
        weight=0.0 if auxiliary else weight,
        bandwidth=100.0,
        codec="fp32",
        auxiliary=auxiliary,
        addresses=("/ip4/192.0.2.1/tcp/1",),
    )


def proposed(rules: Matchmaking, *members: Candidate) -> str:
    """Return the reason for which a roster is refused; empty if it is accepted."""
    proposal = GroupProposal(roster_of(*members))
    [answer] = sent(rules.told_by_leader(members[0].peer_id, proposal, EPOCH))
    assert isinstance(answer, Accept | Refuse)
    return answer.reason if isinstance(answer, Refuse) else ""


class TestRosters:
    def test_members_out_of_order_are_refused(self) -> None:
        """Otherwise an auxiliary in second place could come to lead."""
        leader, me, third = row(3)
        helper = candidate(9, EPOCH + 3000, auxiliary=True)
        assert proposed(following(leader, me), leader, me, third, helper) == ""
        for members in ((leader, helper, me, third), (leader, third, me), (leader, me, helper, third)):
            assert "out of order" in proposed(following(leader, me), *members)

    def test_fewer_members_than_this_peer_takes_part_in_are_refused(self) -> None:
        leader, me = row(2)
        rules = following(leader, me)
        rules.state.settings = dataclasses.replace(rules.state.settings, minimum=3)
        assert "a roster of 2; this peer takes part in 3" in proposed(rules, leader, me)

    def test_the_largest_groups_with_their_auxiliaries_are_rosters(self) -> None:
        """In version 0.1 the leader raised at the 129th member."""
        leader = one_of_many(0, weight=0.0)
        rules = Matchmaking(leader, settings(64), EPOCH)
        for index in range(100, 170):
            rules.asked(one_of_many(index, auxiliary=True), EPOCH)
        for index in range(1, 64):
            rules.asked(one_of_many(index, weight=0.0), EPOCH)
        assert rules.group.holders == 64
        assert rules.state.roster is None, "no member contributes"
        rules.asked(one_of_many(64), EPOCH)
        assert rules.state.roster is not None, "proposed"
        assert len(rules.state.roster.holders) == 65
        assert len(rules.state.roster.members) == MAX_MEMBERS
        assert decode(encode(LeaderStatus(65, False))) == LeaderStatus(65, False), (
            "its followers understand it"
        )

    def test_a_peer_with_the_same_id_is_declined(self) -> None:
        me, again = candidate(0, EPOCH + 1), candidate(0, EPOCH + 2)
        rules = Matchmaking(me, settings(2), EPOCH)
        rules.asked(again, EPOCH)
        assert not rules.group.followers


class TestWeights:
    def test_a_peer_above_max_weight_is_neither_asked_nor_admitted_nor_followed(self) -> None:
        heavy, me = candidate(0, EPOCH + 1, weight=101.0), candidate(1, EPOCH + 2)
        late = candidate(2, EPOCH + 3, weight=101.0)
        rules = Matchmaking(me, dataclasses.replace(settings(), max_weight=100.0), EPOCH)
        rules.discovered([heavy], EPOCH)
        assert rules.state.phase is AttemptPhase.LEADING
        assert sent(rules.asked(late, EPOCH)) == [Declined("its weight of 101 is above max_weight 100")]
        other = candidate(3, EPOCH + 1.5)
        rules.discovered([other], EPOCH)
        rules.told_by_leader(other.peer_id, Declined("follows another leader", heavy), EPOCH)
        assert heavy.peer_id not in rules.state.peers.candidates
        assert "does not meet 2 other peers" in rules.waits_for()


class TestLateLeaders:
    def wait(self, rules: Matchmaking, until: int, seen: Sequence[Candidate] = (), joined: int = 2) -> None:
        """Let seconds pass, in which the leader says how many have joined it, as long as this peer follows it."""
        leader = rules.state.leader
        assert leader is not None
        for seconds in range(1, until + 1):
            rules.discovered(seen, EPOCH + seconds)
            rules.told_by_leader(leader.peer_id, LeaderStatus(joined, False), EPOCH + seconds)
            rules.tick(EPOCH + seconds)
            assert rules.state.leader == leader or seconds == until

    def test_a_due_leader_that_does_not_propose_is_left_within_seconds(self) -> None:
        leader, me = candidate(0, EPOCH + 25), candidate(1, EPOCH + 30)
        others = [candidate(index, EPOCH + 30 + index) for index in (2, 3)]
        rules = following(leader, me, *others)
        self.wait(rules, int(DUE_SECONDS), others)
        assert rules.state.leader is None
        rules.discovered([leader], EPOCH + DUE_SECONDS + HOLD_OFF_SECONDS - 0.1)
        assert rules.state.phase is AttemptPhase.LEADING, "the others find it free"
        rules.tick(EPOCH + DUE_SECONDS + HOLD_OFF_SECONDS)
        assert rules.state.leader == leader, "an honest one is asked again before its deadline"

    def test_a_leader_that_waits_for_more_is_followed_until_its_deadline(self) -> None:
        leader, me, other = candidate(0, EPOCH + 25), candidate(1, EPOCH + 30), candidate(2, EPOCH + 31)
        rules = following(leader, me, other)
        self.wait(rules, 29, [other], joined=3)
        assert rules.state.leader == leader
        rules.tick(EPOCH + 25 + DUE_SECONDS)
        assert rules.state.leader is None, "it had enough at its deadline"

    def test_members_that_are_gone_make_no_leader_due(self) -> None:
        leader, me = candidate(0, EPOCH + 25), candidate(1, EPOCH + 30)
        rules = Matchmaking(me, settings(), EPOCH - 2 * DUE_SECONDS)
        # No record has named the others since then.
        rules.discovered([candidate(index, EPOCH + 30 + index) for index in (2, 3)], EPOCH - 2 * DUE_SECONDS)
        rules.discovered([leader], EPOCH)
        rules.told_by_leader(leader.peer_id, Joined(leader), EPOCH)
        self.wait(rules, 19)
        assert rules.state.leader == leader

    def test_a_leader_that_proposes_repeatedly_is_left(self) -> None:
        leader, me = candidate(0, EPOCH - 1), candidate(1, EPOCH + 30)
        rules = following(leader, me)
        now = EPOCH
        for number in range(60):
            proposal = GroupProposal(roster_of(leader, me, proposal=number))
            said = proposal if number % 2 else LeaderStatus(2, False)
            rules.told_by_leader(leader.peer_id, said, now)
            now += 0.5
            rules.tick(now)
            if rules.state.leader is None:
                break
        assert now <= EPOCH + 15.0

    def test_a_proven_leader_is_followed_until_its_deadline(self) -> None:
        memory = Memory()
        leader, me = candidate(0, EPOCH + 25), candidate(1, EPOCH + 30)
        others = [candidate(index, EPOCH + 30 + index) for index in (2, 3)]
        memory.finished_with([candidate(0, EPOCH)])
        rules = following(leader, me, *others, memory=memory)
        self.wait(rules, 24, others)
        assert rules.state.leader == leader
        rules.told_by_leader(leader.peer_id, LeaderStatus(2, False), EPOCH + 25)
        rules.tick(EPOCH + 25)
        rules.tick(EPOCH + 25 + DUE_SECONDS)
        assert rules.state.leader is None
        assert not memory.is_proven(leader.peer_id)

    def test_a_backoff_counts_in_the_next_attempt_and_hearsay_does_not_end_it(self) -> None:
        memory = Memory()
        leader, other, me = row(3, 20)
        memory.wasted(leader.peer_id, EPOCH)
        rules = Matchmaking(me, settings(), EPOCH, memory)
        rules.discovered([leader], EPOCH)
        assert rules.state.leader is None
        rules.discovered([other], EPOCH)
        rules.told_by_leader(other.peer_id, Declined("follows another leader", leader), EPOCH)
        assert rules.state.leader is None

    def test_a_leader_long_past_its_deadline_is_not_followed_and_begins_anew(self) -> None:
        me = candidate(1, EPOCH + MATCH_TIMEOUT)
        old = candidate(0, EPOCH - 1.5 * RENEW_SECONDS - 1)
        rules = Matchmaking(me, settings(minimum=4), EPOCH)
        rules.discovered([old], EPOCH)
        assert rules.state.leader is None
        rules.asked(candidate(2, EPOCH + 50), EPOCH)
        rules.tick(me.deadline)
        assert any(isinstance(a, Renew) for a in rules.tick(me.deadline + RENEW_SECONDS))
        assert rules.state.phase is AttemptPhase.OVER

    def test_a_group_that_waits_for_a_long_time_still_forms(self) -> None:
        """Each peer is asked, left and renewed meanwhile, and none of that causes a backoff."""
        bus = Bus()

        def live(seconds: float, peers: int) -> None:
            """Let time pass; a peer that gave up alone begins again, as in a training loop."""
            end = bus.now + seconds
            while bus.now < end and not all(attempt.formed for attempt in bus.attempts.values()):
                for index in range(peers):
                    attempt = bus.attempts.get(candidate(index, EPOCH).peer_id)
                    if attempt is None or not (attempt.active or attempt.formed):
                        bus.announce(index, minimum=4)
                        bus.advance(0.01)
                for attempt in list(bus.attempts.values()):
                    bus.discover(attempt)
                bus.run(1.0)

        live(240.0, peers=3)
        assert not any(attempt.formed for attempt in bus.attempts.values())
        bus.announce(3, minimum=4)
        live(15.0, peers=4)
        assert all(attempt.formed for attempt in bus.attempts.values())

    def test_enough_members_after_the_deadline_do_not_wait_another_match_timeout(self) -> None:
        leader, late = candidate(0, EPOCH + 1), candidate(1, EPOCH + 20)
        rules = Matchmaking(leader, settings(), EPOCH)
        rules.discovered([late], EPOCH)
        rules.tick(EPOCH + 1)
        rules.asked(late, EPOCH + 3)
        assert rules.state.roster is None
        rules.tick(EPOCH + 3 + SETTLE_SECONDS)
        assert rules.state.roster is not None, "proposed"


class TestPreference:
    def test_a_proven_leader_is_asked_before_an_earlier_one(self) -> None:
        memory = Memory()
        stranger, proven, me = row(3, 20)
        memory.finished_with([candidate(1, EPOCH)])
        rules = Matchmaking(me, settings(), EPOCH, memory)
        rules.discovered([stranger, proven], EPOCH)
        assert rules.state.leader == proven

    def test_enough_proven_peers_have_time_before_another_peer_is_asked(self) -> None:
        memory = Memory()
        stranger, me, proven = row(3, 20)
        memory.finished_with([candidate(2, EPOCH)])
        rules = Matchmaking(me, settings(2), EPOCH, memory)
        rules.discovered([stranger, proven], EPOCH)
        assert rules.state.leader is None
        assert rules.wake_at() <= EPOCH + ROUND_TRIPS_SECONDS
        rules.tick(EPOCH + ROUND_TRIPS_SECONDS)
        assert rules.state.leader == stranger

    def test_a_peer_without_an_address_leads_only_others_without_one(self) -> None:
        early, me = candidate(0, EPOCH + 1, addresses=()), candidate(1, EPOCH + 20)
        late = candidate(2, EPOCH + 30, addresses=())
        assert me.order < early.order < late.order < candidate(9, EPOCH, auxiliary=True).order
        rules = Matchmaking(me, settings(), EPOCH)
        rules.discovered([early, late], EPOCH)
        assert rules.state.leader is None


class TestSpentAttempts:
    """Records of a finished round's members are read until they are replaced, which takes a moment in every round."""

    def test_a_candidate_of_a_finished_round_is_not_asked(self) -> None:
        memory = Memory()
        before, me = candidate(0, EPOCH + 10), candidate(1, EPOCH + 20)
        memory.finished_with([before])
        rules = Matchmaking(me, settings(), EPOCH, memory)
        assert not rules.discovered([before], EPOCH)
        assert rules.ready_peers == 1
        renewed = candidate(0, EPOCH + 15)
        rules.discovered([before, renewed, before], EPOCH)
        assert rules.state.leader == renewed

    def test_a_peer_that_was_put_into_a_roster_without_its_knowledge_is_heard(self) -> None:
        """Others believe that its attempt is over. It nudges them, or asks them itself."""
        memory = Memory()
        victim, me, later = candidate(0, EPOCH + 10), candidate(1, EPOCH + 20), candidate(2, EPOCH + 30)
        memory.finished_with([victim, later])
        rules = Matchmaking(me, settings(), EPOCH, memory)
        rules.nudged(victim, EPOCH)
        assert rules.state.leader == victim
        rules = Matchmaking(me, settings(), EPOCH, memory)
        rules.asked(victim, EPOCH)
        assert rules.state.leader == victim
        rules = Matchmaking(me, settings(), EPOCH, memory)
        rules.asked(later, EPOCH)
        assert later.peer_id in rules.group.followers

    def test_an_attempt_of_a_peer_whose_clock_was_set_back_is_asked(self) -> None:
        memory = Memory()
        memory.finished_with([candidate(0, EPOCH + 10)])
        earlier, me = candidate(0, EPOCH + 5), candidate(1, EPOCH + 20)
        rules = Matchmaking(me, settings(), EPOCH, memory)
        rules.discovered([earlier], EPOCH)
        assert rules.state.leader == earlier


class TestMemory:
    def test_the_backoff_doubles_is_bounded_and_is_forgiven(self) -> None:
        memory, member = Memory(), candidate(0, EPOCH)
        peer_id = member.peer_id
        backoffs = [memory.wasted(peer_id, EPOCH) - EPOCH for _ in range(8)]
        assert backoffs == [10, 20, 40, 80, 160, 320, 600, 600]
        assert memory.held_until(peer_id, EPOCH - 1e6) == EPOCH - 1e6, "the clock was set back"
        later = EPOCH + 10 * MAX_BACKOFF_SECONDS
        assert memory.wasted(peer_id, later) - later == HOLD_OFF_SECONDS
        memory.finished_with([member])
        assert memory.held_until(peer_id, later) == later
        assert memory.is_proven(peer_id)
        memory.wasted(peer_id, later)
        assert not memory.is_proven(peer_id)

    def test_the_size_of_the_memory_is_bounded(self) -> None:
        memory = Memory()
        for index in range(MAX_LATE + 10):
            memory.wasted(f"late {index}", EPOCH)
        for index in range(MAX_PROVEN + 10):
            memory.finished_with([one_of_many(index)])
        for index in range(MAX_BANNED + 1):
            memory.ban(f"banned {index}", "it lied", EPOCH + index)
        assert len(memory._late) == MAX_LATE
        assert len(memory._proven) == MAX_PROVEN
        assert "banned 0" not in memory.banned(EPOCH - 1)
        assert list(memory.banned(EPOCH + MAX_BANNED - 1)) == [f"banned {MAX_BANNED}"], "the others are over"

    def test_backoffs_of_several_leaders_overlap(self) -> None:
        memory = Memory()
        memory.wasted("a", EPOCH)
        memory.wasted("early", EPOCH, most=EPOCH + 12)
        memory.wasted("b", EPOCH + 9)
        assert memory.held_until("a", EPOCH + 9) == EPOCH + 9 + HOLD_OFF_SECONDS
        assert memory.held_until("early", EPOCH + 9) == EPOCH + 12
        assert MAX_BACKOFF_SECONDS == 600
