"""Events in one peer, as its subscribers get them. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias

Direction: TypeAlias = Literal["download", "upload"]


class Way(StrEnum):
    """The ways of parts from one member to another."""

    LANE = "lane"
    """A direct lane: a TLS connection of its own."""
    STREAM = "stream"
    """A libp2p stream over a direct connection."""
    RELAYED = "relayed"
    """A libp2p stream through a relay."""


class RoundKind(StrEnum):
    """The kinds of results with which a round ends."""

    SUCCESS = "success"
    NO_PEERS = "no_peers"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that has happened in this peer."""

    time: float
    """Wall clock, seconds since 1970."""
    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEnded(Event):
    """A round of this peer has ended: see :class:`p2pavg.Success`, :class:`p2pavg.NoPeers`, :class:`p2pavg.Failed`."""

    result: RoundKind
    duration: float
    """Seconds from the ``step`` that began the round to its result."""
    reason: str = ""
    """The cause, unless the round succeeded."""
    code: str = ""
    """The cause for programs: a :class:`p2pavg.NoPeersCode` or :class:`p2pavg.FailedCode`; empty after a success."""
    peer: str | None = None
    """Id of the member that caused a failure, if there was one."""
    group_id: str = ""
    """Hex, 64 digits; empty if no group was found."""
    members: tuple[str, ...] = ()
    """Ids of all members, this peer included."""
    contributors: tuple[str, ...] = ()
    observers: tuple[str, ...] = ()
    auxiliaries: tuple[str, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    """Members that were dropped during the round, by id, with the reason."""
    clipped: tuple[str, ...] = ()
    """Ids of contributors whose contributions were shortened."""
    excluded: tuple[str, ...] = ()
    """Ids of all peers that are excluded from the run because evidence proves that they lied."""
    exchange_duration: float = 0.0
    """Seconds of ``duration`` from the group's commit on; 0 if no group was found."""
    agreement_duration: float = 0.0
    """Seconds of ``exchange_duration`` since this peer has held the whole result; 0 if it never did."""
    sent: Mapping[str, int] = field(default_factory=dict)
    """Bytes of parts that this peer has sent, by :class:`Way`."""
    received: Mapping[str, int] = field(default_factory=dict)
    """Bytes of parts that this peer has received, by :class:`Way`."""
    ways: Mapping[str, str] = field(default_factory=dict)
    """The :class:`Way` of the parts to and from each other member, by its id; the slowest one of several."""
    samples: float = 0.0
    """Sum of the weights in the average, of all contributors."""
    own_samples: float = 0.0
    """This peer's weight in the average; 0 if its contribution was not used."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means of the metrics, as :attr:`p2pavg.Success.metrics`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTaken(Event):
    """An optimizer has changed the parameters by an average of the run."""

    epoch: int
    """Updates since the run began, this one included."""
    lineage: bytes
    """State of the lineage after it, 32 bytes."""
    group_id: str
    """Of the round; empty for an update without a round."""
    peers: tuple[str, ...]
    """Ids of the contributors."""
    samples: float
    """Samples of all of them together."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    grad_norm: float | None = None
    """L2 norm of the averaged gradient or pseudo-gradient, before clipping."""
    update_norm: float | None = None
    """L2 norm of the change of the parameters, if the optimizer measures it."""
    learning_rates: tuple[float, ...] = ()
    """Of the parameter groups of the inner optimizer; the update was taken with them."""
    outer_rate: float | None = None
    """Of the outer step of local updates."""
    replayed: bool = False
    """True if this peer was not in the round, and took the average later, from the log of another peer."""
    certificate: bytes = field(default=b"", repr=False)
    """:attr:`p2pavg.Success.certificate`; empty for an update without a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed(Event):
    """An optimizer tells the other peers how far it is, several times between two updates."""

    epoch: int
    lineage: bytes
    """State of the lineage, 32 bytes."""
    samples: float
    """Samples that this peer has accumulated since the last update."""
    samples_per_second: float
    waiting: bool
    """True if it computes no more until the next update."""
    follows: bool
    """True if it replays the run's last updates, because it is behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMoved(Event):
    """A transfer of a state, or of an average of the log, has progressed; about once a second while it runs."""

    direction: Direction
    done: int
    """Bytes that are here and verified, or that were sent."""
    total: int
    """Bytes; 0 if it is not known, as of an upload that runs. In the last event of an upload it equals ``done``."""
    bytes_per_second: float
    peers: int
    """Peers that send to this one, or that this one sends to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drifted(Event):
    """Peers of the same lineage report other parameters than this peer's, or do so no more."""

    sentence: str
    """Empty if all peers agree again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits(Event):
    """A ``step`` of this peer's optimizer waits for other peers; about once a second while it does."""

    reason: str
    seconds: float
    """Time for which this call has waited."""
    peers: tuple[str, ...] = ()
    """Ids of the peers that it waits for, as far as they are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSeen(Event):
    """Another peer of the run has published its status for the first time, or again after it was gone."""

    peer_id: str
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGone(Event):
    """The status of another peer of the run was withdrawn, or has expired."""

    peer_id: str


AnyEvent: TypeAlias = (
    RoundEnded | UpdateTaken | Progressed | StateMoved | Drifted | Waits | PeerSeen | PeerGone
)
