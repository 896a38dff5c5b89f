"""Exhaustive search of small groups: agreement, no wrong result, no contribution counted twice, an end."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pavg.base.result import FailedCode
from p2pavg.consensus import agreement
from p2pavg.consensus import member as proof
from p2pavg.consensus.agreement import advance
from p2pavg.consensus.member import FINAL, MemberState, RoundPhase, new_member
from p2pavg.consensus.statements import result_digest
from p2pavg.consensus.votes import (
    MAX_BALLOT,
    Accepted,
    Action,
    Begin,
    Complete,
    Completed,
    Dead,
    Drop,
    Exclude,
    Gather,
    GivenUp,
    Left,
    Lost,
    Members,
    PassOn,
    Promise,
    Readmit,
    ResultCommit,
    ResultHeld,
    SignedOutput,
    StaleBallot,
    TakeFrom,
    Tell,
    Trouble,
    Unknown,
    VoteHeard,
)
from scripts.docs_tools.diagram import in_docs, table_and_diagram
from tests.unit.consensus.hostile import HostileGroup
from tests.unit.consensus.world import Faults, FoundError, Group

ALL_MEMBERS = frozenset({0, 1, 2})
DIGESTS = (b"a" * 32, b"b" * 32, b"c" * 32)
RESULT = result_digest(DIGESTS)


def member(me: int, size: int = 3, minimum: int = 2) -> MemberState:
    all_members = frozenset(range(size))
    return new_member(me, size, all_members, all_members, minimum)


def signature(me: int, attempt: int = 0) -> bytes:
    """Return bytes that stand for a member's signature: the agreement does not verify any."""
    return b"member %d, attempt %d" % (me, attempt)


def output(digest: bytes) -> bytes:
    """Return bytes that stand for a reducer's signature of the digest of its share."""
    return b"signed " + digest


def complete(me: int, attempt: int = 0, digests: tuple[bytes, ...] = DIGESTS) -> Completed:
    return Completed(attempt, digests, signature(me, attempt), tuple(map(output, digests)))


def held(sender: int, ballot: int = 0, digests: tuple[bytes, ...] = DIGESTS) -> VoteHeard:
    return VoteHeard(sender, ResultHeld(ballot, digests, signature(sender)))


def promised(sender: int, ballot: int, attempt: int = 0) -> VoteHeard:
    """Return the event that another member's promise has come, of one that holds nothing."""
    return VoteHeard(sender, Promise(ballot, attempt, None, None, frozenset(), frozenset()))


def commit(*signers: int, digest: bytes = RESULT, members: Members = ALL_MEMBERS) -> ResultCommit:
    """Return the commit of the first attempt, as these members have signed it."""
    signed = tuple((position, signature(position)) for position in sorted(signers))
    return ResultCommit(0, members, digest if signed else b"", signed)


@pytest.mark.parametrize(
    ("size", "faults", "auxiliaries", "observers"),
    [
        (2, Faults(crashes=1, suspicions=2, timeouts=2), 0, 0),
        (3, Faults(crashes=2), 0, 0),
        (3, Faults(blames=1), 0, 0),
        (3, Faults(crashes=1, suspicions=1), 0, 0),
        (3, Faults(crashes=1, timeouts=1), 0, 0),
        (3, Faults(crashes=1), 0, 1),
        (3, Faults(crashes=1), 0, 2),
        (3, Faults(suspicions=1), 0, 2),
        (4, Faults(), 0, 0),
        pytest.param(4, Faults(suspicions=1), 0, 0, marks=pytest.mark.long),
        (3, Faults(crashes=1, suspicions=1), 1, 0),
    ],
    ids=str,
)
def test_guarantees_hold_in_every_reachable_state(
    size: int, faults: Faults, auxiliaries: int, observers: int
) -> None:
    """Fewer faults than those are among them. ``scripts/faults explore`` looks at larger groups."""
    assert Group(size, faults, auxiliaries=auxiliaries, observers=observers).explore() > 5


@pytest.mark.parametrize("liar", [0, 1, 2])
def test_no_vote_of_a_hostile_member_violates_a_guarantee(liar: int) -> None:
    """``scripts/faults explore`` lets it send more of them."""
    assert HostileGroup(3, Faults(), liar=liar, lies=1).search() > 300


def test_the_search_with_a_hostile_member_finds_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the proof of a commit, one vote makes a member lose its contribution."""
    monkeypatch.setattr(proof, "_is_proven", lambda _member, _commit, _told: True)
    with pytest.raises(FoundError, match="is used up, and no honest member holds the result"):
        HostileGroup(3, Faults(), liar=2, lies=1, may_lead=False).search()


def test_the_search_finds_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that commits as soon as one member holds the result violates a guarantee."""
    rows = [
        row
        if row.text != "all members hold the result: commits"
        else agreement.Row(row.phases, row.on, lambda m: bool(m.pending.held), row.do, row.becomes, row.text)
        for row in agreement._ROWS[RoundPhase.EXCHANGING, None]
    ]
    monkeypatch.setitem(agreement._ROWS, (RoundPhase.EXCHANGING, None), rows)
    with pytest.raises(FoundError, match="committed a result that it does not hold"):
        Group(3, Faults()).explore()


def test_the_table_and_the_diagram_in_the_docs_are_those_of_the_code() -> None:
    text = Path("docs/reference/transitions.md").read_text(encoding="utf-8")
    assert in_docs(text) == table_and_diagram(), "run scripts/docs diagram"


def test_every_row_can_be_reached() -> None:
    """No row comes after a row that always fits first."""
    for (phase, on), rows in agreement._ROWS.items():
        unconditional = [index for index, row in enumerate(rows) if row.when is None]
        assert all(index == len(rows) - 1 for index in unconditional), (phase, on)


class TestDisputes:
    """Member 3 names another digest of the share of member 1 than the leader, member 0, has of it."""

    USUAL = tuple(bytes([n]) * 32 for n in (0, 1, 2, 3))
    OTHER = tuple(bytes([n]) * 32 for n in (0, 9, 2, 3))

    def in_dispute(self) -> tuple[MemberState, list[Action]]:
        leader, _ = advance(member(0, 4), complete(0, digests=self.USUAL))
        for position in (1, 2):
            leader, _ = advance(leader, held(position, digests=self.USUAL))
        return advance(leader, held(3, digests=self.OTHER))

    def test_the_leader_shows_what_the_reducer_has_signed(self) -> None:
        leader, actions = self.in_dispute()
        assert leader.phase is RoundPhase.GATHERING
        assert leader.lost == frozenset(), "if member 3 is honest, its promise is needed"
        assert actions[0] == Tell(3, SignedOutput(0, 1, self.USUAL[1], output(self.USUAL[1]))), (
            "before its question"
        )
        assert [action.peer for action in actions if isinstance(action, Exclude)] == [3]

    def test_a_member_that_shows_nothing_is_left_out_and_the_reducer_is_not(self) -> None:
        leader, _ = self.in_dispute()
        for position in (1, 2, 3):
            leader, _ = advance(leader, promised(position, 4))
        assert leader.begun.view == {0, 1, 2}
        assert leader.hostile == frozenset()

    def test_a_reducer_that_signed_both_is_lost_and_the_member_is_not(self) -> None:
        leader, _ = self.in_dispute()
        leader, actions = advance(
            leader, VoteHeard(3, SignedOutput(0, 1, self.OTHER[1], output(self.OTHER[1])))
        )
        assert Readmit(3) in actions
        assert [action.peer for action in actions if isinstance(action, Drop)] == [1]
        assert not [action for action in actions if isinstance(action, Tell) and action.peer == 3]
        for position in (2, 3):
            leader, _ = advance(leader, promised(position, 4))
        assert leader.begun.view == {0, 2, 3}

    def test_an_honest_member_shows_the_other_signature_before_it_promises(self) -> None:
        third, _ = advance(member(3, 4), complete(3, digests=self.OTHER))
        third, actions = advance(
            third, VoteHeard(0, SignedOutput(0, 1, self.USUAL[1], output(self.USUAL[1])))
        )
        assert actions[0] == Tell(0, SignedOutput(0, 1, self.OTHER[1], output(self.OTHER[1])))
        assert third.hostile == {1}
        assert third.phase is RoundPhase.HOLDING

    @pytest.mark.parametrize(
        "shown",
        [
            SignedOutput(0, 1, OTHER[1], b"what it holds itself"),
            SignedOutput(4, 1, USUAL[1], b"of another attempt"),
            SignedOutput(0, 3, USUAL[1], b"its own share"),
        ],
        ids=lambda shown: shown.output.decode(),
    )
    def test_nothing_else_convicts_a_reducer(self, shown: SignedOutput) -> None:
        third, _ = advance(member(3, 4), complete(3, digests=self.OTHER))
        assert advance(third, VoteHeard(0, shown)) == (third, [])

    def test_two_liars_are_left_out_at_once(self) -> None:
        usual = tuple(bytes([n]) * 32 for n in range(6))
        leader, _ = advance(member(0, 6), complete(0, digests=usual))
        for position in (1, 2, 3):
            leader, _ = advance(leader, held(position, digests=usual))
        for position, share in ((4, 1), (5, 0)):
            false = (*usual[:share], bytes([77]) * 32, *usual[share + 1 :])
            leader, _ = advance(leader, held(position, digests=false))
        for position in range(1, 6):
            leader, _ = advance(leader, promised(position, 6))
        assert leader.begun.view == {0, 1, 2, 3}

    def test_a_leader_whose_own_share_most_others_hold_otherwise_leaves(self) -> None:
        leader, _ = advance(member(0), complete(0))
        other = (b"x" * 32, *DIGESTS[1:])
        for position in (1, 2):
            leader, _ = advance(leader, held(position, digests=other))
        assert leader.phase is RoundPhase.FAILED
        assert leader.code is FailedCode.RESULTS_DIFFER

    def test_a_member_says_once_what_it_holds(self) -> None:
        leader, _ = advance(member(0), complete(0))
        leader, _ = advance(leader, held(1))
        again, actions = advance(leader, held(1, digests=(b"x" * 32, *DIGESTS[1:])))
        assert (again.key(), actions) == (leader.key(), [])

    def test_no_result_is_taken_over_of_which_two_members_hold_different_bits(self) -> None:
        """The leader, member 0, sent each of them another average, and is lost."""
        whole = Complete(0, frozenset(range(4)))
        leader, _ = advance(member(1, 4), complete(1, digests=self.USUAL))
        leader, _ = advance(leader, Lost(0))
        accepted = Accepted(0, 0, whole.members, whole.members)
        for position, digests in ((2, self.USUAL), (3, self.OTHER)):
            answer = Promise(
                leader.promised, 0, accepted, whole, frozenset({0}), frozenset(), result_digest(digests)
            )
            leader, _ = advance(leader, VoteHeard(position, answer))
        assert leader.begun.attempt == leader.begun.ballot
        assert leader.begun.members == {1, 2, 3}

    def test_accusations_last_for_the_round(self) -> None:
        """Member 3 accuses another member in each attempt. The second time it is left out, and both are back."""
        leader = member(0, 4)
        for accused, view in ((1, {0, 2, 3}), (2, {0, 1, 2})):
            leader, _ = advance(leader, VoteHeard(3, Trouble(accused, True, "so it says")))
            for position in (1, 2, 3):
                leader, _ = advance(leader, promised(position, leader.promised, leader.begun.attempt))
            assert leader.begun.view == view


class TestLosses:
    def test_a_dead_reducers_share_is_passed_on_to_members_that_lack_it(self) -> None:
        leader, _ = advance(member(0), complete(0))
        leader, _ = advance(leader, Lost(2))
        leader, _ = advance(leader, Dead(2))
        leader, actions = advance(
            leader, VoteHeard(1, Promise(3, 0, None, None, frozenset({2}), frozenset()))
        )
        assert leader.phase is RoundPhase.HOLDING
        assert actions[-1] == PassOn(frozenset({2}), frozenset({1}))

    def test_a_member_that_the_promises_hold_back_takes_that_share_when_they_have_come(self) -> None:
        after, _ = advance(member(1, 4), Lost(3))
        after, _ = advance(after, VoteHeard(0, Gather(4)))
        all_four, left = frozenset(range(4)), frozenset(range(3))
        after, actions = advance(after, VoteHeard(0, Begin(4, 0, all_four, left, 0, frozenset({1, 2}))))
        assert (after.phase, actions) == (RoundPhase.PROMISED, [])
        after, actions = advance(after, promised(2, 4))
        assert (after.phase, actions) == (RoundPhase.EXCHANGING, [TakeFrom(0, frozenset({3}))])

    def test_a_result_that_comes_while_its_leader_gathers_counts(self) -> None:
        leader, _ = advance(member(0), Lost(2))
        leader, _ = advance(leader, Dead(2))
        leader, _ = advance(leader, complete(0))
        leader, actions = advance(
            leader, VoteHeard(1, Promise(3, 0, None, None, frozenset({2}), frozenset()))
        )
        assert actions[-1] == PassOn(frozenset({2}), frozenset({1}))

    def test_a_lost_member_that_may_be_alive_is_excluded(self) -> None:
        """It may hold nothing, and keep its contribution."""
        leader, _ = advance(member(0), complete(0))
        leader, _ = advance(leader, Lost(2))
        leader, _ = advance(leader, VoteHeard(1, Promise(3, 0, None, None, frozenset({2}), frozenset())))
        assert leader.phase is RoundPhase.EXCHANGING
        assert leader.begun.members == {0, 1}

    def test_a_member_refuses_an_attempt_below_its_minimum(self) -> None:
        after, _ = advance(member(1, 3, minimum=3), VoteHeard(0, Gather(3)))
        after, _ = advance(after, promised(2, 3))
        begin = Begin(3, 3, frozenset({0, 1}), frozenset({0, 1}), 0, frozenset())
        after, actions = advance(after, VoteHeard(0, begin))
        assert after.phase is RoundPhase.FAILED
        assert actions == [Tell(peer, Left(-1, after.reason)) for peer in (0, 2)]

    def test_an_attempt_of_observers_only_is_refused(self) -> None:
        """An honest leader would not begin such an attempt: members 0 and 1 only observe."""
        after, _ = advance(new_member(1, 3, ALL_MEMBERS, frozenset({2}), 2), VoteHeard(0, Gather(3)))
        after, _ = advance(after, promised(2, 3))
        begin = Begin(3, 3, frozenset({0, 1}), frozenset({0, 1}), 0, frozenset())
        after, actions = advance(after, VoteHeard(0, begin))
        assert after.phase is RoundPhase.FAILED
        assert actions == [Tell(peer, Left(-1, after.reason)) for peer in (0, 2)]


class TestLiars:
    def test_ballots_cannot_be_used_up(self) -> None:
        """Neither a question under the largest ballot nor an answer that names it has an effect."""
        last = MAX_BALLOT - MAX_BALLOT % 3
        after, _ = advance(member(2), Lost(0))
        after, _ = advance(after, VoteHeard(1, Gather(last + 1 - 3)))
        assert after.phase is RoundPhase.EXCHANGING
        leader, _ = advance(member(0), Lost(2))
        leader, actions = advance(leader, VoteHeard(1, StaleBallot(MAX_BALLOT)))
        assert actions == []
        assert leader.promised == 3

    def test_a_member_that_passes_on_other_bytes_is_excluded(self) -> None:
        """Member 3 is dead, and only member 1 has its share. Member 1 passes on other bytes than it has."""
        true, false = (tuple(bytes([n]) * 32 for n in some) for some in ((0, 1, 2, 3), (0, 1, 2, 9)))
        leader, _ = advance(member(0, 4), Lost(3))
        leader, _ = advance(leader, Dead(3))
        whole = Complete(0, frozenset(range(4)))
        for position, result in ((1, whole), (2, None)):
            answer = Promise(4, 0, None, result, frozenset({3}), frozenset())
            leader, _ = advance(leader, VoteHeard(position, answer))
        assert leader.begun.source == 1
        leader, _ = advance(leader, complete(0, digests=false))
        leader, _ = advance(leader, held(2, 4, false))
        leader, _ = advance(leader, held(1, 4, true))
        assert leader.apart == {1, 3}
        assert leader.phase is RoundPhase.GATHERING

    def test_a_leader_cannot_begin_a_ballot_without_itself(self) -> None:
        after, _ = advance(member(1), complete(1))
        after, _ = advance(after, VoteHeard(0, Gather(3)))
        alone = frozenset({1})
        after, _ = advance(after, VoteHeard(0, Begin(3, 3, alone, alone, 1, frozenset())))
        assert after.hostile == {0}
        assert after.accepted is not None, "the result before may still be committed"


class TestProof:
    """A commit counts only with the signatures of all members that need the result and that are not lost."""

    def test_the_missing_signature_of_a_member_that_is_lost_is_not_waited_for(self) -> None:
        holds, _ = advance(member(1), complete(1))
        holds, _ = advance(holds, VoteHeard(2, commit(2)))
        holds, actions = advance(holds, Lost(0))
        assert holds.phase is RoundPhase.COMMITTED
        assert actions[-1] == Tell(2, commit(1, 2)), "it adds its own signature"

    @pytest.mark.parametrize("digest", [RESULT, bytes(len(RESULT))], ids=["one result", "another"])
    def test_signatures_that_several_members_told_count_together_if_of_one_result(
        self, digest: bytes
    ) -> None:
        all_members = frozenset(range(4))
        holds, _ = advance(member(1, 4), complete(1))
        holds, _ = advance(holds, VoteHeard(2, commit(2, 0, members=all_members)))
        assert holds.phase is RoundPhase.HOLDING
        holds, _ = advance(holds, VoteHeard(3, commit(3, digest=digest, members=all_members)))
        whole = commit(0, 1, 2, 3, members=all_members) if digest == RESULT else None
        assert holds.committed == whole

    def test_a_result_that_counts_a_member_that_gave_up_counts_once_that_member_is_dead(self) -> None:
        """It gave up before it held the result, so it keeps its contribution."""
        holds, _ = advance(member(1), complete(1))
        holds, _ = advance(holds, VoteHeard(0, commit(0)))
        holds, _ = advance(holds, VoteHeard(2, Left(-1, "out of time")))
        assert holds.phase is not RoundPhase.COMMITTED
        holds, _ = advance(holds, Dead(2))
        assert holds.phase is RoundPhase.COMMITTED

    def test_a_member_without_the_result_believes_no_signer_alone(self) -> None:
        """One of the two others may lie. If both say it, the result was committed with its contribution."""
        lacks = member(3, 4)
        lacks, _ = advance(lacks, Lost(0))
        all_members = frozenset(range(4))
        lacks, _ = advance(lacks, VoteHeard(1, commit(1, 2, members=all_members)))
        assert lacks.phase is RoundPhase.EXCHANGING
        lacks, _ = advance(lacks, VoteHeard(2, commit(1, 2, members=all_members)))
        assert lacks.phase is RoundPhase.FAILED
        assert lacks.outcome == Complete(0, all_members)

    def test_a_pair_cannot_commit_without_one_of_the_two(self) -> None:
        two = frozenset({0, 1})
        lacks, actions = advance(member(1, 2), VoteHeard(0, commit(0, members=two)))
        assert lacks.phase is RoundPhase.EXCHANGING
        assert actions == []

    def test_a_leader_that_moved_a_member_on_is_not_believed_about_the_result_before(self) -> None:
        after, _ = advance(member(2), complete(2))
        after, _ = advance(after, VoteHeard(0, Gather(3)))
        after, _ = advance(after, promised(1, 3))
        two = frozenset({0, 2})
        after, _ = advance(after, VoteHeard(0, Begin(3, 3, two, two, 0, frozenset())))
        after, _ = advance(after, VoteHeard(0, commit(0, 1, 2)))
        assert after.phase is RoundPhase.EXCHANGING
        after, _ = advance(after, VoteHeard(1, commit(0, 1, 2)))
        assert after.phase is RoundPhase.FAILED
        assert after.outcome == Complete(0, ALL_MEMBERS)

    @pytest.mark.parametrize(
        "false",
        [
            commit(0, 1, 2),
            ResultCommit(0, frozenset({0, 1}), RESULT, commit(0, 1).signatures),
            ResultCommit(3, frozenset({0, 2}), RESULT, commit(0).signatures),
        ],
        ids=["signed by an auxiliary", "other members than the attempt had", "one member alone"],
    )
    def test_an_impossible_commit_costs_its_sender(self, false: ResultCommit) -> None:
        two = frozenset({0, 1})
        after, actions = advance(new_member(1, 3, two, two, 2), VoteHeard(2, false))
        assert after.hostile == {2}
        assert [action.peer for action in actions if isinstance(action, Drop)] == [2]
        assert after.phase is RoundPhase.EXCHANGING

    @pytest.mark.parametrize(("sender", "digests"), [(1, ()), (2, DIGESTS)])
    def test_only_members_that_need_the_result_sign(self, sender: int, digests: tuple[bytes, ...]) -> None:
        two = frozenset({0, 1})
        leader, _ = advance(new_member(0, 3, two, two, 2), complete(0))
        vote = ResultHeld(0, digests, signature(sender) if digests else b"")
        leader, _ = advance(leader, VoteHeard(sender, vote))
        assert leader.hostile == {sender}


class TestTheEnd:
    def test_a_timeout_with_a_held_result_is_undecided_until_the_outcome_is_heard(self) -> None:
        after, _ = advance(member(2), complete(2))
        after, _ = advance(after, GivenUp("too long"))
        assert after.undecided
        used, _ = advance(after, VoteHeard(1, commit(0, 1, 2)))
        assert used.undecided, "member 0 has not said so, and needed no promise of a member that gave up"
        used, _ = advance(used, VoteHeard(0, commit(0, 1, 2)))
        assert used.outcome == Complete(0, ALL_MEMBERS)
        assert not used.undecided
        kept, _ = advance(after, VoteHeard(0, Left(-1, "")))
        kept, _ = advance(kept, VoteHeard(1, Left(0, "")))
        assert not kept.undecided
        assert kept.outcome is None

    @pytest.mark.parametrize(("ballot", "is_known"), [(0, True), (3, True), (4, False), (-1, False)])
    def test_a_member_that_gave_up_in_a_ballot_about_the_same_result_has_it(
        self, ballot: int, is_known: bool
    ) -> None:
        after, _ = advance(member(2), complete(2))
        after, _ = advance(after, VoteHeard(0, Gather(3)))
        after, _ = advance(after, promised(1, 3))
        after, _ = advance(after, VoteHeard(0, Begin(3, 0, ALL_MEMBERS, ALL_MEMBERS, 0, frozenset())))
        assert after.accepted == Accepted(3, 0, ALL_MEMBERS, ALL_MEMBERS)
        after, _ = advance(after, GivenUp("too long"))
        after, _ = advance(after, VoteHeard(1, Left(ballot, "too long")))
        after, _ = advance(after, VoteHeard(0, commit(0, 1, 2)))
        assert (after.outcome == Complete(0, ALL_MEMBERS)) is is_known

    def test_a_leader_that_never_held_the_result_is_undecided_while_the_last_other_member_may_have_it(
        self,
    ) -> None:
        """The other member lost it, may take the result for committed, and counts this one as gone by now."""
        leader, _ = advance(new_member(0, 3, frozenset({0, 1}), frozenset({0, 1}), 2), Lost(1))
        leader, _ = advance(leader, Lost(2))
        leader, _ = advance(leader, Dead(2))
        leader, _ = advance(leader, GivenUp("too long"))
        assert leader.undecided
        used, _ = advance(leader, VoteHeard(1, commit(1)))
        assert used.outcome == Complete(0, ALL_MEMBERS)
        kept, _ = advance(leader, VoteHeard(1, Left(-1, "")))
        assert not kept.undecided
        assert kept.outcome is None

    def test_a_contribution_is_used_again_when_a_member_of_the_view_never_held_the_result(self) -> None:
        after, _ = advance(member(1), complete(1))
        after, _ = advance(after, GivenUp("too long"))
        after, _ = advance(after, VoteHeard(0, Unknown()))
        assert after.presumed_used
        after, _ = advance(after, VoteHeard(2, Left(-1, "")))
        assert not after.presumed_used

    def test_a_contribution_is_used_again_when_the_leader_itself_gave_up(self) -> None:
        after, _ = advance(member(1, 2), complete(1))
        after, _ = advance(after, GivenUp("too long"))
        after, _ = advance(after, VoteHeard(0, Left(0, "")))
        assert not after.undecided
        assert not after.presumed_used

    def test_a_contribution_is_used_again_after_the_others_began_without_enough_members(self) -> None:
        """A quorum has answered, so no ballot committed the older result, although its leader is dead."""
        after, _ = advance(member(2, 4, minimum=4), complete(2))
        after, _ = advance(after, Lost(0))
        after, _ = advance(after, Dead(0))
        after, _ = advance(after, VoteHeard(1, Gather(5)))
        after, _ = advance(after, promised(3, 5))
        three = frozenset({1, 2, 3})
        after, _ = advance(after, VoteHeard(1, Begin(5, 5, three, three, 1, frozenset())))
        assert after.phase is RoundPhase.FAILED
        assert not after.presumed_used

    def test_a_commit_of_a_result_that_this_member_lacks_is_a_failure(self) -> None:
        """Member 1 took the result for committed, because member 0 had held it and died."""
        after, _ = advance(member(2), Lost(0))
        after, _ = advance(after, VoteHeard(1, commit(1)))
        assert after.phase is RoundPhase.FAILED
        assert after.code is FailedCode.RESULT_MISSED
        assert after.outcome == Complete(0, ALL_MEMBERS)

    @pytest.mark.parametrize(
        "event",
        [VoteHeard(2, Gather(2)), VoteHeard(2, Trouble(0, False, "silent")), held(2)],
        ids=["asks", "has trouble", "holds the result"],
    )
    def test_a_member_that_has_ended_answers_with_the_outcome(self, event: VoteHeard) -> None:
        done, _ = advance(member(1), complete(1))
        done, _ = advance(done, VoteHeard(0, commit(0, 1, 2)))
        assert done.phase is RoundPhase.COMMITTED
        _, actions = advance(done, event)
        assert actions == [Tell(2, commit(0, 1, 2))]

    def test_a_member_that_has_forgotten_the_round_is_as_good_as_dead(self) -> None:
        after, _ = advance(member(1), VoteHeard(2, Unknown()))
        assert after.lost == after.dead == frozenset({2})

    def test_a_leader_that_asks_with_an_older_ballot_hears_of_the_newer_one(self) -> None:
        after, _ = advance(member(2), Lost(0))
        after, _ = advance(after, VoteHeard(1, Gather(4)))
        _, actions = advance(after, VoteHeard(1, Gather(1)))
        assert actions == [Tell(1, StaleBallot(4))]

    def test_a_leader_that_gathers_drops_a_member_that_says_to_have_lost_it(self) -> None:
        after, _ = advance(member(0, 4), Lost(3))
        lie = Promise(after.promised, 0, None, None, frozenset({0}), frozenset())
        after, actions = advance(after, VoteHeard(1, lie))
        assert 1 in after.lost
        assert any(isinstance(action, Drop) and action.peer == 1 for action in actions)

    def test_trouble_after_a_promise_belongs_to_that_promise(self) -> None:
        after, _ = advance(member(0, 4), Lost(3))
        after, _ = advance(after, promised(1, after.promised))
        after, _ = advance(after, VoteHeard(1, Trouble(2, False, "silent")))
        assert dict(after.pending.promises)[1].apart == {2}

    def test_a_final_state_never_changes(self) -> None:
        done, _ = advance(member(1), GivenUp())
        for event in (Completed(0), Lost(0), Dead(0), GivenUp(), held(0)):
            assert advance(done, event)[0].phase in FINAL
