"""Signs what this member holds, and checks what other members signed, before the agreement hears of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from p2pavg.allreduce.proofs import PART_DIGEST_BYTES, Output, Subject, encode_two_averages, is_signed
from p2pavg.consensus.agreement import TWO_AVERAGES
from p2pavg.consensus.choice import ballot_leader
from p2pavg.consensus.conditions import own_output
from p2pavg.consensus.member import FINAL, MemberState
from p2pavg.consensus.statements import (
    Signed,
    Statement,
    contradiction,
    encode_evidence,
    is_signed_by,
    result_digest,
)
from p2pavg.consensus.votes import Members, ResultCommit, ResultHeld, SignedOutput, Vote
from p2pavg.group.roster import Roster
from p2pavg.round.audits import PeerJudge
from p2pavg_dht import Signer

logger = logging.getLogger(__name__)


class Signing:
    """The signatures of one group's members. Members are named by their position in the roster.

    A member signs once per attempt that it completes. It verifies the other members' signatures, each one once: those
    of the ballot that it leads, or those of the first commit that it hears. Without losses, these are n - 1 in a round
    of n members.

    A reducer's signature of its averages is verified when the averages come (:mod:`p2pavg.allreduce.proofs`). Here it
    is verified only when another member shows one, in a dispute about what the reducer sent.

    Args:
        aggregation: text of the rule that combines contributions. It is part of what reducers sign.
        judge: is given each proof as soon as it is found, also after the round's end.
    """

    def __init__(
        self, signer: Signer, roster: Roster, aggregation: str, judge: PeerJudge | None = None
    ) -> None:
        self._signer = signer
        self._aggregation = aggregation
        self._peer_ids = tuple(member.peer_id for member in roster.members)
        self._group_id = roster.group_id
        self._genuine: set[tuple[int, Statement, bytes]] = set()
        self._said: dict[
            tuple[int, int], Signed
        ] = {}  # by member and attempt: the first statement that was verified
        self._judge = judge
        self.evidence: dict[int, bytes] = {}
        """Proof, by member, that it signed two statements that contradict each other."""
        self.lies: dict[int, str] = {}
        """The lies that the evidence proves, by member."""
        self.verified = 0
        """Number of signatures that were verified."""

    def sign(self, attempt: int, members: Members, digests: Sequence[bytes]) -> bytes:
        """Return this member's signature that it holds a result; empty if it needs none."""
        if not digests:
            return b""
        statement = self._statement(attempt, members, result_digest(digests))
        signature = self._signer.sign(statement.signed_bytes())
        self._genuine.add((self._peer_ids.index(self._signer.peer_id), statement, signature))
        return signature

    def wrong_with(self, member: MemberState, sender: int, vote: Vote) -> str:
        """Return what is wrong with a vote's signatures; empty if they are genuine or this member does not use them.

        Signatures of a vote that the agreement ignores are not verified, so such votes cost no time.
        """
        return next((reason for reason in self._wrong(member, sender, vote)), "")

    def _wrong(self, member: MemberState, sender: int, vote: Vote) -> Iterator[str]:
        if isinstance(vote, ResultHeld) and vote.digests and _hears_held(member, sender, vote):
            statement = self._statement(
                member.begun.attempt, member.begun.members, result_digest(vote.digests)
            )
            if not self._is_genuine(sender, statement, vote.signature):
                yield "its signature of the result does not verify"
        if isinstance(vote, ResultCommit) and _hears_commit(member, vote):
            statement = self._statement(vote.attempt, vote.members, vote.digest)
            for position, signature in vote.signatures:
                if not self._is_genuine(position, statement, signature):
                    yield f"it told a commit on which the signature of {self._peer_ids[position]} does not verify"
        if isinstance(vote, SignedOutput) and (own := own_output(member, vote)) is not None:
            yield from self._wrong_output(member, sender, vote, own)

    def _wrong_output(
        self, member: MemberState, sender: int, vote: SignedOutput, own: SignedOutput
    ) -> Iterator[str]:
        """Check the signature of a reducer that another member shows, and keep the proof if it contradicts ours."""
        if vote == own or sender in member.lost:
            return
        # Without a dispute, no honest member shows anything: its leader does, or one that this leader has left out.
        if sender not in member.blamed and ballot_leader(member.promised, member.size) != sender:
            return
        assert member.complete is not None
        members = tuple(sorted(member.complete.members))
        subject = Subject(self._group_id, vote.attempt, members, self._aggregation)
        reducer = self._peer_ids[vote.reducer]
        shown = Output(vote.digest, vote.output[:PART_DIGEST_BYTES], vote.output[PART_DIGEST_BYTES:])
        self.verified += 1
        message = subject.share_bytes(vote.reducer, shown.inputs, shown.digest)
        if not is_signed(reducer, shown.signature, message):
            # The leader of a later attempt may have told the two members different members of it.
            if vote.attempt == 0 or ballot_leader(vote.attempt, member.size) in (sender, member.me):
                yield f"it showed averages that {reducer} has not signed"
            return
        if own.digest == vote.digest or not own.output or vote.reducer in (member.me, *self.evidence):
            return
        ours = Output(own.digest, own.output[:PART_DIGEST_BYTES], own.output[PART_DIGEST_BYTES:])
        try:
            evidence = encode_two_averages(reducer, subject, vote.reducer, ours, shown)
        except ValueError:
            # What this member holds is not what came: its own memory was damaged since, and no other member lied.
            logger.exception("the digest of the share of %s has changed since it came", reducer)
            return
        self._convict(vote.reducer, evidence, TWO_AVERAGES)

    def _convict(self, position: int, evidence: bytes, lie: str) -> None:
        self.evidence[position], self.lies[position] = evidence, lie
        if self._judge is not None:
            self._judge.accuse(evidence)

    def _is_genuine(self, position: int, statement: Statement, signature: bytes) -> bool:
        known = (position, statement, signature)
        if known not in self._genuine:
            self.verified += 1
            if not is_signed_by(self._peer_ids[position], statement, signature):
                return False
            self._genuine.add(known)
            self._compare(position, Signed(self._peer_ids[position], statement, signature))
        return True

    def _compare(self, position: int, signed: Signed) -> None:
        """Keep the proof if a member contradicts what it signed before."""
        before = self._said.setdefault((position, signed.statement.attempt), signed)
        if position not in self.evidence and contradiction(before, signed):
            lie = "it signed two results of one attempt"
            self._convict(position, encode_evidence(before, signed), lie)

    def _statement(self, attempt: int, members: Members, digest: bytes) -> Statement:
        return Statement(self._group_id, attempt, members, digest)


def _hears_held(member: MemberState, sender: int, vote: ResultHeld) -> bool:
    leads = ballot_leader(vote.ballot, member.size) == member.me
    return (
        leads
        and vote.ballot == member.begun.ballot
        and member.phase not in FINAL
        and sender not in member.lost
    )


def _hears_commit(member: MemberState, vote: ResultCommit) -> bool:
    ended = member.committed is not None
    return not ended and not (vote.signers - member.seat.holders)  # else the agreement refuses it
