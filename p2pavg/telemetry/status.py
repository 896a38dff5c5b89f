"""The status that each averager publishes on the run's board, for its users and for monitors. No I/O, no clock.

A status comes from any peer, so it is a claim: lengths, ranges and characters are checked before anything is shown.
All text in a decoded status is printable.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, structs

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_GROUP_SIZE, MAX_MBPS, MAX_MEMBERS, MAX_METRIC, MAX_METRICS, MAX_WEIGHT
from p2pavg.base.messages import Message
from p2pavg.base.numbers import is_name
from p2pavg.telemetry.events import RoundKind

# Text of peers that is safe to show.
#
# Terminals obey control characters, and text that changes its direction can hide what it says. Neither is printable.

KEY_BYTES = 8
"""Bytes that stand for a peer's id in other peers' records."""


def is_printable(text: str, most: int) -> bool:
    """Return whether a text has at most ``most`` characters, all of them printable; it may be empty."""
    return len(text) <= most and (not text or text.isprintable())


def harmless(text: str, most: int) -> str:
    """Return a text for others: at most ``most`` characters, a space in place of each that is not printable."""
    return "".join(character if character.isprintable() else " " for character in text[:most]).strip()


def key_of(peer_id: str) -> bytes:
    """Return the bytes that stand for a peer's id."""
    return hashlib.sha256(peer_id.encode()).digest()[:KEY_BYTES]


TOPIC = "status"
MAX_STATUS_BYTES = 4096
MAX_NAME_CHARS = 40
MAX_WORD_CHARS = 32
MAX_SENTENCE_CHARS = 200
MAX_REASON_CHARS = 120
MAX_ROUNDS = 6
MAX_HISTORY = 32
MAX_NAMED = 8
"""Lost, or excluded, peers that a status names."""
MAX_ROLES = 8
MAX_EPOCH = 2**53
MAX_BYTES = 2**53
MAX_STATUS_SECONDS = 1e11
"""Of durations and of moments since 1970."""
LINEAGE_BYTES = 8
MARKS = (4, 16, 64, 256)

_Word = Annotated[str, Meta(max_length=MAX_WORD_CHARS)]
_Sentence = Annotated[str, Meta(max_length=MAX_SENTENCE_CHARS)]
_Epoch = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
_Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
_Members = Annotated[int, Meta(ge=0, le=MAX_MEMBERS)]
_Contributors = Annotated[int, Meta(ge=0, le=MAX_GROUP_SIZE)]
_Seconds = Annotated[float, Meta(ge=0.0, le=MAX_STATUS_SECONDS)]
_Amount = Annotated[float, Meta(ge=0.0, le=MAX_WEIGHT)]
_Rate = Annotated[float, Meta(ge=0.0, le=MAX_MBPS)]
_Norm = Annotated[float, Meta(ge=0.0, le=MAX_METRIC)]
Metric = Annotated[float, Meta(ge=-MAX_METRIC, le=MAX_METRIC)]
_State = Annotated[bytes, Meta(min_length=LINEAGE_BYTES, max_length=LINEAGE_BYTES)]
_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Partners = Annotated[tuple[_Key, ...], Meta(max_length=MAX_MEMBERS)]
_FewPeers = Annotated[tuple[_Key, ...], Meta(max_length=MAX_NAMED)]


class Activity(StrEnum):
    """The present activity of a peer, in one word."""

    IDLE = "idle"
    """It trains nothing, or has not begun."""
    COMPUTING = "computing"
    WAITING = "waiting"
    """It has computed enough, and waits for the others or for a round."""
    FOLLOWING = "following"
    """It is behind, and fetches the run's state or last updates."""


class RoundClaim(Message, frozen=True, kw_only=True):
    """The words of one peer on one of its last rounds."""

    # Monitors compare these bytes with those of other peers: two lengths would make two rounds of one.
    group: Annotated[bytes, Meta(max_length=KEY_BYTES)] = b""
    """The first 8 bytes of the group's id; empty if no group was found."""
    result: RoundKind
    ended: _Seconds
    """Wall clock of that peer, seconds since 1970."""
    duration: _Seconds
    exchange_duration: _Seconds = 0.0
    sent: _Bytes = 0
    received: _Bytes = 0
    members: _Members = 0
    contributors: _Contributors = 0
    clipped: _Contributors = 0
    lost: _FewPeers = ()
    """Keys of members that were dropped (:func:`p2pavg.telemetry.status.key_of`)."""
    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARS)] = ""

    def __post_init__(self) -> None:
        _require(len(self.group) in (0, KEY_BYTES), "a round with a group id of another length")
        _require_printable(self.reason)


class TransferClaim(Message, frozen=True, kw_only=True):
    """The words of one peer on a transfer of a state."""

    is_upload: bool
    done: _Bytes
    total: _Bytes
    bytes_per_second: Annotated[float, Meta(ge=0.0, le=MAX_BYTES)]
    peers: _Members


class PeerStatus(Message, frozen=True, kw_only=True, tag=2):
    """The words of one peer on itself.

    The order of the fields is their order on the wire: a field that is added or moved makes another tag.
    """

    name: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] = ""
    software: _Word = ""
    """Version of p2pavg."""
    role: _Word = ""
    """``contributor``, ``observer`` or ``auxiliary``."""
    roles: Annotated[tuple[_Word, ...], Meta(max_length=MAX_ROLES)] = ()
    """Roles that its certificate grants; empty in a run without an authority."""
    expires: _Seconds = 0.0
    """The end of its certificate, in seconds since 1970; 0 without one."""
    uptime: _Seconds = 0.0
    """Seconds since the averager was opened."""
    reach: _Word = "unknown"
    """:class:`~p2pavg.net.nat.reach.reachability.Kind` of its reachability."""
    reach_sentence: _Sentence = ""
    upload_mbps: _Rate = 0.0
    """Mbit/s, measured in rounds; 0 if that is not known."""
    download_mbps: _Rate = 0.0
    activity: Activity = Activity.IDLE
    epoch: _Epoch = 0
    lineage: Annotated[bytes, Meta(max_length=LINEAGE_BYTES)] = b""
    """The first 8 bytes of its lineage's state; empty if it trains nothing."""
    marks: Annotated[tuple[tuple[_Epoch, _State], ...], Meta(max_length=len(MARKS))] = ()
    """Earlier updates, and the first 8 bytes of the lineage's state after each: the last multiples of 4, 16, 64 and
    256. Peers whose present updates differ are compared by these."""
    samples: _Amount = 0.0
    """Samples accumulated since the last update."""
    samples_per_second: _Amount = 0.0
    grad_norm: _Norm = 0.0
    """L2 norm of the last averaged gradient; 0 if that is not known."""
    learning_rate: _Norm = 0.0
    """Of the first parameter group; 0 if that is not known."""
    metrics: Annotated[tuple[tuple[str, Metric], ...], Meta(max_length=MAX_METRICS)] = ()
    """Of its last update or round."""
    history_of: str = ""
    """Name of the metric in ``history``; empty without one."""
    history: Annotated[tuple[tuple[_Epoch, Metric], ...], Meta(max_length=MAX_HISTORY)] = ()
    """Updates in growing order, and the metric at each; at most 32, over the whole run."""
    rounds: Annotated[tuple[RoundClaim, ...], Meta(max_length=MAX_ROUNDS)] = ()
    """The last rounds, at most 6, the newest first."""
    lanes: _Partners = ()
    """Keys of the members with which it exchanged over direct lanes in its last round."""
    streams: _Partners = ()
    """The same over streams."""
    relayed: _Partners = ()
    """The same through relays."""
    # One in each direction.
    transfers: Annotated[tuple[TransferClaim, ...], Meta(max_length=2)] = ()
    drift: _Sentence = ""
    """Sentence on other parameters after the same updates; empty if it has seen none."""
    excluded: _FewPeers = ()
    """Keys of peers that it excludes from the run, at most 8."""
    total_rounds: _Bytes = 0
    """Rounds that succeeded since the averager was opened."""
    total_failures: _Bytes = 0
    total_sent: _Bytes = 0
    """Bytes of parts since the averager was opened."""
    total_received: _Bytes = 0
    total_samples: _Amount = 0.0
    """Samples of this peer that went into averages since the averager was opened."""

    def __post_init__(self) -> None:
        # All are shown in terminals, which obey control characters.
        _require_printable(
            self.name, self.software, self.role, *self.roles, self.reach, self.reach_sentence, self.drift
        )
        _require(len(self.lineage) in (0, LINEAGE_BYTES), "a lineage of another length")
        _require(all(is_name(name) for name, _ in self.metrics), "a metric without a name")
        _require(not self.history_of or is_name(self.history_of), "a history without a name")
        # The epochs are the axis of a curve, in which each has one value.
        epochs = [epoch for epoch, _ in self.history]
        _require(epochs == sorted(set(epochs)), "a history out of order")


def encode_status(status: PeerStatus) -> bytes:
    """Return the bytes that a peer publishes on the board; leave out the oldest rounds and points if they are many.

    Raises:
        RemoteProtocolError: a field is out of range.
    """
    status = status.normalised()
    while len(packed := status.encode()) > MAX_STATUS_BYTES:
        # The oldest rounds and points go first, since earlier statuses had them. The newest round stays.
        if len(status.rounds) > 1:
            status = structs.replace(status, rounds=status.rounds[:-1])
        elif status.history:
            status = structs.replace(status, history=status.history[len(status.history) // 2 + 1 :])
        else:
            # Last: how a large group exchanged takes most of the room, and is told nowhere else.
            status = structs.replace(status, lanes=(), streams=(), relayed=())
    return packed


def read_status(value: bytes) -> PeerStatus:
    """Read a status. Raises RemoteProtocolError if it is none, or longer than allowed."""
    # Before anything is decoded: any peer may publish.
    if len(value) > MAX_STATUS_BYTES:
        raise RemoteProtocolError(f"a status of {len(value)} bytes")
    return PeerStatus.decode(value)


def _require(holds: bool, wrong: str) -> None:
    if not holds:
        raise ValueError(f"a status with {wrong}")


def _require_printable(*texts: str) -> None:
    _require(all(is_printable(text, MAX_SENTENCE_CHARS) for text in texts), "a text that is not printable")


# The peers of a run as one of them sees them.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPeer:
    """One peer of the run, by its own words. Only ``peer_id`` and ``last_seen`` are more than a claim of that peer."""

    peer_id: str
    name: str
    """Its :attr:`p2pavg.AveragingConfig.name`; empty if it has none."""
    version: str
    """Version of p2pavg."""
    role: str
    """``contributor`` or ``auxiliary``."""
    epoch: int
    """Number of updates that its parameters have taken; 0 if it trains nothing."""
    samples_per_second: float
    waiting: bool
    """True if it has computed enough, and waits for the others."""
    behind: bool
    """True if it fetches the run's state or last updates."""
    reachability: str
    """One word: ``public``, ``mapped``, ``announced``, ``punchable``, ``relayed`` or ``unknown``."""
    last_seen: float
    """Wall clock of this peer when the last word came, seconds since 1970."""
    is_self: bool = False
    """True for the peer that was asked."""


def run_peer(peer_id: str, status: PeerStatus, last_seen: float, *, is_self: bool = False) -> RunPeer:
    """Return the entry of one peer."""
    return RunPeer(
        peer_id=peer_id,
        name=status.name,
        version=status.software,
        role=status.role,
        epoch=status.epoch,
        samples_per_second=status.samples_per_second,
        waiting=status.activity is Activity.WAITING,
        behind=status.activity is Activity.FOLLOWING,
        reachability=status.reach,
        last_seen=last_seen,
        is_self=is_self,
    )
