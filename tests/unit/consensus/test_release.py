"""A hostile member must not split a group: a member goes on to another attempt only with the promises of the others."""

from __future__ import annotations

import pytest

from p2pavg.consensus import agreement, conditions
from p2pavg.consensus.agreement import advance
from p2pavg.consensus.member import MemberState, RoundPhase
from p2pavg.consensus.votes import (
    Accepted,
    Begin,
    Complete,
    Drop,
    Gather,
    Left,
    Lost,
    Members,
    Promise,
    ResultCommit,
    ResultHeld,
    Tell,
    Vote,
    VoteHeard,
)
from tests.unit.consensus.hostile import HostileGroup
from tests.unit.consensus.test_agreement import ALL_MEMBERS, commit, complete, member, promised
from tests.unit.consensus.world import Faults, FoundError


def splits(vote: Vote) -> bool:
    """Return whether a leader may split a group with a vote: begin another attempt, and show signatures of one."""
    if isinstance(vote, Begin):
        return vote.attempt == vote.ballot
    return isinstance(vote, Gather) or (isinstance(vote, ResultCommit) and len(vote.signers) > 1)


def leader_that_splits() -> HostileGroup:
    return HostileGroup(3, Faults(), liar=0, lies=4, only=splits, averages=1)


def test_a_hostile_leader_cannot_split_the_group() -> None:
    assert leader_that_splits().search() > 5000


def test_the_search_finds_the_split_without_the_promises_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four votes: it moves member 1 on, ends the new attempt with it, and shows member 2 its old signature."""
    monkeypatch.setattr(conditions, "is_released", lambda _member, _begin: True)
    with pytest.raises(FoundError, match="committed different results"):
        leader_that_splits().search()


def accuser() -> HostileGroup:
    return HostileGroup(
        3, Faults(), liar=2, lies=5, only=lambda vote: isinstance(vote, ResultHeld | Promise), averages=1
    )


def test_a_false_digest_cannot_split_the_group() -> None:
    """The honest leader leaves out the member that names it, and no reducer."""
    assert accuser().search() > 100


def test_the_search_finds_the_split_by_a_false_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that takes one member's word, and drops the share's reducer, lets that one go on with the liar."""
    odd_members = conditions.odd_members

    def reducers(member: MemberState) -> Members:
        named = [digests for position, digests in member.pending.held if position in odd_members(member)]
        pairs = [zip(sorted(member.begun.members), one, member.own.digests, strict=True) for one in named]
        odd = {reducer for pair in pairs for reducer, its, mine in pair if its != mine}
        return frozenset(odd) & {position for position, _ in member.pending.held} - {member.me}

    def drop(draft: agreement._Draft, peer: int, *, hostile: bool, reason: str) -> None:
        agreement._lose_one(draft, peer, hostile=hostile, reason=reason)
        draft.actions.append(Drop(peer, reason))

    monkeypatch.setattr(conditions, "odd_members", reducers)
    monkeypatch.setattr(agreement, "_blame", drop)
    with pytest.raises(FoundError, match="committed different results"):
        accuser().search()


class TestRelease:
    """A member goes on to another attempt only when no other member may still end the round otherwise."""

    TWO = frozenset({0, 1})

    def asked(self) -> MemberState:
        after, _ = advance(member(1), complete(1))
        after, actions = advance(after, VoteHeard(0, Gather(3)))
        assert [action.peer for action in actions if isinstance(action, Tell)] == [0, 2], "it promises to all"
        after, _ = advance(after, VoteHeard(0, Begin(3, 3, self.TWO, self.TWO, 0, frozenset())))
        assert after.phase is RoundPhase.PROMISED, (
            "member 2 may still commit the result that member 1 has signed"
        )
        return after

    @pytest.mark.parametrize(
        "release",
        [
            promised(2, 3),
            promised(2, 5),
            VoteHeard(2, Gather(5)),
            Lost(2),
            VoteHeard(2, Left(-1, "out of time")),
        ],
        ids=["its promise", "a newer promise", "its own question", "lost", "gave up"],
    )
    def test_a_member_that_is_left_out_releases_the_others(self, release: VoteHeard | Lost) -> None:
        after, _ = advance(self.asked(), release)
        assert after.phase is RoundPhase.EXCHANGING
        assert after.begun.members == self.TWO

    @pytest.mark.parametrize(
        "other",
        [promised(2, 2), promised(0, 3), Lost(2, reachable=True)],
        ids=["older", "the leader's", "blamed"],
    )
    def test_nothing_else_does(self, other: VoteHeard | Lost) -> None:
        after, _ = advance(self.asked(), other)
        assert after.phase is RoundPhase.PROMISED

    def test_a_member_that_has_promised_follows_a_commit_only_with_the_others(self) -> None:
        after, actions = advance(self.asked(), VoteHeard(0, commit(0, 1, 2)))
        assert after.phase is RoundPhase.PROMISED, "the leader may have begun a new attempt with member 2"
        assert [action.peer for action in actions if isinstance(action, Tell)] == [0, 2]
        moved, _ = advance(after, promised(2, 3))
        assert moved.phase is RoundPhase.PROMISED, "member 2 may have followed what it was told"
        committed, _ = advance(after, VoteHeard(2, commit(0, 1, 2)))
        assert committed.phase is RoundPhase.COMMITTED

    def test_a_ballot_about_an_older_result_is_committed_only_with_the_others(self) -> None:
        """Leader 0 begins ballot 3 as attempt 0 here, and as a new attempt with member 2, which has promised."""
        after, _ = advance(member(1), complete(1))
        after, _ = advance(after, VoteHeard(0, Gather(3)))
        after, _ = advance(after, promised(2, 3))
        after, _ = advance(after, VoteHeard(0, Begin(3, 0, ALL_MEMBERS, ALL_MEMBERS, 0, frozenset())))
        assert after.phase is RoundPhase.HOLDING
        after, actions = advance(after, VoteHeard(0, commit(0, 1, 2)))
        assert after.phase is RoundPhase.HOLDING, "member 2 may follow the new attempt"
        assert [action.peer for action in actions if isinstance(action, Tell)] == [0, 2]
        committed, _ = advance(after, VoteHeard(2, commit(0, 1, 2)))
        assert committed.phase is RoundPhase.COMMITTED

    def test_a_member_that_has_asked_for_a_ballot_follows_a_commit_only_with_the_others(self) -> None:
        """Its question has released member 2, which may have gone on with leader 0."""
        after, _ = advance(member(1), complete(1))
        after, _ = advance(after, promised(2, 3))
        after, _ = advance(after, Lost(0))
        assert after.phase is RoundPhase.GATHERING
        after, _ = advance(after, VoteHeard(0, commit(0, 1, 2)))
        assert after.phase is RoundPhase.GATHERING
        committed, _ = advance(after, VoteHeard(2, commit(0, 1, 2)))
        assert committed.phase is RoundPhase.COMMITTED

    def test_an_older_result_is_not_adopted_when_a_member_has_left_that_attempt(self) -> None:
        after, _ = advance(member(1), complete(1))
        after, _ = advance(after, VoteHeard(0, Gather(6)))
        older = Begin(6, 0, ALL_MEMBERS, self.TWO, 0, frozenset(), must=True)
        after, _ = advance(after, VoteHeard(0, older))
        left, _ = advance(after, promised(2, 6, attempt=3))
        assert left.phase is RoundPhase.PROMISED
        stays, _ = advance(after, promised(2, 6, attempt=0))
        assert stays.phase is RoundPhase.HOLDING

    def test_a_member_promises_along_with_one_that_follows_a_lost_leader(self) -> None:
        """Members 0 and 2 have lost each other. Member 1 follows member 0, and needs the promise of member 2."""
        after, _ = advance(member(2), Lost(0))
        after, actions = advance(after, promised(1, 3))
        assert after.promised == 3
        assert [action.peer for action in actions if isinstance(action, Tell)] == [1]

    def test_a_leader_whose_group_is_too_small_without_those_that_it_blames_lets_them_go(self) -> None:
        leader, _ = advance(member(0), Lost(1, reachable=True))
        leader, _ = advance(leader, Lost(2, reachable=True))
        leader, _ = advance(leader, promised(1, leader.promised))
        leader, actions = advance(leader, promised(2, leader.promised))
        assert leader.phase is RoundPhase.ASTRAY
        assert sorted(action.peer for action in actions if isinstance(action, Drop)) == [1, 2]

    def test_members_that_a_leader_told_different_things_do_not_exclude_each_other(self) -> None:
        """Leader 0 began ballot 4 with different members for members 1 and 2, and is lost."""
        some = frozenset({0, 1, 2})
        after, _ = advance(member(1, 4), VoteHeard(0, Gather(4)))
        after, _ = advance(after, promised(2, 4))
        after, _ = advance(after, promised(3, 4))
        after, _ = advance(after, VoteHeard(0, Begin(4, 4, some, some, 0, frozenset())))
        after, _ = advance(after, Lost(0))
        other = frozenset({0, 2, 3})
        accepted = Accepted(4, 4, other, other)
        answer = Promise(after.promised, 4, accepted, Complete(4, other), frozenset({0}), frozenset())
        after, _ = advance(after, VoteHeard(2, answer))
        assert after.hostile == frozenset()

    def test_a_member_that_ends_for_lack_of_members_says_that_it_keeps_its_contribution(self) -> None:
        """If it said that it had held the result, another one could take that result for committed."""
        leader, _ = advance(member(0, minimum=3), complete(0))
        leader, _ = advance(leader, Lost(2))
        leader, actions = advance(leader, promised(1, 3))
        assert leader.phase is RoundPhase.FAILED
        assert actions[-1] == Tell(1, Left(-1, leader.reason))
