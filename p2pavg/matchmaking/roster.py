"""Who is ready, and who is in: what peers say of themselves, signed, and what a leader makes of it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from p2pavg.allreduce.partition import MemberLink, fastest_shares, levelled
from p2pavg.config import MAX_CODEC_CHARS, MAX_GROUP_SIZE
from p2pavg.errors import RemoteProtocolError
from p2pavg.net.wire import checked, pack, unpack
from p2pavg_dht import ContactError, Record, RecordError, Signer, sign_record, verify
from p2pavg_dht.contact import check_addresses
from p2pavg_dht.record import pack as pack_record
from p2pavg_dht.record import unpack as unpack_record

MAX_WEIGHT = 1e15
MAX_BANDWIDTH = 1e6  # Mbit/s

_KEY_DOMAIN = "p2pavg/ready/1"
_ROSTER_DOMAIN = b"p2pavg-roster/1\0"


def ready_key(run_id: str, schema_hash: bytes, bucket: int = 0) -> bytes:
    """The key under which peers of a run with one schema say that they are ready."""
    return hashlib.sha256(pack(_KEY_DOMAIN, run_id, schema_hash, bucket)).digest()


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
    addresses: tuple[str, ...]
    record: Record = field(repr=False)

    @property
    def order(self) -> tuple[bool, float, str]:
        """A peer asks only candidates of a lower order; auxiliaries come last and so never lead anybody."""
        return (self.auxiliary, self.deadline, self.peer_id)


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
) -> Candidate:
    """This peer's own word that it is ready."""
    value = pack(1, float(deadline), float(weight), float(bandwidth), codec, auxiliary, tuple(addresses))
    record = sign_record(
        signer, key=key, sequence=int(deadline * 1e6), expiration_time=expiration_time, value=value
    )
    return read_candidate(record)


def read_candidate(record: Record) -> Candidate:
    """What a record under a ready key says. Its signature and expiry are the caller's to check.

    Raises:
        RemoteProtocolError: the value is not what a peer that is ready says.
    """
    version, deadline, weight, bandwidth, codec, auxiliary, addresses = unpack(
        record.value, int, float, float, float, str, bool, tuple
    )
    if version != 1:
        raise RemoteProtocolError(f"readiness of version {version}")
    if not 0 <= weight <= MAX_WEIGHT or (weight == 0) != auxiliary:
        raise RemoteProtocolError(f"weight {weight} of {'an auxiliary' if auxiliary else 'a contributor'}")
    if not 0 < bandwidth <= MAX_BANDWIDTH or not is_codec_name(codec) or deadline < 0:
        raise RemoteProtocolError("bandwidth, codec or deadline out of range")
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
        record=record,
    )


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
    """How a vector is cut among members, from what they signed alone: everybody computes the same."""

    def cut(members: Sequence[Candidate]) -> tuple[int, ...]:
        return fastest_shares(elements, levelled([link_of(member) for member in members]), granularity)

    return cut


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The agreed members of one group, the leader first, with what each signed and its share.

    Raises:
        RemoteProtocolError: an impossible roster; every member's record is under the same key.
    """

    members: tuple[Candidate, ...]
    shares: tuple[int, ...]
    """Elements of the vector that each member reduces, in the members' order."""
    proposal: int
    """Counts the leader's proposals, so that no two rosters have one id."""

    def __post_init__(self) -> None:
        ids = [member.peer_id for member in self.members]
        if not 2 <= len(ids) <= 2 * MAX_GROUP_SIZE:
            raise RemoteProtocolError(f"a roster of {len(ids)} members")
        if len(set(ids)) != len(ids):
            raise RemoteProtocolError("a roster names a peer twice")
        if self.members[0].auxiliary or len(self.contributors) < 2:
            raise RemoteProtocolError("a roster of fewer than two contributors, or led by an auxiliary")
        if len({member.record.key for member in self.members}) != 1:
            raise RemoteProtocolError("a roster of peers of different runs")
        if len({member.codec for member in self.members}) != 1:
            raise RemoteProtocolError("a roster of peers with different codecs")
        if len(self.shares) != len(ids) or any(share < 0 for share in self.shares):
            raise RemoteProtocolError("a roster whose shares do not fit its members")
        if not sum(member.weight for member in self.members) < math.inf:  # fsum raises
            raise RemoteProtocolError("a roster whose weights overflow")

    @property
    def contributors(self) -> tuple[Candidate, ...]:
        """The members whose contributions are averaged."""
        return tuple(member for member in self.members if not member.auxiliary)

    @property
    def total_weight(self) -> float:
        """Sum of the contributors' weights."""
        return math.fsum(member.weight for member in self.members)

    def position(self, peer_id: str) -> int:
        """Where a member stands in the roster. ValueError for a stranger."""
        return [member.peer_id for member in self.members].index(peer_id)

    def pack(self) -> bytes:
        """The roster's one encoding."""
        return pack(tuple(pack_record(member.record) for member in self.members), self.shares, self.proposal)

    @cached_property
    def group_id(self) -> bytes:
        """SHA-256 of the roster: 32 bytes in the header of every stream of this group."""
        return hashlib.sha256(_ROSTER_DOMAIN + self.pack()).digest()


def read_roster(packed: bytes) -> Roster:
    """A roster out of a message, every member's signature checked.

    Raises:
        RemoteProtocolError: malformed, forged or impossible.
    """
    records, shares, proposal = unpack(packed, tuple, tuple, int)
    if len(records) > 2 * MAX_GROUP_SIZE:
        raise RemoteProtocolError(f"a roster of {len(records)} members")
    checked(shares, (int,) * len(shares))
    return Roster(members=tuple(map(read_signed_candidate, records)), shares=shares, proposal=proposal)
