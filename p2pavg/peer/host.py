"""The peer, as its averagers and auxiliaries see it."""

from __future__ import annotations

from typing import Protocol

from p2pavg.allreduce.movers.lobby import StreamRouter
from p2pavg.peer.registry import Registry
from p2pavg.runs.context import PeerContext
from p2pavg.runs.records.greeting import Greeter
from p2pavg.state.donor.service import StateService
from p2pavg.telemetry.hub import Events
from p2pavg.verification.evidence.service import EvidenceService
from p2pavg_dht import RecordNode


class Host(Protocol):
    """The part of :class:`p2pavg.Peer` that averagers and auxiliaries use."""

    @property
    def id(self) -> str: ...
    @property
    def addresses(self) -> list[str]: ...
    @property
    def context(self) -> PeerContext: ...
    @property
    def records(self) -> RecordNode: ...
    @property
    def lobby(self) -> StreamRouter: ...
    @property
    def greeter(self) -> Greeter: ...
    @property
    def registry(self) -> Registry: ...
    @property
    def evidence(self) -> EvidenceService: ...
    @property
    def state(self) -> StateService: ...
    @property
    def events(self) -> Events: ...
    @property
    def bootstrap(self) -> frozenset[str]: ...
