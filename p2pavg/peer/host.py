"""The peer, as its averagers and auxiliaries see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import trio

from p2pavg.allreduce.movers.lobby import StreamRouter
from p2pavg.base.errors import BusyError
from p2pavg.group.candidate import Candidate
from p2pavg.matchmaking.matchmaker import Matchmaker
from p2pavg.peer.statuses import StatusOwners
from p2pavg.runs.context import PeerContext
from p2pavg.runs.membership.membership import Membership, RunAccess
from p2pavg.runs.membership.revocation import RevocationList
from p2pavg.runs.records.greeting import Greeter
from p2pavg.runs.records.notices import NoticeSpreading, spreading_revocations
from p2pavg.runs.records.run_records import RunRecords
from p2pavg.state.donor.service import StateService
from p2pavg.state.history.entries import EXCLUDED, REVOKED
from p2pavg.state.history.recording import HistoryRecorder
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


# A run as one averager or auxiliary of this peer has joined it: its records, its members, and its excluded peers.


class JoinedRun:
    """One user of a run. Its owner starts :meth:`run` at once, and closes it in the end.

    Args:
        access: keys and certificate of a run that has an authority; ``None``: the run is open to anybody.

    Raises:
        ConfigError: the certificate is for another peer.
    """

    def __init__(self, host: Host, run_id: str, access: RunAccess | None) -> None:
        self.matchmakers: list[Matchmaker] = []
        """Those of this user. Each drops a member that is revoked or excluded while its group forms."""
        self._revocations: NoticeSpreading[RevocationList] | None = None
        self.membership: Membership | None = None
        if access is not None:
            self._revocations = host.registry.revocations(access)
            self.membership = Membership(access, host.id, self._revocations.known)
            self._revocations.known.changed.append(self._recheck)
        self._host = host
        self._run_id = run_id
        self._accusations = host.evidence.join(run_id, self.membership)
        self._accusations.changed.append(self._recheck)
        self.records = RunRecords(
            host.records,
            self.membership,
            host.context.wall_clock,
            excluded=self._accusations.exclusions.meets,
        )

    def _recheck(self) -> None:
        for matchmaker in self.matchmakers:
            matchmaker.recheck()

    @property
    def excluded(self) -> Mapping[str, str]:
        """The reason for which each excluded peer is excluded, by peer id."""
        return self._accusations.exclusions.reasons

    def refuses(self, candidate: Candidate, now: float) -> str | None:
        """Return the reason for which a candidate may not take part, or ``None``; see ``Settings.refuses``."""
        if self.membership is not None and (why := self.membership.refuses(candidate, now)) is not None:
            return why
        return self._accusations.exclusions.refuses(candidate, now)

    @contextmanager
    def proofs_to(self, history: HistoryRecorder) -> Iterator[None]:
        """Give a history what proves that peers may not take part any more, by kind: now, and whenever there is more.

        The kinds are :data:`REVOKED` and :data:`EXCLUDED`.
        """
        exclusions = self._accusations.exclusions
        known = None if self.membership is None else self.membership.known

        def tell() -> None:
            proofs = [(EXCLUDED, evidence) for evidence in exclusions.kept]
            if known is not None and known.newest.number:
                proofs.append((REVOKED, known.newest.encode()))
            history.note(proofs)

        listeners = [self._accusations.changed, *([] if known is None else [known.changed])]
        for changed in listeners:
            changed.append(tell)
        tell()
        try:
            yield
        finally:
            for changed in listeners:
                changed.remove(tell)

    def accuse(self, evidence: bytes) -> None:
        """Verify evidence that this peer found itself, exclude the liar, and tell the run. Returns at once."""
        self._accusations.accuse(evidence)

    async def run(self) -> None:
        """Spread revocations and accusations until cancelled, and leave the run then."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._accusations.spread, self.records)
                if self._revocations is not None:
                    nursery.start_soon(self._revocations.run, self.records)
        finally:
            # Not in close(): an averager that joins now must wait until this one has withdrawn its record.
            self._host.evidence.leave(self._run_id, self.membership)

    def close(self) -> None:
        """Guard the run's keys no longer, and hear of no more revocations and exclusions."""
        self.records.close()
        if self.membership is not None:
            self.membership.known.changed.remove(self._recheck)
        self._accusations.changed.remove(self._recheck)
