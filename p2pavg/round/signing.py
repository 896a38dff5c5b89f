"""Signs what this member holds, and checks what other members signed, before the agreement hears of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from p2pavg.consensus.choice import ballot_leader
from p2pavg.consensus.member import FINAL, Member
from p2pavg.consensus.statements import (
    Signed,
    Statement,
    contradiction,
    encode_evidence,
    is_signed_by,
    result_digest,
)
from p2pavg.consensus.votes import Commit, Held, Members, Vote
from p2pavg.group.roster import Roster
from p2pavg_dht import Signer


class Signing:
    """The signatures of one group's members. Members are named by their position in the roster.

    A member signs once per attempt that it completes. It verifies the other members' signatures, each one once: those
    of the ballot that it leads, or those of the first commit that it hears. Without losses, these are n - 1 in a round
    of n members.

    Args:
        accuse: is given each proof as soon as it is found, also after the round's end.
    """

    def __init__(
        self, signer: Signer, roster: Roster, accuse: Callable[[bytes], None] = lambda _evidence: None
    ) -> None:
        self._signer = signer
        self._peer_ids = tuple(member.peer_id for member in roster.members)
        self._group_id = roster.group_id
        self._genuine: set[tuple[int, Statement, bytes]] = set()
        self._said: dict[
            tuple[int, int], Signed
        ] = {}  # by member and attempt: the first statement that was verified
        self._accuse = accuse
        self.evidence: dict[int, bytes] = {}
        """Proof, by member, that it signed two statements that contradict each other."""
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

    def wrong_with(self, member: Member, sender: int, vote: Vote) -> str:
        """Return what is wrong with a vote's signatures; empty if they are genuine or this member does not use them.

        Signatures of a vote that the agreement ignores are not verified, so such votes cost no time.
        """
        return next((reason for reason in self._wrong(member, sender, vote)), "")

    def _wrong(self, member: Member, sender: int, vote: Vote) -> Iterator[str]:
        if isinstance(vote, Held) and vote.digests and _hears_held(member, sender, vote):
            statement = self._statement(
                member.begun.attempt, member.begun.members, result_digest(vote.digests)
            )
            if not self._is_genuine(sender, statement, vote.signature):
                yield "its signature of the result does not verify"
        if isinstance(vote, Commit) and _hears_commit(member, vote):
            statement = self._statement(vote.attempt, vote.members, vote.digest)
            for position, signature in vote.signatures:
                if not self._is_genuine(position, statement, signature):
                    yield f"it told a commit on which the signature of {self._peer_ids[position]} does not verify"

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
            self.evidence[position] = encode_evidence(before, signed)
            self._accuse(self.evidence[position])

    def _statement(self, attempt: int, members: Members, digest: bytes) -> Statement:
        return Statement(self._group_id, attempt, members, digest)


def _hears_held(member: Member, sender: int, vote: Held) -> bool:
    leads = ballot_leader(vote.ballot, member.size) == member.me
    return (
        leads
        and vote.ballot == member.begun.ballot
        and member.phase not in FINAL
        and sender not in member.lost
    )


def _hears_commit(member: Member, vote: Commit) -> bool:
    ended = member.committed is not None
    return not ended and not (vote.signers - member.seat.holders)  # else the agreement refuses it
