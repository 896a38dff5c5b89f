"""The sources of metrics: an averager or a peer, as far as they are the same."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from p2pavg.net.nat.reach.reachability import Reachability
from p2pavg.runs.config import AveragingConfig
from p2pavg.telemetry.hub import OnEvent, Subscription
from p2pavg.telemetry.status import RunPeer


class Subscribable(Protocol):
    """An averager or a peer: anything with events."""

    def subscribe(self, callback: OnEvent) -> Subscription: ...


class MetricsSource(Subscribable, Protocol):
    """An averager: :class:`p2pavg.blocking.Averager` or :class:`p2pavg.DecentralizedAverager`."""

    @property
    def config(self) -> AveragingConfig: ...
    @property
    def reachability(self) -> Reachability: ...
    @property
    def excluded(self) -> Collection[str]: ...
    def members(self) -> tuple[RunPeer, ...]: ...
