"""Messages that peers exchange until a group is committed.

A join stream (``/p2pavg/match/3.0.0``) carries one conversation. The asker opens it with :class:`Ask`, and the asked
peer answers :class:`Joined` or :class:`Declined`. After ``Joined`` the asked peer leads: it sends :class:`Status` every
two seconds, :class:`Propose`, :class:`Commit` or :class:`Disband`. A stream that begins with :class:`Nudge` carries
nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from p2pavg.base.encoding import pack, unpack
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_GROUP_SIZE
from p2pavg.group.candidate import Candidate, read_signed_candidate
from p2pavg.group.roster import Roster, read_roster
from p2pavg_dht import PeerIdError, public_key_of
from p2pavg_dht.record import pack as pack_record

PROTOCOL = "/p2pavg/match/3.0.0"
MAX_REASON_CHARS = 300


@dataclass(frozen=True, slots=True)
class Ask:
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


@dataclass(frozen=True, slots=True)
class Status:
    """I still lead, with ``ready_peers`` members that want the result. This withdraws any earlier proposal.

    ``decided``: my deadline has passed with too few members.
    """

    ready_peers: int
    decided: bool


@dataclass(frozen=True, slots=True)
class Propose:
    """This is the group. Do you accept?"""

    roster: Roster


@dataclass(frozen=True, slots=True)
class Accept:
    """I take part in this group, and in no other until you withdraw the proposal."""

    group_id: bytes


@dataclass(frozen=True, slots=True)
class Refuse:
    """I do not take part."""

    group_id: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Commit:
    """All members have accepted: the exchange begins."""

    group_id: bytes


@dataclass(frozen=True, slots=True)
class Disband:
    """You are no longer in my group. ``leader`` is the peer that I follow now, if any."""

    reason: str
    leader: Candidate | None = None


Message: TypeAlias = Ask | Nudge | Joined | Declined | Status | Propose | Accept | Refuse | Commit | Disband


def encode(message: Message) -> bytes:
    """Return a message as bytes: one byte for its kind, then its fields."""
    kind = bytes([_KINDS.index(type(message))])
    match message:
        case Ask(me) | Nudge(me) | Joined(me):
            return kind + pack(pack_record(me.record))
        case Declined(reason, leader, taken, over):
            return kind + pack(reason[:MAX_REASON_CHARS], _pack_optional(leader), taken, over)
        case Status(ready_peers, decided):
            return kind + pack(ready_peers, decided)
        case Propose(roster):
            return kind + roster.pack()
        case Accept(group_id) | Commit(group_id):
            return kind + pack(group_id)
        case Refuse(group_id, reason):
            return kind + pack(group_id, reason[:MAX_REASON_CHARS])
        case Disband(reason, leader):
            return kind + pack(reason[:MAX_REASON_CHARS], _pack_optional(leader))


def decode(data: bytes) -> Message:
    """Return the message in ``data``, after checking the signature of every record in it.

    Raises:
        RemoteProtocolError: ``data`` is no message of :func:`encode`.
    """
    if not data or data[0] >= len(_KINDS):
        raise RemoteProtocolError("a matchmaking message of unknown kind")
    kind, body = _KINDS[data[0]], data[1:]
    if kind is Ask or kind is Nudge or kind is Joined:
        return kind(read_signed_candidate(unpack(body, tuple)[0]))
    if kind is Declined:
        reason, leader, taken, over = unpack(body, str, tuple, tuple, bool)
        return Declined(_reason(reason), _read_optional(leader), _peer_ids(taken), over)
    if kind is Status:
        ready_peers, decided = unpack(body, int, bool)
        if not 1 <= ready_peers <= MAX_GROUP_SIZE + 1:  # a group of observers takes one contributor more
            raise RemoteProtocolError(f"a group of {ready_peers}")
        return Status(ready_peers, decided)
    if kind is Propose:
        return Propose(read_roster(body))
    if kind is Refuse:
        group_id, reason = unpack(body, bytes, str)
        return Refuse(_group_id(group_id), _reason(reason))
    if kind is Disband:
        reason, leader = unpack(body, str, tuple)
        return Disband(_reason(reason), _read_optional(leader))
    group_id = _group_id(unpack(body, bytes)[0])
    return Accept(group_id) if kind is Accept else Commit(group_id)


_KINDS = (Ask, Nudge, Joined, Declined, Status, Propose, Accept, Refuse, Commit, Disband)


def _pack_optional(leader: Candidate | None) -> tuple[Any, ...]:
    return () if leader is None else pack_record(leader.record)


def _read_optional(fields: tuple[Any, ...]) -> Candidate | None:
    return read_signed_candidate(fields) if fields else None


def _reason(text: str) -> str:
    """Return a peer's text with unprintable characters replaced: it ends up in logs and terminals."""
    if len(text) > MAX_REASON_CHARS:
        raise RemoteProtocolError("a reason of too many characters")
    return "".join(character if character.isprintable() else "?" for character in text)


def _group_id(group_id: bytes) -> bytes:
    if len(group_id) != 32:
        raise RemoteProtocolError("a group id that is not 32 bytes")
    return group_id


def _peer_ids(fields: tuple[Any, ...]) -> tuple[str, ...]:
    for peer_id in fields:
        if type(peer_id) is not str:
            raise RemoteProtocolError("a peer id that is no text")
        try:
            public_key_of(peer_id)
        except PeerIdError as error:
            raise RemoteProtocolError(str(error)) from None
    return fields
