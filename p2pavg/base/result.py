"""The results of ``step``. Whatever the network does becomes one of these, never an exception. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from p2pavg.base.codes import FailedCode, NoPeersCode

Path: TypeAlias = Literal["lane", "stream"]
Tensors: TypeAlias = list[torch.Tensor] | dict[str, torch.Tensor]


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
