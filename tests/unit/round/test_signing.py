"""Signatures of a group's members: which are verified, and what they prove."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from p2pavg.consensus.member import RoundPhase, new_member
from p2pavg.consensus.statements import Statement, read_evidence, result_digest
from p2pavg.consensus.votes import ResultCommit, ResultHeld
from p2pavg.round.signing import Signing
from tests.unit.allreduce.attempts import three
from tests.unit.group.samples import SIGNERS

ALL = frozenset({0, 1, 2})
DIGESTS = (b"a" * 32, b"b" * 32, b"c" * 32)
OTHERS = (b"x" * 32, *DIGESTS[1:])
LEADER = new_member(0, 3, ALL, ALL, 2)


def signature(signer: int, digests: tuple[bytes, ...] = DIGESTS, attempt: int = 0) -> bytes:
    return Signing(SIGNERS[signer], three(), "").sign(attempt, ALL, digests)


def commit(*signers: int, digests: tuple[bytes, ...] = DIGESTS) -> ResultCommit:
    return ResultCommit(
        0, ALL, result_digest(digests), tuple((signer, signature(signer, digests)) for signer in signers)
    )


def test_a_signature_binds_the_group_the_attempt_its_members_and_the_result() -> None:
    said = Statement(three().group_id, 0, ALL, result_digest(DIGESTS)).signed_bytes()
    assert signature(1) == SIGNERS[1].sign(said)


def test_an_auxiliary_signs_nothing() -> None:
    assert Signing(SIGNERS[0], three(), "").sign(0, ALL, ()) == b""


def test_a_held_vote_needs_the_signature_of_its_sender() -> None:
    signing = Signing(SIGNERS[0], three(), "")
    assert signing.wrong_with(LEADER, 1, ResultHeld(0, DIGESTS, signature(1))) == ""
    for false in (signature(2), signature(1, OTHERS), signature(1, attempt=3), bytes(64)):
        vote = ResultHeld(0, DIGESTS, false)
        assert signing.wrong_with(LEADER, 1, vote) == "its signature of the result does not verify"


def test_a_commit_needs_genuine_signatures_of_all_that_it_names() -> None:
    signing = Signing(SIGNERS[0], three(), "")
    assert signing.wrong_with(LEADER, 1, commit(0, 1, 2)) == ""
    forged = structs.replace(commit(0, 1), signatures=((0, signature(0)), (1, signature(0))))
    assert "does not verify" in signing.wrong_with(LEADER, 2, forged)
    assert "does not verify" in signing.wrong_with(LEADER, 2, structs.replace(commit(1), digest=bytes(32)))


def test_each_signature_is_verified_once_and_none_that_is_not_used() -> None:
    signing = Signing(SIGNERS[0], three(), "")
    signing.sign(0, ALL, DIGESTS)
    for _ in range(3):
        assert signing.wrong_with(LEADER, 1, ResultHeld(0, DIGESTS, signature(1))) == ""
        assert signing.wrong_with(LEADER, 2, commit(0, 1, 2)) == ""
    assert signing.verified == 2
    ended = replace(LEADER, phase=RoundPhase.COMMITTED, committed=commit(0, 1, 2))
    follower = replace(LEADER, seat=replace(LEADER.seat, me=2))
    for member in (ended, follower):
        assert signing.wrong_with(member, 1, ResultHeld(0, DIGESTS, bytes(64))) == ""
    assert signing.wrong_with(ended, 1, structs.replace(commit(1), signatures=((1, bytes(64)),))) == ""
    assert signing.verified == 2


def test_two_results_of_one_attempt_are_kept_as_evidence() -> None:
    signing = Signing(SIGNERS[0], three(), "")
    assert signing.wrong_with(LEADER, 1, ResultHeld(0, DIGESTS, signature(1))) == ""
    assert signing.evidence == {}
    assert signing.wrong_with(LEADER, 2, commit(1, digests=OTHERS)) == ""
    assert signing.evidence.keys() == {1}
    first, second = read_evidence(signing.evidence[1])
    assert first.peer_id == second.peer_id == SIGNERS[1].peer_id
