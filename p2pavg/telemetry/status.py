"""The status that each averager publishes on the run's board, for its users and for monitors. No I/O, no clock.

A status comes from any peer, so it is a claim: lengths, ranges and characters are checked before anything is shown.
All text in a decoded status is printable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, TypeVar

from p2pavg.base.encoding import checked, pack, unpack
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_GROUP_SIZE, MAX_MBPS, MAX_MEMBERS, MAX_METRIC, MAX_METRICS, MAX_WEIGHT
from p2pavg.base.names import is_name
from p2pavg.telemetry.events import RoundKind
from p2pavg.telemetry.text import KEY_BYTES, is_harmless

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

_VERSION = 1
T = TypeVar("T")


class Activity(StrEnum):
    """The present activity of a peer, in one word."""

    IDLE = "idle"
    """It trains nothing, or has not begun."""
    COMPUTING = "computing"
    WAITING = "waiting"
    """It has computed enough, and waits for the others or for a round."""
    FOLLOWING = "following"
    """It is behind, and fetches the run's state or last updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundClaim:
    """The words of one peer on one of its last rounds.

    Raises:
        RemoteProtocolError: a field is out of range.
    """

    group: bytes = b""
    """The first 8 bytes of the group's id; empty if no group was found."""
    result: RoundKind
    ended: float
    """Wall clock of that peer, seconds since 1970."""
    duration: float
    exchange_duration: float = 0.0
    sent: int = 0
    received: int = 0
    members: int = 0
    contributors: int = 0
    clipped: int = 0
    lost: tuple[bytes, ...] = ()
    """Keys of members that were dropped (:func:`p2pavg.telemetry.text.key_of`), at most 8."""
    reason: str = ""

    def __post_init__(self) -> None:
        # Monitors compare these bytes with those of other peers: two lengths would make two rounds of one.
        _require(len(self.group) in (0, KEY_BYTES), "a round with a group id of another length")
        _require(
            _seconds(self.ended, self.duration, self.exchange_duration), "a round with times out of range"
        )
        _require(_counts(MAX_BYTES, self.sent, self.received), "a round with bytes out of range")
        _require(
            _counts(MAX_MEMBERS, self.members) and _counts(MAX_GROUP_SIZE, self.contributors, self.clipped),
            "a round with members out of range",
        )
        _require(_are_keys(self.lost, MAX_NAMED), "a round with lost members out of range")
        # Shown in terminals, which obey control characters.
        _require(is_harmless(self.reason, MAX_REASON_CHARS), "a round with a reason that is not printable")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferClaim:
    """The words of one peer on a transfer of a state.

    Raises:
        RemoteProtocolError: a field is out of range.
    """

    is_upload: bool
    done: int
    total: int
    bytes_per_second: float
    peers: int

    def __post_init__(self) -> None:
        _require(_counts(MAX_BYTES, self.done, self.total), "a transfer with bytes out of range")
        _require(_counts(MAX_MEMBERS, self.peers), "a transfer with peers out of range")
        # NaN fails every comparison, so it is refused here and below without a check of its own.
        _require(0 <= self.bytes_per_second <= MAX_BYTES, "a transfer with a rate out of range")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """The words of one peer on itself.

    Raises:
        RemoteProtocolError: a field is out of range, or a text is too long or not printable.
    """

    name: str = ""
    software: str = ""
    """Version of p2pavg."""
    role: str = ""
    """``contributor``, ``observer`` or ``auxiliary``."""
    roles: tuple[str, ...] = ()
    """Roles that its certificate grants; empty in a run without an authority."""
    expires: float = 0.0
    """The end of its certificate, in seconds since 1970; 0 without one."""
    uptime: float = 0.0
    """Seconds since the averager was opened."""
    reach: str = "unknown"
    """:class:`~p2pavg.net.nat.reach.reachability.Kind` of its reachability."""
    reach_sentence: str = ""
    upload_mbps: float = 0.0
    """Mbit/s, measured in rounds; 0 if that is not known."""
    download_mbps: float = 0.0
    activity: Activity = Activity.IDLE
    epoch: int = 0
    lineage: bytes = b""
    """The first 8 bytes of its lineage's state; empty if it trains nothing."""
    marks: tuple[tuple[int, bytes], ...] = ()
    """Earlier updates, and the first 8 bytes of the lineage's state after each: the last multiples of 4, 16, 64 and
    256. Peers whose present updates differ are compared by these."""
    samples: float = 0.0
    """Samples accumulated since the last update."""
    samples_per_second: float = 0.0
    grad_norm: float = 0.0
    """L2 norm of the last averaged gradient; 0 if that is not known."""
    learning_rate: float = 0.0
    """Of the first parameter group; 0 if that is not known."""
    metrics: tuple[tuple[str, float], ...] = ()
    """Of its last update or round."""
    history_of: str = ""
    """Name of the metric in ``history``; empty without one."""
    history: tuple[tuple[int, float], ...] = ()
    """Updates in growing order, and the metric at each; at most 32, over the whole run."""
    rounds: tuple[RoundClaim, ...] = ()
    """The last rounds, at most 6, the newest first."""
    lanes: tuple[bytes, ...] = ()
    """Keys of the members with which it exchanged over direct lanes in its last round."""
    streams: tuple[bytes, ...] = ()
    """The same over streams."""
    relayed: tuple[bytes, ...] = ()
    """The same through relays."""
    transfers: tuple[TransferClaim, ...] = ()
    drift: str = ""
    """Sentence on other parameters after the same updates; empty if it has seen none."""
    excluded: tuple[bytes, ...] = ()
    """Keys of peers that it excludes from the run, at most 8."""
    total_rounds: int = 0
    """Rounds that succeeded since the averager was opened."""
    total_failures: int = 0
    total_sent: int = 0
    """Bytes of parts since the averager was opened."""
    total_received: int = 0
    total_samples: float = 0.0
    """Samples of this peer that went into averages since the averager was opened."""

    def __post_init__(self) -> None:
        _require(is_harmless(self.name, MAX_NAME_CHARS), "a name that is too long, or not printable")
        words = (self.software, self.role, self.reach, *self.roles)
        _require(all(is_harmless(word, MAX_WORD_CHARS) for word in words), "a word that is not printable")
        _require(len(self.roles) <= MAX_ROLES, "too many roles")
        sentences = (self.reach_sentence, self.drift)
        _require(
            all(is_harmless(text, MAX_SENTENCE_CHARS) for text in sentences),
            "a sentence that is too long, or not printable",
        )
        _require(_seconds(self.expires, self.uptime), "times out of range")
        rates = (self.upload_mbps, self.download_mbps)
        _require(all(0 <= rate <= MAX_MBPS for rate in rates), "bandwidths out of range")
        self._check_training()
        self._check_rounds()

    def _check_training(self) -> None:
        _require(_counts(MAX_EPOCH, self.epoch), "an update out of range")
        _require(len(self.lineage) in (0, LINEAGE_BYTES), "a lineage of another length")
        # Lengths first: what follows goes through all elements.
        _require(len(self.marks) <= len(MARKS), "too many marks")
        _require(_counts(MAX_EPOCH, *(epoch for epoch, _ in self.marks)), "a mark out of range")
        _require(all(len(state) == LINEAGE_BYTES for _, state in self.marks), "a mark of another length")
        amounts = (self.samples, self.samples_per_second, self.total_samples)
        _require(all(0 <= amount <= MAX_WEIGHT for amount in amounts), "samples out of range")
        numbers = (self.grad_norm, self.learning_rate)
        _require(all(0 <= number <= MAX_METRIC for number in numbers), "a norm or rate out of range")
        _require(len(self.metrics) <= MAX_METRICS, "too many metrics")
        _require(
            all(is_name(name) and _is_metric(value) for name, value in self.metrics), "a metric out of range"
        )
        _require(not self.history_of or is_name(self.history_of), "a history without a name")
        epochs = [epoch for epoch, _ in self.history]
        _require(len(epochs) <= MAX_HISTORY and _counts(MAX_EPOCH, *epochs), "a history that is too long")
        # The epochs are the axis of a curve, in which each has one value.
        _require(epochs == sorted(set(epochs)), "a history out of order")
        _require(all(_is_metric(value) for _, value in self.history), "a history out of range")

    def _check_rounds(self) -> None:
        _require(len(self.rounds) <= MAX_ROUNDS and len(self.transfers) <= 2, "too many rounds or transfers")
        for partners in (self.lanes, self.streams, self.relayed):
            _require(_are_keys(partners, MAX_MEMBERS), "partners out of range")
        _require(_are_keys(self.excluded, MAX_NAMED), "excluded peers out of range")
        totals = (self.total_rounds, self.total_failures, self.total_sent, self.total_received)
        _require(_counts(MAX_BYTES, *totals), "totals out of range")


def encode_status(status: PeerStatus) -> bytes:
    """Return the bytes that a peer publishes on the board; leave out the oldest rounds and points if they are many."""
    while len(packed := _packed(status)) > MAX_STATUS_BYTES:
        # The oldest rounds and points go first, since earlier statuses had them. The newest round stays.
        if len(status.rounds) > 1:
            status = replace(status, rounds=status.rounds[:-1])
        elif status.history:
            status = replace(status, history=status.history[len(status.history) // 2 + 1 :])
        else:
            # Last: how a large group exchanged takes most of the room, and is told nowhere else.
            status = replace(status, lanes=(), streams=(), relayed=())
    return packed


def _packed(status: PeerStatus) -> bytes:
    values = []
    for name, kind in _FIELDS.items():
        value = getattr(status, name)
        writer = _WRITERS.get(name)
        # A float field may hold an int, which readers refuse.
        values.append(kind(value) if writer is None else writer(value))
    return pack(_VERSION, *values)


def read_status(value: bytes) -> PeerStatus:
    """Read a status; raise RemoteProtocolError for anything that :func:`encode_status` does not make."""
    # Before anything is decoded: any peer may publish.
    if len(value) > MAX_STATUS_BYTES:
        raise RemoteProtocolError(f"a status of {len(value)} bytes")
    version, *values = unpack(value, int, *_FIELDS.values())
    # Fields have no names on the wire, so another version cannot be read in part.
    if version != _VERSION:
        raise RemoteProtocolError(f"a status of version {version}")
    found: dict[str, Any] = dict(zip(_FIELDS, values, strict=True))
    for name, reader in _READERS.items():
        found[name] = reader(found[name])
    return PeerStatus(**found)


def read_all(said: Mapping[str, bytes]) -> dict[str, PeerStatus]:
    """Return each peer's status; leave out malformed ones."""
    read = {}
    for peer_id, value in said.items():
        try:
            read[peer_id] = read_status(value)
        except RemoteProtocolError:
            # It costs its publisher a line, and not the reader the whole table.
            continue
    return read


# ------------------------------------------------------------------ fields

_KINDS: dict[str, type] = {"str": str, "bytes": bytes, "int": int, "float": float, "Activity": str}
# The order of the class is the order on the wire: a field that is added or moved makes another version.
_FIELDS: dict[str, type] = {each.name: _KINDS.get(str(each.type), tuple) for each in fields(PeerStatus)}
_KEY_FIELDS = ("lanes", "streams", "relayed", "excluded")
_FIELDS.update(dict.fromkeys(_KEY_FIELDS, bytes))  # one after the other
_ROUND = (bytes, str, float, float, float, int, int, int, int, int, bytes, str)


def _write_round(claim: RoundClaim) -> tuple[Any, ...]:
    return (
        claim.group,
        str(claim.result),
        float(claim.ended),
        float(claim.duration),
        float(claim.exchange_duration),
        claim.sent,
        claim.received,
        claim.members,
        claim.contributors,
        claim.clipped,
        b"".join(claim.lost),
        claim.reason,
    )


def _read_round(packed: tuple[Any, ...]) -> RoundClaim:
    group, result, ended, duration, exchange, sent, received, members, contributors, clipped, lost, reason = (
        packed
    )
    return RoundClaim(
        group=group,
        result=_one_of(RoundKind, result),
        ended=ended,
        duration=duration,
        exchange_duration=exchange,
        sent=sent,
        received=received,
        members=members,
        contributors=contributors,
        clipped=clipped,
        lost=_read_keys(lost),
        reason=reason,
    )


def _write_transfer(claim: TransferClaim) -> tuple[Any, ...]:
    return (claim.is_upload, claim.done, claim.total, float(claim.bytes_per_second), claim.peers)


def _read_transfer(packed: tuple[Any, ...]) -> TransferClaim:
    is_upload, done, total, rate, peers = packed
    return TransferClaim(is_upload=is_upload, done=done, total=total, bytes_per_second=rate, peers=peers)


def _read_keys(joined: bytes) -> tuple[bytes, ...]:
    # One text of bytes takes less room than a list, whose every element has a header.
    _require(len(joined) % KEY_BYTES == 0, "keys of another length")
    return tuple(joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES))


def _rows(
    most: int, types: tuple[type, ...], make: Callable[[tuple[Any, ...]], T]
) -> Callable[[Any], tuple[T, ...]]:
    """Return a reader of a tuple of at most ``most`` tuples of these types."""

    def read(rows: tuple[Any, ...]) -> tuple[T, ...]:
        _require(len(rows) <= most, "a list that is too long")
        # What is no tuple becomes an empty one, which has the wrong length and is refused like a row of wrong types.
        return tuple(make(checked(row if isinstance(row, tuple) else (), types)) for row in rows)

    return read


def _pair(row: tuple[Any, ...]) -> tuple[Any, Any]:
    return row[0], row[1]


def _one_of(kind: Callable[[str], T], word: str) -> T:
    try:
        return kind(word)
    except ValueError:
        raise RemoteProtocolError(f"an unknown {getattr(kind, '__name__', 'word')}") from None


_WRITERS: dict[str, Callable[[Any], Any]] = {
    "activity": str,
    "marks": tuple,
    "metrics": lambda metrics: tuple((name, float(value)) for name, value in metrics),
    "history": lambda history: tuple((epoch, float(value)) for epoch, value in history),
    "rounds": lambda rounds: tuple(map(_write_round, rounds)),
    "transfers": lambda transfers: tuple(map(_write_transfer, transfers)),
    **dict.fromkeys(_KEY_FIELDS, b"".join),
}
_READERS: dict[str, Callable[[Any], Any]] = {
    "activity": lambda word: _one_of(Activity, word),
    # Of more roles than that, the number of types differs from that of values, so they are refused.
    "roles": lambda roles: checked(roles, (str,) * min(len(roles), MAX_ROLES)),
    "marks": _rows(len(MARKS), (int, bytes), _pair),
    "metrics": _rows(MAX_METRICS, (str, float), _pair),
    "history": _rows(MAX_HISTORY, (int, float), _pair),
    "rounds": _rows(MAX_ROUNDS, _ROUND, _read_round),
    # One in each direction.
    "transfers": _rows(2, (bool, int, int, float, int), _read_transfer),
    **dict.fromkeys(_KEY_FIELDS, _read_keys),
}


def _require(holds: bool, wrong: str) -> None:
    if not holds:
        raise RemoteProtocolError(f"a status with {wrong}")


def _seconds(*values: float) -> bool:
    return all(0 <= value <= MAX_STATUS_SECONDS for value in values)


def _counts(most: int, *values: int) -> bool:
    return all(0 <= value <= most for value in values)


def _is_metric(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= MAX_METRIC


def _are_keys(keys: Iterable[bytes], most: int) -> bool:
    found = tuple(keys)
    return len(found) <= most and all(len(key) == KEY_BYTES for key in found)
