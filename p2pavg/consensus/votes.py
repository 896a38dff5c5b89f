"""Votes: the messages by which the members of a group agree on how their round ends.

Members are named by their position in the roster. A *ballot* is one leader's try to end the round. It has a number,
which also names its leader, and a *view*: the members that must hold the result. An *attempt* is one exchange of parts
among some members; it is named by the ballot that began it. See ``docs/explanation/round.md``.

Decoding checks lengths and ranges. Signatures are checked where votes come in (``p2pavg.round.voting``), before the
agreement hears of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from msgspec import Meta

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_MEMBERS
from p2pavg.base.messages import Hash, Message, cut, decoded
from p2pavg.base.result import FailedCode

MAX_VOTE_BYTES = 12_288  # a commit with the signatures of 128 members has 9 KB
MAX_BALLOT = 2**31
MAX_REASON_CHARS = 300
DIGEST_BYTES = 32
"""Of a share, and of the whole result: a reducer that seeks two shares of one digest finds none."""
SIGNATURE_BYTES = 64
OUTPUT_BYTES = 96  # a digest of the inputs and a signature: see :class:`SignedOutput`

# The agreement also refuses leaps within this range: a liar could otherwise use up all ballot numbers. The bound serves
# for counts, too: no share has so many parts, and no part so many bytes.
Ballot = Annotated[int, Meta(ge=0, le=MAX_BALLOT)]
Position = Annotated[int, Meta(ge=0, lt=MAX_MEMBERS)]
Members = Annotated[frozenset[Position], Meta(max_length=MAX_MEMBERS)]
"""Members, by their positions in the roster; on the wire in order, so that a set has one encoding."""
_DigestOrNone = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
Signature = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]

Signatures = Annotated[tuple[tuple[Position, Signature], ...], Meta(max_length=MAX_MEMBERS)]
"""(member, its signature), in the members' order."""


class Accepted(Message, frozen=True):
    """The last ballot that a member accepted: it held the whole result and told the ballot's leader."""

    ballot: Ballot
    attempt: Ballot
    members: Members
    """Members of the attempt: they exchange parts, and their contributions are averaged."""
    view: Members
    """Members that must hold the result before the ballot commits."""
    must: bool = False
    """True if an older ballot may have committed the result, so that no other may be committed."""


class Complete(Message, frozen=True):
    """The last attempt whose whole result a member has."""

    attempt: Ballot
    members: Members


class Gather(Message, frozen=True, tag="gather"):
    """Prepare (Paxos): a leader asks every member for a promise. It is the leader's own promise as well."""

    ballot: Ballot
    attempt: Ballot = 0
    """The leader's current attempt; it has discarded the parts of older ones."""


class Promise(Message, frozen=True, tag="promise"):
    """Promise (Paxos): the member refuses all older ballots from now on, and says what it holds.

    It goes to every member, not to the leader only: a member that has signed a result goes on to another attempt only
    with the promises of the others.
    """

    ballot: Ballot
    attempt: Ballot
    """The member's current attempt; it has discarded the parts of older ones."""
    accepted: Accepted | None
    complete: Complete | None
    apart: Members
    """Members with which this one can exchange nothing more."""
    hostile: Members
    """Members of ``apart`` that broke the protocol."""
    digest: _DigestOrNone = b""
    """Digest of the result of ``complete``; empty if the member holds none.

    No result is taken over of which two members hold different bits.
    """


class StaleBallot(Message, frozen=True, tag="behind"):
    """Nack (Paxos): the member has already promised this ballot or a newer one."""

    promised: Ballot


class Begin(Message, frozen=True, tag="begin"):
    """Value of a ballot: a new attempt (``attempt == ballot``), or the result of an older one."""

    ballot: Ballot
    attempt: Ballot
    members: Members
    view: Members
    source: Position
    """The member that passes on shares to the ``lacking`` members."""
    lacking: Members
    must: bool = False
    """True if an older ballot may have committed the result."""


class ResultHeld(Message, frozen=True, tag="held"):
    """The member holds the whole result. It sends one digest per share; a member that needs no result sends none."""

    ballot: Ballot
    digests: Annotated[tuple[Hash, ...], Meta(max_length=MAX_MEMBERS)]
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""
    """Of :class:`~p2pavg.consensus.statements.Statement`; empty if there are no digests."""


class SignedOutput(Message, frozen=True, tag="shown"):
    """Proof of the averages that a reducer sent: its own signature of a share's digest.

    A leader shows it to a member that names another digest of that share. An honest member has a signature of its own
    of that reducer, about the other digest, and shows it in turn: the two prove that the reducer lied. A member that
    shows none has named a digest that the reducer never sent.
    """

    attempt: Ballot
    reducer: Position
    """Position of the share's reducer in the roster."""
    digest: Hash
    """Of the share."""
    output: Annotated[bytes, Meta(min_length=OUTPUT_BYTES, max_length=OUTPUT_BYTES)]
    """The bytes that followed the share's last average: see :class:`p2pavg.allreduce.proofs.SignedShare`."""


class ResultCommit(Message, frozen=True, tag="commit"):
    """The round has ended with this attempt's result, and these members have signed that they hold it.

    A member that ends without the result passes on what it was told. So the sender need not have signed.
    """

    attempt: Ballot
    members: Members
    digest: _DigestOrNone = b""
    """Digest of the whole result; empty if no member signed."""
    signatures: Signatures = ()

    @property
    def signers(self) -> Members:
        """The members that signed."""
        return frozenset(member for member, _ in self.signatures)


class Trouble(Message, frozen=True, tag="trouble"):
    """The member can exchange nothing more with another one."""

    peer: Position
    hostile: bool
    reason: str

    def __post_init__(self) -> None:
        cut(self, reason=MAX_REASON_CHARS)


class Left(Message, frozen=True, tag="left"):
    """The member has given up the round, and accepts no more ballots."""

    accepted: Annotated[int, Meta(ge=-1, le=MAX_BALLOT)]
    """The last ballot that it accepted, -1 for none."""
    reason: str

    def __post_init__(self) -> None:
        cut(self, reason=MAX_REASON_CHARS)


class Unknown(Message, frozen=True, tag="unknown"):
    """The peer does not know the group: it was never in it, has forgotten it, or was restarted."""


class MemberPing(Message, frozen=True, tag="ping"):
    """The member is alive and has nothing else to send."""


class ReceivedUpTo(Message, frozen=True, tag="came"):
    """Told before a promise: how far the receiver's contribution to the sender's share has come.

    It is no part of the agreement: see :mod:`p2pavg.allreduce.movers.reuse`.
    """

    attempt: Ballot
    parts: Ballot
    """Whole parts that have come."""
    nbytes: Ballot
    """Encoded bytes of the next part that have come."""


class Rest(Message, frozen=True, tag="rest"):
    """The member's last word of the round. When both sides have said it, the stream may carry the next round's votes.

    It is no part of the agreement: see :mod:`p2pavg.allreduce.movers.lobby`.
    """


Vote: TypeAlias = (
    # Paxos: prepare, promise, nack, and the value that the leader asks the view to accept.
    Gather
    | Promise
    | StaleBallot
    | Begin
    # Accepted, the evidence in a dispute about a digest, and the decision.
    | ResultHeld
    | SignedOutput
    | ResultCommit
    # A member's view of the others, and of its own place in the round.
    | Trouble
    | Left
    | Unknown
    # No votes of the agreement: they share its stream.
    | MemberPing
    | ReceivedUpTo
    | Rest
)


def decode_vote(message: bytes, size: int) -> Vote:
    """Return the vote in a message, in a group of ``size`` members.

    Raises:
        RemoteProtocolError: the message is no vote that a member of this group could cast.
    """
    vote: Vote = decoded(message, Vote)
    # Each position is checked before any rule uses it as an index into the roster.
    if any(member >= size for member in _members_in(vote)):
        raise RemoteProtocolError(
            f"a {type(vote).__name__} about a member that a group of {size} does not have"
        )
    if problem := _contradiction_in(vote, size):
        raise RemoteProtocolError(problem)
    return vote


def _members_in(vote: Vote) -> Iterator[int]:
    """Yield every member that a vote names."""
    match vote:
        case Promise(accepted=accepted, complete=complete):
            yield from vote.apart | vote.hostile
            if accepted is not None:
                yield from accepted.members | accepted.view
            if complete is not None:
                yield from complete.members
        case Begin():
            yield from vote.members | vote.view | vote.lacking
            yield vote.source
        case ResultCommit():
            yield from vote.members | vote.signers
        case SignedOutput():
            yield vote.reducer
        case Trouble():
            yield vote.peer


def _contradiction_in(vote: Vote, size: int) -> str:
    """Return what is wrong with fields that are right one by one, but do not fit each other; empty if they fit."""
    match vote:
        case Gather():
            # The leader's attempt began with an older ballot than the one that it asks for now.
            if vote.attempt >= vote.ballot:
                return "a question that is older than its leader's attempt"
        case Promise():
            return _contradiction_in_promise(vote)
        case Begin():
            return _contradiction_in_begin(vote)
        case ResultHeld():
            # There is one digest for each share, and a member reduces one share at most.
            if len(vote.digests) > size:
                return "more digests than reducers"
            # An auxiliary holds no result: it has no digests to name, and signs nothing.
            if len(vote.signature) != (SIGNATURE_BYTES if vote.digests else 0):
                return "digests without a signature, or a signature of nothing"
        case ResultCommit():
            # In order, and none twice: no member signs a commit twice.
            if [member for member, _ in vote.signatures] != sorted(vote.signers):
                return "a commit whose signers are out of order, or named twice"
            # If only auxiliaries are left, no member signs, and the commit names no digest.
            if len(vote.digest) != (DIGEST_BYTES if vote.signatures else 0):
                return "a commit whose digest does not fit its signatures"
            # The statement that members sign names the members of the attempt, so no other member can have signed it.
            if vote.signers - vote.members:
                return "a commit that is signed by members of another attempt"
    return ""


def _contradiction_in_promise(vote: Promise) -> str:
    accepted = vote.accepted
    # The ballot that begins an attempt names it. Later ballots can be about it, and earlier ones cannot.
    if accepted is not None and accepted.attempt > accepted.ballot:
        return "an attempt that is newer than its ballot"
    # A member that has everything of an attempt may still hold no digest: an auxiliary needs no result.
    if len(vote.digest) not in ((0, DIGEST_BYTES) if vote.complete else (0,)):
        return "a promise with a digest of another length, or of no result"
    # A member promises to refuse everything older. What it reports was begun or accepted before this ballot.
    if vote.attempt >= vote.ballot or (accepted is not None and accepted.ballot >= vote.ballot):
        return "a promise that is older than the attempt or ballot that it reports"
    # An accusation only decides which one of two members that are apart is left out.
    if vote.hostile - vote.apart:
        return "a promise that accuses a member without giving it up"
    return ""


def _contradiction_in_begin(vote: Begin) -> str:
    if vote.attempt > vote.ballot or not vote.members or not vote.view:
        return "a ballot without members, or about an attempt that is newer than it"
    # A new attempt has no result yet that a member could lack, or that an older ballot could have committed.
    if vote.attempt == vote.ballot and (vote.members != vote.view or vote.lacking or vote.must):
        return "a new attempt whose members are not its view"
    # The source holds the whole result. A member that lacks shares took part, and has to hold the result as well.
    if (
        vote.lacking - (vote.members & vote.view)
        or vote.source not in vote.view
        or vote.source in vote.lacking
    ):
        return "a ballot in which a member passes on a result that it cannot hold"
    return ""


# ---------------------------------------------------------------------- events


# Events and actions: the input and the output of the agreement.


@dataclass(frozen=True, slots=True)
class Completed:
    """This member has the whole result of an attempt."""

    attempt: int
    digests: tuple[bytes, ...] = ()
    """One per share; a member that needs no result has none."""
    signature: bytes = b""
    """This member's signature that it holds the result."""
    outputs: tuple[bytes, ...] = ()
    """The signature of each share by its reducer; empty bytes for a share without parts.

    Each of them was verified when the share came.
    """


@dataclass(frozen=True, slots=True)
class Lost:
    """This member can exchange nothing more with another one in this round."""

    peer: int
    hostile: bool = False
    reason: str = ""
    reachable: bool = False
    """True if votes still arrive: it is left out of the next attempt, and is asked like the others."""


@dataclass(frozen=True, slots=True)
class Dead:
    """The process of a lost member has ended, or the process does not know this round."""

    peer: int


@dataclass(frozen=True, slots=True)
class VoteHeard:
    """A vote of another member arrived."""

    sender: int
    vote: Vote


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The round has timed out, or the caller cancelled it."""

    reason: str = ""
    code: FailedCode = FailedCode.OTHER


Event: TypeAlias = Completed | Lost | Dead | VoteHeard | GivenUp


# ---------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a vote to a member."""

    peer: int
    vote: Vote


@dataclass(frozen=True, slots=True)
class RunAttempt:
    """Begin the exchange of an attempt, and end the previous one."""

    attempt: int
    members: Members


@dataclass(frozen=True, slots=True)
class PassOn:
    """Send the shares of reducers that are gone to other members, as the same bytes."""

    reducers: Members
    to: Members


@dataclass(frozen=True, slots=True)
class TakeFrom:
    """Take the shares of reducers that are gone from another member, which passes them on."""

    source: int
    reducers: Members


@dataclass(frozen=True, slots=True)
class Drop:
    """Close all streams with a member, and ignore it."""

    peer: int
    reason: str


@dataclass(frozen=True, slots=True)
class Exclude:
    """Note why a member that can be reached is left out of the next attempt."""

    peer: int
    reason: str


@dataclass(frozen=True, slots=True)
class Readmit:
    """Forget why a member was left out: it has proven that another one lied."""

    peer: int


Action: TypeAlias = Tell | RunAttempt | PassOn | TakeFrom | Drop | Exclude | Readmit
