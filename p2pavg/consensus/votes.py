"""Votes: the messages by which the members of a group agree on how their round ends.

Members are named by their position in the roster. A *ballot* is one leader's try to end the round. It has a number,
which also names its leader, and a *view*: the members that must hold the result. An *attempt* is one exchange of parts
among some members; it is named by the ballot that began it. See ``docs/explanation/round.md``.

Decoding checks lengths and ranges. Signatures are checked where votes come in (``p2pavg.round.voting``), before the
agreement hears of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from p2pavg.base.encoding import checked, pack, unpack
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.peer_text import PeerText

Members: TypeAlias = frozenset[int]

MAX_VOTE_BYTES = 12_288  # a commit with the signatures of 128 members has 9 KB
MAX_BALLOT = 2**31
MAX_REASON_CHARS = 300
DIGEST_BYTES = 32
"""Of a share, and of the whole result: a reducer that seeks two shares of one digest finds none."""
SIGNATURE_BYTES = 64
OUTPUT_BYTES = 96  # a digest of the inputs and a signature: see :class:`SignedOutput`

Signatures: TypeAlias = tuple[tuple[int, bytes], ...]
"""(member, its signature), in the members' order."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The last ballot that a member accepted: it held the whole result and told the ballot's leader."""

    ballot: int
    attempt: int
    members: Members
    """Members of the attempt: they exchange parts, and their contributions are averaged."""
    view: Members
    """Members that must hold the result before the ballot commits."""
    must: bool = False
    """True if an older ballot may have committed the result, so that no other may be committed."""


@dataclass(frozen=True, slots=True)
class Complete:
    """The last attempt whose whole result a member has."""

    attempt: int
    members: Members


@dataclass(frozen=True, slots=True)
class Gather:
    """Prepare (Paxos): a leader asks every member for a promise. It is the leader's own promise as well."""

    ballot: int
    attempt: int = 0
    """The leader's current attempt; it has discarded the parts of older ones."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Promise (Paxos): the member refuses all older ballots from now on, and says what it holds.

    It goes to every member, not to the leader only: a member that has signed a result goes on to another attempt only
    with the promises of the others.
    """

    ballot: int
    attempt: int
    """The member's current attempt; it has discarded the parts of older ones."""
    accepted: Accepted | None
    complete: Complete | None
    apart: Members
    """Members with which this one can exchange nothing more."""
    hostile: Members
    """Members of ``apart`` that broke the protocol."""
    digest: bytes = b""
    """Digest of the result of ``complete``; empty if the member holds none.

    No result is taken over of which two members hold different bits.
    """


@dataclass(frozen=True, slots=True)
class StaleBallot:
    """Nack (Paxos): the member has already promised this ballot or a newer one."""

    promised: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Value of a ballot: a new attempt (``attempt == ballot``), or the result of an older one."""

    ballot: int
    attempt: int
    members: Members
    view: Members
    source: int
    """The member that passes on shares to the ``lacking`` members."""
    lacking: Members
    must: bool = False
    """True if an older ballot may have committed the result."""


@dataclass(frozen=True, slots=True)
class ResultHeld:
    """The member holds the whole result. It sends one digest per share; a member that needs no result sends none."""

    ballot: int
    digests: tuple[bytes, ...]
    signature: bytes = b""
    """Of :class:`~p2pavg.consensus.statements.Statement`; empty if there are no digests."""


@dataclass(frozen=True, slots=True)
class SignedOutput:
    """Proof of the averages that a reducer sent: its own signature of a share's digest.

    A leader shows it to a member that names another digest of that share. An honest member has a signature of its own
    of that reducer, about the other digest, and shows it in turn: the two prove that the reducer lied. A member that
    shows none has named a digest that the reducer never sent.
    """

    attempt: int
    reducer: int
    """Position of the share's reducer in the roster."""
    digest: bytes
    """Of the share."""
    output: bytes
    """The bytes that followed the share's last average: see :class:`p2pavg.allreduce.proofs.SignedShare`."""


@dataclass(frozen=True, slots=True)
class ResultCommit:
    """The round has ended with this attempt's result, and these members have signed that they hold it.

    A member that ends without the result passes on what it was told. So the sender need not have signed.
    """

    attempt: int
    members: Members
    digest: bytes = b""
    """Digest of the whole result; empty if no member signed."""
    signatures: Signatures = ()

    @property
    def signers(self) -> Members:
        """The members that signed."""
        return frozenset(member for member, _ in self.signatures)


@dataclass(frozen=True, slots=True)
class Trouble:
    """The member can exchange nothing more with another one."""

    peer: int
    hostile: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Left:
    """The member has given up the round, and accepts no more ballots."""

    accepted: int
    """The last ballot that it accepted, -1 for none."""
    reason: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """The peer does not know the group: it was never in it, has forgotten it, or was restarted."""


@dataclass(frozen=True, slots=True)
class MemberPing:
    """The member is alive and has nothing else to send."""


@dataclass(frozen=True, slots=True)
class ReceivedUpTo:
    """Told before a promise: how far the receiver's contribution to the sender's share has come.

    It is no part of the agreement: see :mod:`p2pavg.allreduce.movers.reuse`.
    """

    attempt: int
    parts: int
    """Whole parts that have come."""
    nbytes: int
    """Encoded bytes of the next part that have come."""


@dataclass(frozen=True, slots=True)
class Rest:
    """The member's last word of the round. When both sides have said it, the stream may carry the next round's votes.

    It is no part of the agreement: see :mod:`p2pavg.allreduce.movers.resting`.
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


def encode_vote(vote: Vote) -> bytes:
    """Return a vote as one message."""
    # The names on the wire are part of the protocol. They stay when a class gets another name.
    match vote:
        case Gather(ballot, attempt):
            return pack("gather", ballot, attempt)
        case Promise(ballot, attempt, accepted, complete, apart, hostile, digest):
            # The decoder knows one type for each field, so an empty list stands for `None`.
            first = accepted and (
                accepted.ballot,
                accepted.attempt,
                _list(accepted.members),
                _list(accepted.view),
                accepted.must,
            )
            second = complete and (complete.attempt, _list(complete.members))
            return pack(
                "promise", ballot, attempt, first or (), second or (), _list(apart), _list(hostile), digest
            )
        case StaleBallot(promised):
            return pack("behind", promised)
        case Begin(ballot, attempt, members, view, source, lacking, must):
            return pack("begin", ballot, attempt, _list(members), _list(view), source, _list(lacking), must)
        case ResultHeld(ballot, digests, signature):
            return pack("held", ballot, digests, signature)
        case SignedOutput(attempt, reducer, digest, output):
            return pack("shown", attempt, reducer, digest, output)
        case ResultCommit(attempt, members, digest, signatures):
            # Two flat lists instead of pairs: the decoder checks the signers as it checks any other list of
            # members.
            signers = tuple(member for member, _ in signatures)
            return pack(
                "commit", attempt, _list(members), digest, signers, tuple(signed for _, signed in signatures)
            )
        case Trouble(peer, hostile, reason):
            # A reason may quote an exception of any length, and a vote above `MAX_VOTE_BYTES` costs its
            # sender the round.
            return pack("trouble", peer, hostile, reason[:MAX_REASON_CHARS])
        case Left(ballot, reason):
            return pack("left", ballot, reason[:MAX_REASON_CHARS])
        case Unknown():
            return pack("unknown")
        case MemberPing():
            return pack("ping")
        case ReceivedUpTo(attempt, parts, nbytes):
            return pack("came", attempt, parts, nbytes)
        case Rest():
            return pack("rest")


def decode_vote(message: bytes, size: int) -> Vote:
    """Return the vote in a message of :func:`encode_vote`, in a group of ``size`` members.

    Raises:
        RemoteProtocolError: the message is not such a vote.
    """
    # Each kind has its own fields, so the kind is read first.
    for kind, (types, read) in _READERS.items():
        # Without the first byte, which counts the fields, a message begins with its kind as it is packed. The
        # length is part of that, so no kind is taken for the beginning of a longer one.
        if message[1 : 2 + len(kind)] == pack(kind)[1:]:
            return read(_Fields(size), *unpack(message, str, *types)[1:])
    raise RemoteProtocolError("a vote of unknown kind")


def _list(members: Members) -> tuple[int, ...]:
    # In one order, so that a set of members has one encoding.
    return tuple(sorted(members))


@dataclass(frozen=True, slots=True)
class _Fields:
    """Checks of one message's fields."""

    size: int

    def ballot(self, value: int, least: int = 0) -> int:
        # The agreement also refuses leaps within this range: a liar could otherwise use up all ballot
        # numbers.
        if not least <= value <= MAX_BALLOT:
            raise RemoteProtocolError(f"a ballot of {value}")
        return value

    def member(self, value: int) -> int:
        if not 0 <= value < self.size:
            raise RemoteProtocolError(f"member {value} of {self.size}")
        return value

    def members(self, values: tuple[Any, ...]) -> Members:
        if len(values) > self.size:
            raise RemoteProtocolError("more members than the group has")
        checked(values, (int,) * len(values))
        # Each position is checked before any rule uses it as an index into the roster.
        found = frozenset(map(self.member, values))
        # A set of members has one encoding, so every vote that is read encodes to the same bytes again.
        if values != _list(found):
            raise RemoteProtocolError("members out of order, or twice")
        return found

    def accepted(self, fields: tuple[Any, ...]) -> Accepted | None:
        if not fields:
            return None
        ballot, attempt, members, view, must = checked(fields, (int, int, tuple, tuple, bool))
        # The ballot that begins an attempt names it. Later ballots can be about it, and earlier ones cannot.
        if attempt > self.ballot(ballot):
            raise RemoteProtocolError("an attempt that is newer than its ballot")
        return Accepted(ballot, self.ballot(attempt), self.members(members), self.members(view), must)

    def complete(self, fields: tuple[Any, ...]) -> Complete | None:
        if not fields:
            return None
        attempt, members = checked(fields, (int, tuple))
        return Complete(self.ballot(attempt), self.members(members))

    def reason(self, text: str) -> PeerText:
        # Cut again, since a hostile member does not cut. The text ends up in logs and errors.
        return PeerText(text[:MAX_REASON_CHARS])

    def digests(self, values: tuple[Any, ...]) -> tuple[bytes, ...]:
        # There is one digest for each share, and a member reduces one share at most.
        if len(values) > self.size:
            raise RemoteProtocolError("more digests than reducers")
        checked(values, (bytes,) * len(values))
        if any(len(value) != DIGEST_BYTES for value in values):
            raise RemoteProtocolError("a digest of another length")
        return values

    def signatures(self, signers: tuple[Any, ...], values: tuple[Any, ...]) -> Signatures:
        # Only for its checks: members of the group, in order, none twice. So no member signs a commit twice.
        self.members(signers)
        if len(values) != len(signers):
            raise RemoteProtocolError("another number of signatures than of members that sign")
        checked(values, (bytes,) * len(values))
        if any(len(value) != SIGNATURE_BYTES for value in values):
            raise RemoteProtocolError("a signature of another length")
        return tuple(zip(signers, values, strict=True))


def _read_held(read: _Fields, ballot: int, digests: Any, signature: bytes) -> ResultHeld:
    held = ResultHeld(read.ballot(ballot), read.digests(digests), signature)
    # An auxiliary holds no result: it has no digests to name, and signs nothing.
    if len(signature) != (SIGNATURE_BYTES if held.digests else 0):
        raise RemoteProtocolError("digests without a signature, or a signature of nothing")
    return held


def _read_shown(read: _Fields, attempt: int, reducer: int, digest: bytes, output: bytes) -> SignedOutput:
    # Whether the reducer has signed these bytes is checked with its key, where votes come in.
    if len(digest) != DIGEST_BYTES or len(output) != OUTPUT_BYTES:
        raise RemoteProtocolError("a reducer's signature of another length")
    return SignedOutput(read.ballot(attempt), read.member(reducer), digest, output)


def _read_commit(
    read: _Fields, attempt: int, members: Any, digest: bytes, signers: Any, signatures: Any
) -> ResultCommit:
    commit = ResultCommit(
        read.ballot(attempt), read.members(members), digest, read.signatures(signers, signatures)
    )
    # If only auxiliaries are left, no member signs, and the commit names no digest.
    if len(digest) != (DIGEST_BYTES if signers else 0):
        raise RemoteProtocolError("a commit whose digest does not fit its signatures")
    # The statement that members sign names the members of the attempt, so no other member can have signed it.
    if commit.signers - commit.members:
        raise RemoteProtocolError("a commit that is signed by members of another attempt")
    return commit


def _read_begin(
    read: _Fields, ballot: int, attempt: int, members: Any, view: Any, source: int, lacking: Any, must: bool
) -> Begin:
    begin = Begin(
        read.ballot(ballot),
        read.ballot(attempt),
        read.members(members),
        read.members(view),
        read.member(source),
        read.members(lacking),
        must,
    )
    # The checks above look at one field each. From here on, fields must fit each other.
    if attempt > ballot or not begin.members or not begin.view:
        raise RemoteProtocolError("a ballot without members, or about an attempt that is newer than it")
    # A new attempt has no result yet that a member could lack, or that an older ballot could have committed.
    if attempt == ballot and (begin.members != begin.view or begin.lacking or must):
        raise RemoteProtocolError("a new attempt whose members are not its view")
    # The source holds the whole result. A member that lacks shares took part, and has to hold the result as
    # well.
    if begin.lacking - (begin.members & begin.view) or source not in begin.view or source in begin.lacking:
        raise RemoteProtocolError("a ballot in which a member passes on a result that it cannot hold")
    return begin


def _read_gather(read: _Fields, ballot: int, attempt: int) -> Gather:
    # The leader's attempt began with an older ballot than the one that it asks for now.
    if attempt >= ballot:
        raise RemoteProtocolError("a question that is older than its leader's attempt")
    return Gather(read.ballot(ballot), read.ballot(attempt))


def _read_promise(
    read: _Fields,
    ballot: int,
    attempt: int,
    accepted: Any,
    complete: Any,
    apart: Any,
    hostile: Any,
    digest: bytes,
) -> Promise:
    promise = Promise(
        read.ballot(ballot),
        read.ballot(attempt),
        read.accepted(accepted),
        read.complete(complete),
        read.members(apart),
        read.members(hostile),
        digest,
    )
    # A member that has everything of an attempt may still hold no digest: an auxiliary needs no result.
    if len(digest) not in ((0, DIGEST_BYTES) if complete else (0,)):
        raise RemoteProtocolError("a promise with a digest of another length, or of no result")
    # A member promises to refuse everything older. What it reports was begun or accepted before this ballot.
    if attempt >= ballot or (promise.accepted is not None and promise.accepted.ballot >= ballot):
        raise RemoteProtocolError("a promise that is older than the attempt or ballot that it reports")
    # An accusation only decides which one of two members that are apart is left out.
    if promise.hostile - promise.apart:
        raise RemoteProtocolError("a promise that accuses a member without giving it up")
    return promise


_READERS: dict[str, tuple[tuple[type, ...], Callable[..., Vote]]] = {
    "gather": ((int, int), _read_gather),
    "promise": (
        (int, int, tuple, tuple, tuple, tuple, bytes),
        _read_promise,
    ),
    "behind": ((int,), lambda read, promised: StaleBallot(read.ballot(promised))),
    "begin": ((int, int, tuple, tuple, int, tuple, bool), _read_begin),
    "held": ((int, tuple, bytes), _read_held),
    "shown": ((int, int, bytes, bytes), _read_shown),
    "commit": ((int, tuple, bytes, tuple, tuple), _read_commit),
    "trouble": (
        (int, bool, str),
        lambda read, peer, hostile, reason: Trouble(read.member(peer), hostile, read.reason(reason)),
    ),
    "left": ((int, str), lambda read, ballot, reason: Left(read.ballot(ballot, -1), read.reason(reason))),
    "unknown": ((), lambda _read: Unknown()),
    "ping": ((), lambda _read: MemberPing()),
    "rest": ((), lambda _read: Rest()),
    # The bound of ballots serves for the counts, too: no share has so many parts, and no part so many bytes.
    "came": (
        (int, int, int),
        lambda read, attempt, parts, nbytes: ReceivedUpTo(
            read.ballot(attempt), read.ballot(parts), read.ballot(nbytes)
        ),
    ),
}
