"""The results of ``step``. Whatever the network does becomes one of these, never an exception. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias

import torch

# Codes of the results that are no success, for programs; the sentence beside each is for people.
#
# The values are stable: programs, dashboards and alerts may compare and store them. A later version may add values.


class NoPeersCode(StrEnum):
    """The reason why a round has found no group. :attr:`remedy` says what to do."""

    NOTHING_ACCUMULATED = "nothing_accumulated"
    """Nothing waits for a round."""
    NO_PEER_READY = "no_peer_ready"
    """No other peer of the run was ready in time."""
    UNREACHABLE = "unreachable"
    """Other peers were ready, and this one could not reach them, or they did not answer."""
    REFUSED = "refused"
    """Other peers were ready, and this peer refuses them, e.g. because they lied or are no members of the run."""
    NOT_ADMITTED = "not_admitted"
    """This peer's own certificate does not hold: it has ended, or was revoked."""
    OTHER_PARAMETERS = "other_parameters"
    """Peers of the run were ready with other parameters (another state) than this one."""
    OTHER_SETTINGS = "other_settings"
    """Peers of the run average other tensors, or with another codec or rule."""
    CLOCK_OR_VERSION = "clock_or_version"
    """No peer was ready, and this peer's clock or protocol versions differ from those of the peers that it knows."""
    CANCELLED = "cancelled"
    """The caller cancelled matchmaking."""
    NO_GROUP = "no_group"
    """The attempt ended without a group for another reason, which the sentence gives."""

    @property
    def remedy(self) -> str:
        """A sentence on what to do."""
        return _NO_PEERS_REMEDIES[self]


class FailedCode(StrEnum):
    """The reason why a round with a group gave this peer no result. :attr:`remedy` says what to do."""

    TIMED_OUT = "timed_out"
    """The exchange took longer than ``exchange_timeout``."""
    PEERS_LOST = "peers_lost"
    """So many members were lost that those left could not end the round."""
    LEFT_OUT = "left_out"
    """The others gave this peer up, and ended the round without it."""
    RESULT_MISSED = "result_missed"
    """The others have a result with this peer's contribution, and this peer lacks it."""
    RESULTS_DIFFER = "results_differ"
    """This peer holds another result than the other members."""
    OTHER_RANK = "other_rank"
    """Another rank of this peer has no result, or is still in a round."""
    PARAMETERS_REPLACED = "parameters_replaced"
    """The round averaged parameters that were replaced meanwhile."""
    TOO_FAR_APART = "too_far_apart"
    """The members of the group were too many outer steps apart to average."""
    OTHER = "other"
    """A program made this result, and gave no code."""

    @property
    def remedy(self) -> str:
        """A sentence on what to do."""
        return _FAILED_REMEDIES[self]


_NO_PEERS_REMEDIES = {
    NoPeersCode.NOTHING_ACCUMULATED: "call accumulate() before step(), or declare() and step(observe=True)",
    NoPeersCode.NO_PEER_READY: "start another peer of the run, and check that both bootstrap from the same network",
    NoPeersCode.UNREACHABLE: "run `p2pavg doctor` on both machines; open a port, or start a peer that relays",
    NoPeersCode.REFUSED: "ask the owners of the named peers; the sentence has the reason",
    NoPeersCode.NOT_ADMITTED: "ask the run's owner for a new certificate: `p2pavg run invite`",
    NoPeersCode.OTHER_PARAMETERS: "load the run's state (RunState), or start from the same seed or checkpoint",
    NoPeersCode.OTHER_SETTINGS: "give all peers of the run the same model, codec and rules",
    NoPeersCode.CLOCK_OR_VERSION: "set this machine's clock by NTP, and install the version that the run uses",
    NoPeersCode.CANCELLED: "call step() again when a round is wanted",
    NoPeersCode.NO_GROUP: "call step() again; if it happens again, run `p2pavg doctor`",
}

_FAILED_REMEDIES = {
    FailedCode.TIMED_OUT: "call step() again; if it happens again, raise exchange_timeout or use a smaller codec",
    FailedCode.PEERS_LOST: "call step() again: the next round is among the peers that are left",
    FailedCode.LEFT_OUT: "call step() again; if it happens again, check this machine's link with `p2pavg doctor`",
    FailedCode.RESULT_MISSED: "fetch the run's state (RunState): the others are one update ahead",
    FailedCode.RESULTS_DIFFER: "call step() again; if it happens again, the sentence names the peer that lies",
    FailedCode.OTHER_RANK: "call step() again on all ranks",
    FailedCode.PARAMETERS_REPLACED: "call step() again: the next round averages the present parameters",
    FailedCode.TOO_FAR_APART: "load the saved state of another peer on the one that is behind, or raise max_lag",
    FailedCode.OTHER: "read the sentence",
}


Path: TypeAlias = Literal["lane", "stream"]
Tensors: TypeAlias = list[torch.Tensor] | dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DrawnContribution:
    """A part of another member's contribution, as it came, for a spot check."""

    peer_id: str
    weight: float
    """Its samples, as its peer has signed."""
    parts: tuple[tuple[int, int, bytes], ...] = field(repr=False)
    """Start and stop in elements of the flat vector, and the values between them as the run's codec encoded them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Success:
    """A group averaged. ``averaged`` is the average of the contributions of ``peers``, and of no other peer.

    It is their weighted mean, or what :attr:`AveragingConfig.robust` names.

    Two members of one group that return ``Success`` hold the same bits.
    """

    averaged: Tensors
    """Tensors in the order, shapes, dtypes and (for a mapping) names given to ``accumulate``; on the same devices."""
    peers: tuple[str, ...]
    """Ids of the peers whose contributions are in ``averaged``, this peer included."""
    weights: Mapping[str, float]
    """The weight of each of ``peers``, in samples."""
    total_weight: float
    """Sum of ``weights``."""
    compression_ratio: float
    """Bytes that the same exchange takes in fp32, divided by the bytes sent and received."""
    bytes_sent: int
    bytes_received: int
    duration: float
    """Seconds from the ``step`` that began the round to its result."""
    exchange_duration: float
    """Seconds of ``duration`` from the group's commit on."""
    group_id: str
    """Hex of the SHA-256 of the roster with which the group began. Of an update that a peer took alone, hex of a digest
    of its id and its state."""
    share: tuple[int, int]
    """Start and stop, in elements of the flat vector, of the share that this peer reduced. Within it, the peer's own
    contribution was averaged unencoded, as within :attr:`taken_over`; elsewhere, and with a sparse codec everywhere, as
    its codec encoded it."""
    taken_over: tuple[tuple[int, int], ...] = ()
    """Further ranges that this peer reduced, in place of members that were lost."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Mean of each metric given to ``accumulate``, by weight, over the ``peers`` that gave it. In a run with a robust
    rule it is the median, in which each peer counts once. All members of a group have the same values."""
    observers: tuple[str, ...] = ()
    """Ids of members that hold the result and contributed nothing."""
    auxiliaries: tuple[str, ...] = ()
    """Ids of members that reduced a share and contributed nothing."""
    paths: Mapping[str, Path] = field(default_factory=dict)
    """The path of the parts to and from each other member, by its id: ``"lane"`` for a direct lane, ``"stream"`` if
    parts went over a libp2p stream one way or the other, because no direct lane came about or one broke."""
    clipped: tuple[str, ...] = ()
    """Ids of those of ``peers`` whose contributions were longer than :attr:`AveragingConfig.max_norm` allows, and were
    shortened."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Members that were dropped during the round, by id, with the reason. A dropped member that is also in ``peers``
    had delivered everything."""
    drawn: tuple[DrawnContribution, ...] = ()
    """Contributions of other members that this peer was drawn to compute again; see :attr:`AveragingConfig.recheck`."""
    left_out: torch.Tensor | None = None
    """The weighted mean minus ``averaged``, for the elements of :attr:`share` and then of :attr:`taken_over`: float32,
    flat, on the CPU. That is what the encoding of the average lost, which this peer alone knows. ``None`` with codecs
    that do without error feedback, and with sparse ones."""
    certificate: bytes = b""
    """Proof that the members signed that they hold the same bits, at most 272 KiB. Every round gives one:
    :func:`p2pavg.verify_certificate` checks it anywhere. Empty for an update that a peer took alone."""


EXCHANGES = "the group exchanges"
"""The ``reason`` of :class:`InProgress` once the round has its group."""
FORMS = "a group is being formed"
"""The same before that, unless a match timeout has just passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InProgress:
    """A round is running. A later ``step`` collects its result; the caller repeats nothing."""

    ready_peers: int
    """Peers known to be ready, this one included."""
    target_size: int
    """The group size that is aimed at."""
    reason: str = ""
    """Description of the event that the round waits for."""
    waits_for: str = ""
    """While the group exchanges: the members that this peer waits for, and how much they owe, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPeers:
    """There is no peer to average with, or nothing to average. The accumulated tensors are kept."""

    reason: str = "no other peer is ready"
    code: NoPeersCode = NoPeersCode.NO_PEER_READY
    """The reason for programs; ``code.remedy`` says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A group formed, but this peer has no result.

    The accumulated tensors are kept, subject to :attr:`contribution_used`.
    """

    reason: str
    """The cause, with the id of the peer concerned."""
    code: FailedCode = FailedCode.OTHER
    """The cause for programs; ``code.remedy`` says what to do."""
    peer: str | None = None
    """Id of the member whose loss or exclusion caused the failure, if there was one."""
    contribution_used: bool | None = False
    """``True``: the contribution is used up, because the other members' ``Success`` contains it. It also counts as used
    when every member that could tell is dead and had heard that this peer holds the result. ``None``: this peer was cut
    off and does not know. It goes on asking for ten minutes. If it hears that the contribution was not used, the
    contribution is accumulated again."""


RoundResult: TypeAlias = Success | InProgress | NoPeers | Failed
