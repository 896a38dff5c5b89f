"""A run as one averager or auxiliary of this peer has joined it: its records, its members, and its excluded peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import trio

from p2pavg.group.candidate import Candidate
from p2pavg.peer.host import Host
from p2pavg.runs.membership.membership import Membership, RunAccess
from p2pavg.runs.membership.revocation import RevocationList
from p2pavg.runs.records.notices import NoticeSpreading
from p2pavg.runs.records.run_records import RunRecords


class JoinedRun:
    """One user of a run. Its owner starts :meth:`run` at once, and closes it in the end.

    Args:
        access: keys and certificate of a run that has an authority; ``None``: the run is open to anybody.
        recheck: called when a certificate was revoked or a peer was excluded.

    Raises:
        ConfigError: the certificate is for another peer.
    """

    def __init__(
        self, host: Host, run_id: str, access: RunAccess | None, recheck: Callable[[], None]
    ) -> None:
        self._revocations: NoticeSpreading[RevocationList] | None = None
        self.membership: Membership | None = None
        if access is not None:
            self._revocations = host.registry.revocations(access)
            self.membership = Membership(access, host.id, self._revocations.known)
            self._revocations.known.changed.append(recheck)
        self._host = host
        self._run_id = run_id
        self._recheck = recheck
        self._accusations = host.evidence.join(run_id, self.membership)
        self._accusations.changed.append(recheck)
        self.records = RunRecords(
            host.records,
            self.membership,
            host.context.wall_clock,
            excluded=self._accusations.exclusions.meets,
        )

    @property
    def excluded(self) -> Mapping[str, str]:
        """The reason for which each excluded peer is excluded, by peer id."""
        return self._accusations.exclusions.reasons

    def refuses(self, candidate: Candidate, now: float) -> str | None:
        """Return the reason for which a candidate may not take part, or ``None``; see ``Settings.refuses``."""
        if self.membership is not None and (why := self.membership.refuses(candidate, now)) is not None:
            return why
        return self._accusations.exclusions.refuses(candidate, now)

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
