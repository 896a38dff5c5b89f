"""Messages that peers exchange until a group is committed.

A join stream (``/p2pavg/match/3.0.0``) carries one conversation. The asker opens it with :class:`JoinRequest`, and the
asked peer answers :class:`Joined` or :class:`Declined`. After ``Joined`` the asked peer leads: it sends
:class:`LeaderStatus` every two seconds, :class:`GroupProposal`, :class:`GroupCommit` or :class:`Disband`. A stream that
begins with :class:`Nudge` carries nothing else.

No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from msgspec import Meta, Raw

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.formats import PeerText
from p2pavg.base.limits import MAX_GROUP_SIZE, MAX_MEMBERS
from p2pavg.base.messages import Hash, cut, decoded, pack
from p2pavg.base.messages import Message as BaseMessage
from p2pavg.group.candidate import Candidate, read_signed_candidate
from p2pavg.group.roster import Roster, read_roster, records_of_roster
from p2pavg_dht import PeerIdError, Record, RecordError, public_key_of, verify
from p2pavg_dht.record import MAX_WIRE_BYTES

PROTOCOL = "/p2pavg/match/3.0.0"
MAX_REASON_CHARS = 300
MAX_FIRST_BYTES = MAX_WIRE_BYTES + 16
"""Of the first message of a stream: its kind, and one record."""
_Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARS)]


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """May I join your group? ``me`` is the asker's signed candidate."""

    me: Candidate


@dataclass(frozen=True, slots=True)
class Nudge:
    """I lead and come before you: ask me."""

    me: Candidate


@dataclass(frozen=True, slots=True)
class Joined:
    """You are in my group; wait for my messages. ``me`` is my current attempt: the asker may know an earlier one."""

    me: Candidate


@dataclass(frozen=True, slots=True)
class Declined:
    """Not now. ``leader`` is the peer that I follow; ``taken`` are peers that you need not ask either.

    ``over``: the attempt that you know has ended. Only ask a new one. The peers in ``taken`` were in its group.
    """

    reason: str
    leader: Candidate | None = None
    taken: tuple[str, ...] = ()
    over: bool = False


class LeaderStatus(BaseMessage, frozen=True):
    """I still lead, with ``ready_peers`` members that want the result. This withdraws any earlier proposal.

    ``decided``: my deadline has passed with too few members.
    """

    # A group of observers takes one contributor more.
    ready_peers: Annotated[int, Meta(ge=1, le=MAX_GROUP_SIZE + 1)]
    decided: bool


@dataclass(frozen=True, slots=True)
class GroupProposal:
    """This is the group. Do you accept?"""

    roster: Roster


class Accept(BaseMessage, frozen=True):
    """I take part in this group, and in no other until you withdraw the proposal."""

    group_id: Hash


class Refuse(BaseMessage, frozen=True):
    """I do not take part."""

    group_id: Hash
    reason: _Reason

    def __post_init__(self) -> None:
        cut(self, reason=MAX_REASON_CHARS)


class GroupCommit(BaseMessage, frozen=True):
    """All members have accepted: the exchange begins."""

    group_id: Hash


@dataclass(frozen=True, slots=True)
class Disband:
    """You are no longer in my group. ``leader`` is the peer that I follow now, if any."""

    reason: str
    leader: Candidate | None = None


Message: TypeAlias = (
    JoinRequest
    | Nudge
    | Joined
    | Declined
    | LeaderStatus
    | GroupProposal
    | Accept
    | Refuse
    | GroupCommit
    | Disband
)

OF_LEADERS: tuple[type[Message], ...] = (Joined, Declined, LeaderStatus, GroupProposal, GroupCommit, Disband)
"""The kinds that the peer at the asked end of a stream sends."""
OF_FOLLOWERS: tuple[type[Message], ...] = (Accept, Refuse)
"""The kinds that the asker sends after its first message."""


@dataclass(frozen=True, slots=True)
class First:
    """The first message of a join stream, before its signature is checked."""

    kind: type[JoinRequest] | type[Nudge]
    record: Record

    def verified(self) -> JoinRequest | Nudge:
        """Return the message, after checking its signature.

        Raises:
            RemoteProtocolError: the record is forged, or no candidate.
        """
        return self.kind(read_signed_candidate(self.record))


def read_first(data: bytes) -> First:
    """Return the message with which a stream begins: a :class:`JoinRequest` or a :class:`Nudge`, which have one
    record.

    A stranger may send it. So its kind is read first, nothing is verified here, and its reader can refuse a record of
    another peer or another run before it does.

    Raises:
        RemoteProtocolError: it is a message of another kind, or none.
    """
    kind = _kind_of(data)
    if kind is not JoinRequest and kind is not Nudge:
        raise RemoteProtocolError(f"a join stream began with {kind.__name__}")
    # Nothing but the kind and one record is read: verifying a signature for any stranger would cost too much.
    return First(kind, *decoded(data[1:], _ONE_RECORD))


def encode(message: Message) -> bytes:
    """Return a message as bytes: one byte for its kind, then its fields."""
    kind = bytes([_KINDS.index(type(message))])
    match message:
        case JoinRequest(me) | Nudge(me) | Joined(me):
            return kind + pack(me.record)
        case Declined(reason, leader, taken, over):
            # Receivers take a longer reason for a breach of the protocol.
            return kind + pack(reason[:MAX_REASON_CHARS], leader.record if leader else (), taken, over)
        case Disband(reason, leader):
            return kind + pack(reason[:MAX_REASON_CHARS], leader.record if leader else ())
        case GroupProposal(roster):
            return kind + roster.pack()
    return kind + message.encode()


def decode(data: bytes, kinds: Collection[type[Message]] | None = None) -> Message:
    """Return the message in ``data``, after checking the signature of every record in it.

    Args:
        kinds: the kinds that the sender may send now; any if not given. Nothing of another kind is read.

    Raises:
        RemoteProtocolError: ``data`` is no message of :func:`encode`, or one of another kind.
    """
    kind, body = _kind_of(data, kinds), data[1:]
    # Each names its sender's present attempt, which may be later than the one in its record.
    if kind is JoinRequest or kind is Nudge or kind is Joined:
        return kind(read_signed_candidate(*decoded(body, _ONE_RECORD)))
    if kind is Declined:
        # The leader's record is signed by the leader itself.
        # The taken peers are only named, and their names may be false.
        reason, leader, taken, over = decoded(body, _DECLINED)
        return Declined(PeerText(reason), _read_optional(leader), _peer_ids(taken), over)
    if kind is Disband:
        reason, leader = decoded(body, _DISBAND)
        return Disband(PeerText(reason), _read_optional(leader))
    if kind is GroupProposal:
        # A leader can invent no member: each candidate in a roster has that member's own signature.
        return GroupProposal(read_roster(body))
    assert issubclass(kind, BaseMessage)
    return kind.decode(body)


_ONE_RECORD = tuple[Record]
_DECLINED = tuple[_Reason, Raw, Annotated[tuple[str, ...], Meta(max_length=MAX_MEMBERS)], bool]
_DISBAND = tuple[_Reason, Raw]
_NO_RECORD = b"\x90"  # an empty array

# A kind's place in this list is its number on the wire.
_KINDS: tuple[type[Message], ...] = (
    JoinRequest,
    Nudge,
    Joined,
    Declined,
    LeaderStatus,
    GroupProposal,
    Accept,
    Refuse,
    GroupCommit,
    Disband,
)


def records_in(data: bytes, kinds: Collection[type[Message]] | None = None) -> Sequence[Record]:
    """Return the records of the roster in a proposal, before their signatures are checked; none of other messages.

    Args:
        kinds: see :func:`decode`.

    Raises:
        RemoteProtocolError: as :func:`decode`.
    """
    # A roster may have 128 signatures, and its reader lets other tasks run between them.
    # The other kinds have one record at most.
    if _kind_of(data, kinds) is not GroupProposal:
        return ()
    return records_of_roster(data[1:])


def check_signature(record: Record) -> None:
    """Raise RemoteProtocolError unless the publisher of a record has signed it."""
    try:
        verify(record)
    except RecordError as error:
        raise RemoteProtocolError(str(error)) from None


def _kind_of(data: bytes, kinds: Collection[type[Message]] | None = None) -> type[Message]:
    if not data or data[0] >= len(_KINDS):
        raise RemoteProtocolError("a matchmaking message of unknown kind")
    kind = _KINDS[data[0]]
    # A follower sends no roster, for example, so it cannot make its leader verify one.
    if kinds is not None and kind not in kinds:
        raise RemoteProtocolError(f"{kind.__name__} came, which this side of a join stream does not send")
    return kind


def _read_optional(leader: Raw) -> Candidate | None:
    data = bytes(leader)
    return None if data == _NO_RECORD else read_signed_candidate(decoded(data, Record))


def _peer_ids(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        try:
            # Only what can be a peer's id is remembered, and shown in logs.
            public_key_of(name)
        except PeerIdError as error:
            raise RemoteProtocolError(str(error)) from None
    return names
