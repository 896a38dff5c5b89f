"""What a call of ``step`` can come to. What the network did is one of these, never an exception."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

Path: TypeAlias = Literal["lane", "stream"]
Tensors: TypeAlias = list[torch.Tensor] | dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Success:
    """A group averaged. Everything in ``averaged`` is the average of ``peers``, and of nobody else.

    Two members of one group that return ``Success`` hold the same bits.
    """

    averaged: Tensors
    """Tensors in the order, shapes, dtypes and (for a mapping) names given to ``accumulate``; on the same devices."""
    peers: tuple[str, ...]
    """Ids of those whose contribution is in ``averaged``, this peer included."""
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
    """Hex of the SHA-256 of the roster."""
    share: tuple[int, int]
    """Where the share that this peer reduced starts and stops, in elements of the flat vector. Of it the peer's own
    contribution was averaged as it was; of everything else, as its codec encoded it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of each metric that ``peers`` gave to ``accumulate``, the mean by weight over those that gave it; the same for
    all of a group."""
    observers: tuple[str, ...] = ()
    """Ids of members that hold the result and contributed nothing."""
    auxiliaries: tuple[str, ...] = ()
    """Ids of members that reduced a share and contributed nothing."""
    paths: Mapping[str, Path] = field(default_factory=dict)
    """The path of the parts to and from each other member, by its id: ``"lane"`` for a direct lane, ``"stream"`` if
    parts went over a libp2p stream one way or the other, because no direct lane came about or one broke."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Ids of members that were given up during the round, and why. Those of them that are in ``peers`` had delivered
    everything."""

    @property
    def peers_count(self) -> int:
        """How many peers' contributions are in ``averaged``."""
        return len(self.peers)


EXCHANGES = "the group exchanges"
"""The reason of :class:`InProgress` for a round that has its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InProgress:
    """A round runs. A later ``step`` collects its result; nothing has to be repeated."""

    ready_peers: int
    """Peers known to be ready, this one included."""
    target_size: int
    """The group size that is aimed at."""
    reason: str = ""
    """What is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPeers:
    """Nobody to average with, or nothing to average. What was accumulated stays accumulated."""

    reason: str = "no other peer is ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A group formed, and this peer has no result of it. What was accumulated stays accumulated; see
    :attr:`contribution_used`."""

    reason: str
    """What happened, naming the peer that it happened to."""
    peer: str | None = None
    """Id of the member that was lost or excluded, if it was one."""
    contribution_used: bool | None = False
    """``True``: the others' ``Success`` contains this peer's contribution, which is therefore used up; or all members
    that could tell are dead, and had heard of this peer that it holds the result. ``None``: this peer was cut off and
    does not know whether it does. It goes on asking, for ten minutes. What was accumulated for this round counts as
    accumulated again when it hears that it was not used."""


RoundResult: TypeAlias = Success | InProgress | NoPeers | Failed
