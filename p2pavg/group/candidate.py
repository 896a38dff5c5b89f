"""Candidates: peers that are ready for a round, as they signed it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated

from msgspec import Meta

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import (
    MAX_BANDWIDTH,
    MAX_CERTIFICATE_BYTES,
    MAX_CODEC_CHARS,
    MAX_METRIC,
    MAX_METRICS,
    MAX_NORM,
    MAX_STATE_BYTES,
    MAX_TAGS,
    MAX_WEIGHT,
    MIN_BANDWIDTH,
)
from p2pavg.base.messages import Message, Seconds, pack
from p2pavg.base.numbers import is_name
from p2pavg.group.bandwidth import DEFAULT_MBPS
from p2pavg.group.reach import Reach
from p2pavg.group.shares import MemberLink
from p2pavg_dht import ContactError, Record, RecordError, Signer, sign_record, verify
from p2pavg_dht.identity import MAX_ADDRESSES, check_addresses

_KEY_DOMAIN = "p2pavg/ready/6"  # new with each protocol of an exchange: peers of two protocols form no group
_Metric = Annotated[float, Meta(ge=-MAX_METRIC, le=MAX_METRIC)]


def ready_key(run_id: str, schema_hash: bytes, rule: str = "", aggregation: str = "") -> bytes:
    """Return the key of the readiness records of a run's peers that share a schema and two rules.

    Args:
        rule: text of the participation rule; empty without one.
        aggregation: text of :class:`~p2pavg.group.aggregation.Aggregation`; empty for the weighted mean.
    """
    return hashlib.sha256(pack(_KEY_DOMAIN, run_id, schema_hash, rule, aggregation)).digest()


def is_codec_name(name: str) -> bool:
    """Return whether a codec may have this name. Names of strangers end up in logs and results."""
    return 0 < len(name) <= MAX_CODEC_CHARS and name.isprintable()


class Readiness(Message, frozen=True, kw_only=True, tag=5):
    """The fields that a peer signs when it is ready for a round; :class:`Candidate` says what the fields mean."""

    deadline: Seconds
    weight: Annotated[float, Meta(ge=0.0, le=MAX_WEIGHT)]
    bandwidth: Annotated[float, Meta(ge=0.0, le=MAX_BANDWIDTH)]
    codec: Annotated[str, Meta(max_length=MAX_CODEC_CHARS)]
    auxiliary: bool
    addresses: Annotated[tuple[str, ...], Meta(max_length=MAX_ADDRESSES)]
    state: Annotated[bytes, Meta(max_length=MAX_STATE_BYTES)]
    tags: Annotated[tuple[str, ...], Meta(max_length=MAX_TAGS)]
    metrics: Annotated[tuple[tuple[str, _Metric], ...], Meta(max_length=MAX_METRICS)]
    certificate: Annotated[bytes, Meta(max_length=MAX_CERTIFICATE_BYTES)]
    norm: Annotated[float, Meta(ge=0.0, le=MAX_NORM)]
    reach: Reach
    site: str

    def __post_init__(self) -> None:
        # An auxiliary has no vector, so nothing of it can count in the mean.
        if self.auxiliary and self.weight:
            raise ValueError(f"weight {self.weight} of an auxiliary")
        # Without a contribution, there is nothing that could have a length.
        if self.norm and not self.weight:
            raise ValueError(f"a norm of {self.norm:g} of no contribution")
        # 0 says that the peer does not know it yet. All other numbers decide over shares, and are only claims.
        if 0 < self.bandwidth < MIN_BANDWIDTH:
            raise ValueError(
                f"a bandwidth of {self.bandwidth:g} Mbit/s; {MIN_BANDWIDTH:g} at least can be announced"
            )
        # Names, tags and sites of strangers end up in logs and statuses.
        if not is_codec_name(self.codec):
            raise ValueError("a codec without a name, or with one that is not printable")
        try:
            # Only their number and form. The dial gate decides later which of them are dialled.
            check_addresses(self.addresses)
        except ContactError as error:
            raise ValueError(str(error)) from None
        # Without an address, a peer can only be relayed. With another reach, it would come too early in the order.
        if self.reach != Reach.RELAYED and not self.addresses:
            raise ValueError(f"a reach of {self.reach} with no addresses")
        if self.site and (self.auxiliary or not is_name(self.site)):
            raise ValueError("a site of an auxiliary, or one whose name is too long or not printable")
        if not all(map(is_name, self.tags)):
            raise ValueError("tags that are too long or not printable")
        names = [name for name, _ in self.metrics]
        # In order and without repeats, so that each name has one value.
        if not all(map(is_name, names)) or names != sorted(set(names)):
            raise ValueError("metrics whose names are too long, not printable, or out of order")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A peer that is ready for a round, with everything that it signed about itself.

    ``deadline`` (wall clock, seconds) also names the peer's attempt: a peer never uses a deadline twice.
    """

    peer_id: str
    deadline: float
    weight: float
    bandwidth: float
    """Mbit/s in the slower direction; 0 if the peer does not know it yet."""
    codec: str
    auxiliary: bool
    """True for a peer without a vector: it reduces a share and takes no result."""
    addresses: tuple[str, ...]
    state: bytes
    """Name of the state that the vector belongs to, e.g. the parameters of the gradients. Groups have one state."""
    tags: tuple[str, ...]
    """Capabilities that the peer claims, e.g. ``gpu``."""
    metrics: tuple[tuple[str, float], ...]
    """Metrics that the peer measured while it accumulated, as (name, value), sorted by name."""
    certificate: bytes = field(repr=False)
    """The peer's certificate of membership; empty in a run without an authority. It is not checked here."""
    norm: float
    """Euclidean norm of the peer's contribution; 0 if the run bounds no norms (:mod:`p2pavg.group.roster`)."""
    reach: Reach
    """Way to connect to the peer. A peer without an address can only be relayed."""
    site: str
    """Name of the site that the peer says it is in; empty if it names none (:mod:`p2pavg.group.roster`)."""
    record: Record = field(repr=False)

    @property
    def order(self) -> tuple[bool, Reach, bool, float, str]:
        """Position in the total order of candidates. A peer asks only candidates that come before it.

        Auxiliaries come last, so they never lead. Peers that can be dialled come before those that can only be reached
        by hole punching, and these before those that a relay has to reach, because all members connect to the leader.
        Peers without an address, which no relay can reach either, come after the others of their kind.
        """
        return (self.auxiliary, self.reach, not self.addresses, self.deadline, self.peer_id)

    @property
    def assumed_bandwidth(self) -> float:
        """Mbit/s in the slower direction, or an assumption of it; above 0."""
        return self.bandwidth or DEFAULT_MBPS

    def fits(self, other: Candidate) -> bool:
        """Return whether the two may be in one group. An auxiliary helps with any state."""
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
    certificate: bytes = b"",
    norm: float = 0.0,
    reach: Reach = Reach.DIALABLE,
    site: str = "",
) -> Candidate:
    """Sign this peer's own candidate. Without an address, the peer counts as relayed whatever ``reach`` is."""
    # Readers refuse whole numbers, so they become floats here.
    value = Readiness(
        deadline=float(deadline),
        weight=float(weight),
        bandwidth=float(bandwidth),
        codec=codec,
        auxiliary=auxiliary,
        addresses=tuple(addresses),
        state=state,
        tags=tuple(tags),
        metrics=tuple((name, float(metrics[name])) for name in sorted(metrics)),
        certificate=certificate,
        norm=float(norm),
        reach=reach if addresses else Reach.RELAYED,
        site=site,
    ).encode()
    # The deadline names the attempt, and keepers keep the record with the highest sequence.
    record = sign_record(
        signer, key=key, sequence=int(deadline * 1e6), expiration_time=expiration_time, value=value
    )
    # Through the checks of the readers, so that a peer publishes nothing that all others would refuse.
    return read_candidate(record)


def read_candidate(record: Record) -> Candidate:
    """Read a candidate from a record under a ready key. The caller checks signature and expiry.

    Raises:
        RemoteProtocolError: the value is not a candidate, or one of its fields is out of range.
    """
    said = Readiness.decode(record.value)
    fields = {name: getattr(said, name) for name in said.__struct_fields__}
    return Candidate(peer_id=record.publisher, record=record, **fields)


def read_signed_candidate(record: Record) -> Candidate:
    """Read a candidate from a record in a message, and check its signature.

    Raises:
        RemoteProtocolError: the record is forged, or no candidate.
    """
    try:
        # Before the value is read: a leader passes on the candidates of others, and could change them.
        verify(record)
    except RecordError as error:
        raise RemoteProtocolError(str(error)) from None
    return read_candidate(record)


def link_of(member: Candidate) -> MemberLink:
    """Return the link that a member signed."""
    return MemberLink(member.bandwidth, contributes=not member.auxiliary, reach=member.reach)
