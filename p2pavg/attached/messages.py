"""Messages between a peer and the processes that are attached to it. No I/O, no clock.

Both ends check every length, type and range. A process of the same user is trusted to train, and trusted with no byte
of the peer's memory: a mistake of one process must not end the others' training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from p2pavg.base.encoding import checked
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_GROUP_SIZE, MAX_METRIC, MAX_METRICS, MAX_STATE_BYTES, MAX_WEIGHT
from p2pavg.base.names import is_name
from p2pavg.state.choice import MAX_DONORS
from p2pavg.state.news import MAX_EPOCH
from p2pavg.telemetry.events import UpdateTaken

VERSION = 2
LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 16 * 2**20
"""Of a description of 100,000 tensors with names; the result of a round is at most 1 MiB, others are below 64 KiB."""
MAX_PROCESSES = 64
MAX_CHANNELS = 128
"""Averagers of one process: the run's, and one for each bucket of DDP."""
MAX_TOPIC_CHARS = 32
MAX_REASON_CHARS = 2000
WHILE_ATTACHED = 0.0
"""The expiration of the entry of a process of the same peer: it lives as long as its process is attached."""
MAX_SERIAL = 2**63 - 1
MAX_TRANSFERS = 16
"""Transfers of one averager at once; an optimizer needs five."""
MAX_DESCRIPTORS = 8
"""Descriptors that one end takes at once."""
DIGEST_BYTES = 32

_MAX_ITEMS = 2048
_MAX_TEXT = 4096
_NAME = re.compile(r"[A-Za-z0-9._-]{1,32}")

Kinds = Mapping[str, tuple[type, ...]]

TO_PEER: Kinds = {
    "attach": (int, str),  # version, name
    "open": (int, bytes),  # channel, settings
    "declare": (int, bytes),  # channel, description of the tensors
    "board": (int, str, float),  # channel, topic, seconds between two looks
    "say": (int, str, bytes, bool),  # channel, topic, value or nothing, urgent
    # channel, number, weight, metrics, state, target, contributors, observes, hinted, expected
    "step": (int, int, float, tuple, bytes, int, int, bool, bool, tuple),
    "cancel": (int, int, str),  # channel, number, reason
    "taken": (int, int),  # channel, serial
    "close": (int,),
    "updated": (int, int, bytes, str, float, tuple, tuple, bool),  # channel, see read_update
    "drifted": (int, str),  # channel, sentence
    "share": (int, int, float, float),  # channel, bytes of the log, limits up and down in Mbit/s (0: none)
    "stand": (int, bool, int),  # channel, wants a state, epoch
    "took": (int, bytes, int),  # channel, id of the group, epoch after the update
    "begin": (
        int,
        int,
        bytes,
    ),  # channel, epoch of the parameters that took the place of others, root or nothing
    "log_bytes": (int, int),  # channel, bytes of the log
    "offer": (int, int, bytes, int),  # channel, epoch, state, bytes; with the descriptor of a sealed file
    "unwanted": (int,),
    "fetch_snapshot": (int, int, int, bytes, bytes, int),  # channel, transfer, epoch, state, root, bytes
    "fetch_average": (int, int, bytes),  # channel, transfer, id of the group
    "donors": (int, int, tuple),  # channel, transfer, pairs of a peer's id and its addresses
    "drop": (int, int),  # channel, transfer
    "look": (int,),
}
"""The fields of each message of a process, after its kind."""

TO_PROCESS: Kinds = {
    "attached": (int, str, tuple),  # version, id of the peer, addresses
    "refused": (int, str, str),  # channel (-1: none), kind of error, reason
    "opened": (int,),
    "declared": (int,),  # with the descriptors of the two segments
    "entry": (int, str, str, bytes, int, float),  # channel, topic, publisher, value, sequence, expiration
    "begun": (int, int, int),  # channel, number, serial
    "progress": (int, int, int, int, str, bool),  # channel, number, ready, target, reason, exchanging
    "committed": (int, int, int),  # channel, number, serial
    "ended": (int, int, str, str, str, str, int),  # channel, number, kind, reason, code, peer, used
    "cancelled": (int, int, bool),  # channel, number, done
    "excluded": (int, tuple),
    "shared": (int, int, bool, tuple),  # channel, bytes of an average, members only, ids of bootstrap peers
    "shelf": (int, bool, int, int, float, float),  # channel, see Shelved
    # channel, transfer, bytes here, bytes of all, bytes/s, seconds left, donors
    "moved": (int, int, int, int, float, float, int),
    "fetched": (
        int,
        int,
        bytes,
        bytes,
        int,
    ),  # channel, transfer, state before, description, bytes; with a descriptor
    "not_fetched": (int, int, str),  # channel, transfer, reason
}
"""The fields of each message of the peer, after its kind."""


def frame(*fields: Any) -> bytes:
    """Return a message with its length in front."""
    packed: bytes = msgpack.packb(fields)
    return len(packed).to_bytes(LENGTH_BYTES, "big") + packed


def read(message: bytes, kinds: Kinds) -> tuple[str, tuple[Any, ...]]:
    """Return the kind of a message, and its fields.

    Raises:
        RemoteProtocolError: it is none of ``kinds``, or a field has another type.
    """
    try:
        fields = msgpack.unpackb(
            message,
            use_list=False,
            max_str_len=_MAX_TEXT,
            max_bin_len=MAX_MESSAGE_BYTES,
            max_array_len=_MAX_ITEMS,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise RemoteProtocolError(f"not a message: {error!r}") from None
    if type(fields) is not tuple or not fields or type(fields[0]) is not str or fields[0] not in kinds:
        raise RemoteProtocolError("a message of no known kind")
    return fields[0], checked(fields[1:], kinds[fields[0]])


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take in bytes; return the messages that are complete.

        Raises:
            RemoteProtocolError: a message is announced as empty, or as longer than any may be.
        """
        self._buffer += data
        found, at = [], 0
        while len(self._buffer) >= at + LENGTH_BYTES:
            length = int.from_bytes(self._buffer[at : at + LENGTH_BYTES], "big")
            if not 0 < length <= MAX_MESSAGE_BYTES:
                raise RemoteProtocolError(f"a message of {length} bytes was announced")
            if len(self._buffer) < at + LENGTH_BYTES + length:
                break
            found.append(bytes(self._buffer[at + LENGTH_BYTES : at + LENGTH_BYTES + length]))
            at += LENGTH_BYTES + length
        del self._buffer[:at]
        return found


def is_process_name(name: object) -> bool:
    """Return whether a name is 1 to 32 letters, digits, dots, dashes and underscores."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def process_id(peer_id: str, name: str) -> str:
    """Return the id of a process that is attached to a peer: ``PEER_ID/NAME``."""
    return f"{peer_id}/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A process's request for a round.

    Raises:
        RemoteProtocolError: something is out of range.
    """

    number: int
    """Counts the rounds of this process."""
    weight: float
    """In samples; 0 if it observes."""
    metrics: tuple[tuple[str, float], ...] = ()
    state: bytes = b""
    target: int = 0
    """Members that the round aims at; 0 if not given."""
    contributors: int = 0
    observes: bool = False
    hinted: bool = False
    """True if ``expected`` was given."""
    expected: tuple[str, ...] = ()
    """Ids of the other peers and processes that the round is to be with."""

    def __post_init__(self) -> None:
        if not 0 < self.number <= MAX_SERIAL:
            raise RemoteProtocolError("a round with a number out of range")
        if not (0 < self.weight <= MAX_WEIGHT or (self.observes and self.weight == 0)):
            raise RemoteProtocolError("a contribution with a weight out of range")
        if len(self.state) > MAX_STATE_BYTES:
            raise RemoteProtocolError("a state that is too long")
        if not (0 <= self.target <= MAX_GROUP_SIZE and 0 <= self.contributors <= MAX_GROUP_SIZE):
            raise RemoteProtocolError("a round with a size out of range")
        if len(self.metrics) > MAX_METRICS or not all(
            is_name(name) and abs(value) <= MAX_METRIC for name, value in self.metrics
        ):
            raise RemoteProtocolError("metrics out of range")
        if not all(len(text) <= MAX_REASON_CHARS for text in self.expected):
            raise RemoteProtocolError("an id that is too long")

    def fields(self) -> tuple[Any, ...]:
        """Return the fields of the message after its channel."""
        return (
            self.number,
            float(self.weight),
            self.metrics,
            self.state,
            self.target,
            self.contributors,
            self.observes,
            self.hinted,
            self.expected,
        )


def read_step(fields: tuple[Any, ...]) -> Step:
    """Return a request from the fields of its message after the channel; raise RemoteProtocolError if malformed."""
    number, weight, metrics, state, target, contributors, observes, hinted, expected = fields
    return Step(
        number=number,
        weight=weight,
        metrics=tuple(_pairs(metrics)),
        state=state,
        target=target,
        contributors=contributors,
        observes=observes,
        hinted=hinted,
        expected=checked(expected, (str,) * len(expected)),
    )


def check_topic(topic: str, seconds: float) -> None:
    """Raise RemoteProtocolError unless a board's topic is a short name, and its looks are not too frequent."""
    if not 0 < len(topic) <= MAX_TOPIC_CHARS or not topic.isprintable():
        raise RemoteProtocolError("a topic that is too long, or not printable")
    if not (0.1 <= seconds <= 3600 and math.isfinite(seconds)):
        raise RemoteProtocolError("a board with looks out of range")


def short(reason: str) -> str:
    """Return a reason that fits into a message."""
    return reason[:MAX_REASON_CHARS]


def check_digest(*digests: bytes) -> None:
    """Raise RemoteProtocolError unless each has the length of a digest."""
    if not all(len(digest) == DIGEST_BYTES for digest in digests):
        raise RemoteProtocolError("a digest of another length")


def read_update(fields: tuple[Any, ...], *, time: float, run_id: str, peer_id: str) -> UpdateTaken:
    """Return the event of an update that a process has taken, as one of its peer.

    Args:
        fields: of the message after the channel: epoch, lineage, id of the group, samples, metrics, pairs of a name and
            a number for what was measured, and whether the update was replayed.
        time: wall clock, seconds.

    Raises:
        RemoteProtocolError: something is out of range.
    """
    epoch, lineage, group_id, samples, metrics, measured, replayed = fields
    check_digest(lineage)
    numbers = dict(_pairs(measured))
    if not 0 < epoch <= MAX_EPOCH or not 0 <= samples <= MAX_WEIGHT * MAX_GROUP_SIZE or len(group_id) > 64:
        raise RemoteProtocolError("an update with numbers out of range")
    if not set(numbers) <= {"grad_norm", "update_norm", "learning_rate"} or len(metrics) > MAX_METRICS:
        raise RemoteProtocolError("an update with other measurements")
    found = _pairs(metrics)
    if not all(is_name(name) and abs(value) <= MAX_METRIC for name, value in found):
        raise RemoteProtocolError("metrics out of range")
    rate = numbers.get("learning_rate")
    return UpdateTaken(
        time=time,
        run_id=run_id,
        epoch=epoch,
        lineage=lineage,
        group_id=group_id,
        peers=(peer_id,),
        samples=samples,
        metrics=dict(found),
        grad_norm=numbers.get("grad_norm"),
        update_norm=numbers.get("update_norm"),
        learning_rates=() if rate is None else (rate,),
        replayed=replayed,
    )


def update_fields(event: UpdateTaken) -> tuple[Any, ...]:
    """Return the fields of the message of an update after its channel; see :func:`read_update`."""
    measured = {
        "grad_norm": event.grad_norm,
        "update_norm": event.update_norm,
        "learning_rate": next(iter(event.learning_rates), None),
    }
    return (
        event.epoch,
        event.lineage,
        event.group_id,
        float(event.samples),
        tuple((name, float(value)) for name, value in event.metrics.items()),
        tuple((name, float(value)) for name, value in measured.items() if value is not None),
        event.replayed,
    )


def read_donors(donors: tuple[Any, ...]) -> dict[str, tuple[str, ...]]:
    """Return the addresses of donors by peer id; raise RemoteProtocolError if malformed."""
    found = {}
    for pair in donors[:MAX_DONORS]:
        peer_id, addresses = checked(pair if isinstance(pair, tuple) else (), (str, tuple))
        found[peer_id] = checked(addresses, (str,) * len(addresses))
    return found


def _pairs(values: tuple[Any, ...]) -> list[tuple[str, float]]:
    pairs = [checked(pair if isinstance(pair, tuple) else (), (str, float)) for pair in values]
    return [(name, value) for name, value in pairs]
