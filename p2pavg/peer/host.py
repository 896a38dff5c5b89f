"""The peer, as its averagers and auxiliaries see it."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from p2pavg.allreduce.movers.lobby import StreamRouter
from p2pavg.base.errors import BusyError
from p2pavg.matchmaking.matchmaker import Matchmaker
from p2pavg.peer.statuses import StatusOwners
from p2pavg.runs.context import PeerContext
from p2pavg.runs.membership.membership import RunAccess
from p2pavg.runs.membership.revocation import RevocationList
from p2pavg.runs.records.greeting import Greeter
from p2pavg.runs.records.notices import NoticeSpreading, spreading_revocations
from p2pavg.state.donor.service import StateService
from p2pavg.telemetry.hub import Events
from p2pavg.verification.evidence.service import EvidenceService
from p2pavg_dht import RecordNode

# The matchmakers and the known revocations of one peer, which its averagers and auxiliaries share.


class Registry:
    """The matchmakers of one peer, by the ready key under which each answers, and its revocations, by authority."""

    def __init__(self) -> None:
        self._matchmakers: dict[bytes, Matchmaker] = {}
        self._averagers: Counter[str] = Counter()  # in each run
        self._revocations: dict[tuple[bytes, bytes], NoticeSpreading[RevocationList]] = {}
        self.statuses = StatusOwners()
        """The averagers that publish this peer's status."""

    @property
    def runs(self) -> int:
        """Number of runs in which this peer has an averager."""
        return len(self._averagers)

    def revocations(self, access: RunAccess) -> NoticeSpreading[RevocationList]:
        """Return the revocations of an authority. They are kept when its last user at this peer has ended."""
        # By the secret too: peers that have changed it do not meet those with the old one.
        pair = (access.authority, access.secret)
        if pair not in self._revocations:
            self._revocations[pair] = spreading_revocations(access.authority)
        return self._revocations[pair]

    def find(self, key: bytes) -> Matchmaker | None:
        """Return the matchmaker that answers under a ready key, if there is one."""
        found = self._matchmakers.get(key)
        if found is not None:
            return found
        return next((each for each in self._matchmakers.values() if each.answers(key)), None)

    def add(self, key: bytes, matchmaker: Matchmaker) -> None:
        """Register the matchmaker of an auxiliary. No other one may be registered under the key."""
        assert key not in self._matchmakers
        self._matchmakers[key] = matchmaker

    def remove(self, key: bytes) -> None:
        """Take back what :meth:`add` registered."""
        del self._matchmakers[key]

    def add_averager(self, key: bytes, matchmaker: Matchmaker, run_id: str) -> None:
        """Register the matchmaker of an averager of a run.

        Raises:
            BusyError: another matchmaker of this peer answers under the key.
        """
        if key in self._matchmakers:
            raise BusyError(f"this peer averages the same tensors in run {run_id!r} already")
        self.add(key, matchmaker)
        self._averagers[run_id] += 1

    def remove_averager(self, key: bytes, run_id: str) -> bool:
        """Take back what :meth:`add_averager` registered. Return whether no averager of the run is left."""
        self.remove(key)
        self._averagers[run_id] -= 1
        if self._averagers[run_id]:
            return False
        del self._averagers[run_id]
        return True


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
