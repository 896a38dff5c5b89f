"""Who is ready, and who is in: what peers say of themselves, signed, and what a leader makes of it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from p2pavg.config import MAX_BANDWIDTH, MAX_CODEC_CHARS, MAX_GROUP_SIZE, MAX_WEIGHT, MIN_BANDWIDTH
from p2pavg.encoding import checked, pack, unpack
from p2pavg.errors import RemoteProtocolError
from p2pavg.group.names import MAX_METRIC, MAX_METRICS, MAX_TAGS, is_name
from p2pavg.group.shares import MemberLink, fastest_shares, largest_fraction, levelled
from p2pavg_dht import ContactError, Record, RecordError, Signer, sign_record, verify
from p2pavg_dht.contact import check_addresses
from p2pavg_dht.record import pack as pack_record
from p2pavg_dht.record import unpack as unpack_record

MAX_STATE_BYTES = 32
MAX_MEMBERS = 2 * MAX_GROUP_SIZE
"""Of a roster: a group's contributors and observers, and at most as many auxiliaries."""

_KEY_DOMAIN = "p2pavg/ready/3"
_ROSTER_DOMAIN = b"p2pavg-roster/2\0"


def ready_key(run_id: str, schema_hash: bytes, rule: str = "") -> bytes:
    """The key under which peers of a run with one schema, and one rule of who contributes, say that they are ready."""
    return hashlib.sha256(pack(_KEY_DOMAIN, run_id, schema_hash, rule)).digest()


def is_codec_name(name: str) -> bool:
    """Whether a codec may be called that: a stranger's words end up in logs and results."""
    return 0 < len(name) <= MAX_CODEC_CHARS and name.isprintable()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A peer that says it is ready, as it signed it.

    ``deadline`` (wall clock, seconds) also names the attempt: a peer never uses one twice.
    """

    peer_id: str
    deadline: float
    weight: float
    bandwidth: float
    codec: str
    auxiliary: bool
    """Whether it has no vector: it reduces a share, and takes no result."""
    addresses: tuple[str, ...]
    state: bytes
    """Of what the vector belongs to, e.g. which parameters gradients are of; only peers of one state meet."""
    tags: tuple[str, ...]
    """What it says that it can, e.g. ``gpu``."""
    metrics: tuple[tuple[str, float], ...]
    """What it measured while it accumulated."""
    record: Record = field(repr=False)

    @property
    def order(self) -> tuple[bool, bool, float, str]:
        """A peer asks only candidates of a lower order.

        Auxiliaries come last and so never lead. Peers that announce no address come after those that do: other peers
        could not ask them.
        """
        return (self.auxiliary, not self.addresses, self.deadline, self.peer_id)

    def fits(self, other: Candidate) -> bool:
        """Whether the two may be in one group. An auxiliary helps with any state."""
        return self.codec == other.codec and (self.state == other.state or self.auxiliary or other.auxiliary)


def sign_candidate(
    signer: Signer,
    *,
    key: bytes,
    deadline: float,
    expiration_time: float,
    weight: float,
    bandwidth: float,
    codec: str,
    auxiliary: bool,
    addresses: Sequence[str],
    state: bytes = b"",
    tags: Sequence[str] = (),
    metrics: Mapping[str, float] = MappingProxyType({}),
) -> Candidate:
    """This peer's own word that it is ready."""
    value = pack(
        2,
        float(deadline),
        float(weight),
        float(bandwidth),
        codec,
        auxiliary,
        tuple(addresses),
        state,
        tuple(tags),
        tuple((name, float(metrics[name])) for name in sorted(metrics)),
    )
    record = sign_record(
        signer, key=key, sequence=int(deadline * 1e6), expiration_time=expiration_time, value=value
    )
    return read_candidate(record)


def read_candidate(record: Record) -> Candidate:
    """What a record under a ready key says. Its signature and expiry are the caller's to check.

    Raises:
        RemoteProtocolError: the value is not what a peer that is ready says.
    """
    version, deadline, weight, bandwidth, codec, auxiliary, addresses, state, tags, metrics = unpack(
        record.value, int, float, float, float, str, bool, tuple, bytes, tuple, tuple
    )
    if version != 2:
        raise RemoteProtocolError(f"readiness of version {version}")
    if not 0 <= weight <= MAX_WEIGHT or (auxiliary and weight):
        raise RemoteProtocolError(f"weight {weight} of {'an auxiliary' if auxiliary else 'a peer'}")
    if len(state) > MAX_STATE_BYTES:
        raise RemoteProtocolError(f"a state of {len(state)} bytes")
    if not MIN_BANDWIDTH <= bandwidth <= MAX_BANDWIDTH:
        raise RemoteProtocolError(
            f"a bandwidth of {bandwidth:g} Mbit/s; {MIN_BANDWIDTH:g} to {MAX_BANDWIDTH:g} can be announced"
        )
    if not is_codec_name(codec) or deadline < 0:
        raise RemoteProtocolError("codec or deadline out of range")
    try:
        check_addresses(addresses)
    except ContactError as error:
        raise RemoteProtocolError(error.reason) from None
    return Candidate(
        peer_id=record.publisher,
        deadline=deadline,
        weight=weight,
        bandwidth=bandwidth,
        codec=codec,
        auxiliary=auxiliary,
        addresses=addresses,
        state=state,
        tags=_read_tags(tags),
        metrics=_read_metrics(metrics),
        record=record,
    )


def _read_tags(tags: tuple[Any, ...]) -> tuple[str, ...]:
    if len(tags) > MAX_TAGS or not all(map(is_name, checked(tags, (str,) * len(tags)))):
        raise RemoteProtocolError("tags that are too many, too long or not printable")
    return tags


def _read_metrics(metrics: tuple[Any, ...]) -> tuple[tuple[str, float], ...]:
    if len(metrics) > MAX_METRICS:
        raise RemoteProtocolError(f"{len(metrics)} metrics")
    names = [checked(metric, (str, float))[0] for metric in checked(metrics, (tuple,) * len(metrics))]
    if not all(map(is_name, names)) or names != sorted(set(names)):
        raise RemoteProtocolError("metrics whose names are too long, not printable, or out of order")
    if any(abs(value) > MAX_METRIC for _, value in metrics):
        raise RemoteProtocolError("a metric out of range")
    return metrics


def read_signed_candidate(fields: Any) -> Candidate:
    """A candidate out of a message: the record's fields, checked against its signature.

    Raises:
        RemoteProtocolError: malformed or forged.
    """
    try:
        record = unpack_record(fields)
        verify(record)
    except RecordError as error:
        raise RemoteProtocolError(error.reason) from None
    return read_candidate(record)


def link_of(member: Candidate) -> MemberLink:
    """What a member signed of its link; without an address nobody can dial it."""
    return MemberLink(member.bandwidth, contributes=not member.auxiliary, reachable=bool(member.addresses))


def share_cutter(elements: int, granularity: int) -> Callable[[Sequence[Candidate]], tuple[int, ...]]:
    """Return how a vector is cut among members, from what they signed alone: every member computes the same."""

    def cut(members: Sequence[Candidate]) -> tuple[int, ...]:
        links = levelled([link_of(member) for member in members])
        return fastest_shares(elements, links, granularity, largest_fraction(links))

    return cut


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The agreed members of one group, the leader first, with what each signed and its share.

    Members are contributors, whose vectors are averaged; observers, which hold the result as well and have nothing in
    it; and auxiliaries, which have no vector.

    Raises:
        RemoteProtocolError: an impossible roster; every member's record is under the same key.
    """

    members: tuple[Candidate, ...]
    shares: tuple[int, ...]
    """Elements of the vector that each member reduces, in the members' order."""
    proposal: int
    """Counts the leader's proposals, so that no two rosters have one id."""
    observers: frozenset[str] = frozenset()
    """Ids of the members that only observe in this round, whatever weight they signed."""

    def __post_init__(self) -> None:
        ids = [member.peer_id for member in self.members]
        if not 2 <= len(ids) <= MAX_MEMBERS:
            raise RemoteProtocolError(f"a roster of {len(ids)} members")
        if len(set(ids)) != len(ids):
            raise RemoteProtocolError("a roster names a peer twice")
        if self.members[0].auxiliary or len(self.holders) < 2:
            raise RemoteProtocolError("a roster of fewer than two contributors, or led by an auxiliary")
        if not self.contributors:
            raise RemoteProtocolError("a roster of which nobody contributes")
        if self.observers - {member.peer_id for member in self.holders} or any(
            member.weight == 0 and member.peer_id not in self.observers for member in self.holders
        ):
            raise RemoteProtocolError("a roster whose observers do not fit its members")
        if len({member.record.key for member in self.members}) != 1:
            raise RemoteProtocolError("a roster of peers of different runs")
        if len({member.codec for member in self.members}) != 1:
            raise RemoteProtocolError("a roster of peers with different codecs")
        if len({member.state for member in self.holders}) != 1:
            raise RemoteProtocolError("a roster of peers with different states")
        if len(self.shares) != len(ids) or any(share < 0 for share in self.shares):
            raise RemoteProtocolError("a roster whose shares do not fit its members")
        if not sum(member.weight for member in self.members) < math.inf:  # fsum raises
            raise RemoteProtocolError("a roster whose weights overflow")

    @cached_property
    def contributors(self) -> tuple[Candidate, ...]:
        """The members whose contributions are averaged."""
        return tuple(member for member in self.holders if member.peer_id not in self.observers)

    @cached_property
    def holders(self) -> tuple[Candidate, ...]:
        """The members that hold the result when the round has succeeded: contributors and observers."""
        return tuple(member for member in self.members if not member.auxiliary)

    @property
    def total_weight(self) -> float:
        """Sum of the contributors' weights."""
        return math.fsum(member.weight for member in self.contributors)

    @property
    def metrics(self) -> dict[str, float]:
        """Of each metric that a contributor measured, the mean by weight over those that did."""
        sums: dict[str, list[tuple[float, float]]] = {}
        for member in self.contributors:
            for name, value in member.metrics:
                sums.setdefault(name, []).append((member.weight, value))
        return {name: _mean(found) for name, found in sorted(sums.items())}

    def only(self, members: Sequence[Candidate], shares: Sequence[int]) -> Roster:
        """The same round among some of its members, with other shares."""
        left = self.observers & {member.peer_id for member in members}
        return Roster(members=tuple(members), shares=tuple(shares), proposal=self.proposal, observers=left)

    def position(self, peer_id: str) -> int:
        """Where a member stands in the roster. ValueError for a stranger."""
        return [member.peer_id for member in self.members].index(peer_id)

    def pack(self) -> bytes:
        """The roster's one encoding."""
        return pack(
            tuple(pack_record(member.record) for member in self.members),
            self.shares,
            self.proposal,
            tuple(index for index, member in enumerate(self.members) if member.peer_id in self.observers),
        )

    @cached_property
    def group_id(self) -> bytes:
        """SHA-256 of the roster: 32 bytes in the header of every stream of this group."""
        return hashlib.sha256(_ROSTER_DOMAIN + self.pack()).digest()


def read_roster(packed: bytes) -> Roster:
    """A roster out of a message, every member's signature checked.

    Raises:
        RemoteProtocolError: malformed, forged or impossible.
    """
    records, shares, proposal, observing = unpack(packed, tuple, tuple, int, tuple)
    if len(records) > MAX_MEMBERS:
        raise RemoteProtocolError(f"a roster of {len(records)} members")
    checked(shares, (int,) * len(shares))
    if observing != tuple(
        sorted(set(checked(observing, (int,) * len(observing))) & set(range(len(records))))
    ):
        raise RemoteProtocolError("a roster whose observers do not fit its members")
    members = tuple(map(read_signed_candidate, records))
    observers = frozenset(members[index].peer_id for index in observing)
    return Roster(members=members, shares=shares, proposal=proposal, observers=observers)


def _mean(found: Sequence[tuple[float, float]]) -> float:
    """By weight, without leaving the range of the values."""
    total = math.fsum(weight for weight, _ in found)
    return math.fsum(weight / total * value for weight, value in found)
