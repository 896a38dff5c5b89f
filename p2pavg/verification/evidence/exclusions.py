"""The peers that are excluded from one run, because evidence proves that they lied. No I/O, no clock.

A peer is excluded by evidence only, and for as long as this process takes part in the run. The tables are bounded.
Invented identities can lie and be accused in any number. So peers that were met in the run have priority in all tables.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType

from p2pavg.group.candidate import Candidate
from p2pavg.verification.evidence.accusation import Accusation, Named

MAX_EXCLUDED = 4096
"""Peers that are excluded at once. Beyond that, the exclusion of a peer that was not met is forgotten first."""
MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Evidence that is kept to be shown to others. The exclusion stays when its evidence is let go."""
MAX_MET = 4096
"""Peers that are remembered as having taken part in the run."""


class Exclusions:
    """The excluded peers of one run, as one of its peers knows them.

    Args:
        me: this peer's id. It never excludes itself.
    """

    def __init__(self, me: str) -> None:
        self._me = me
        self._reasons: dict[str, str] = {}
        self._named: dict[str, Named] = {}  # of each excluded peer
        self._evidence: dict[str, bytes] = {}  # of those of which it is kept
        self._kept_bytes = 0
        self._met: OrderedDict[str, None] = OrderedDict()
        self.against_me = ""
        """The lie that evidence proves of this peer's own identity; empty if there is none."""

    @property
    def reasons(self) -> Mapping[str, str]:
        """The reason for which each excluded peer is excluded, by peer id. May be read from any thread."""
        return MappingProxyType(self._reasons.copy())  # one operation of the interpreter

    def learn(self, accusation: Accusation) -> bool:
        """Exclude the accused peer; return whether it was not excluded before. This peer itself never is."""
        peer_id = accusation.peer_id
        if peer_id == self._me:
            self.against_me = self.against_me or accusation.reason
            return False
        if peer_id in self._reasons:
            return False
        if len(self._reasons) >= MAX_EXCLUDED:
            self._forget(self._least(self._reasons))
        self._reasons[peer_id] = accusation.reason
        self._named[peer_id] = accusation.named
        self._evidence[peer_id] = accusation.evidence
        self._kept_bytes += len(accusation.evidence)
        while self._kept_bytes > MAX_KEPT_BYTES:
            self._let_go(self._least(self._evidence))
        return True

    def meets(self, peer_id: str) -> str | None:
        """Note that a peer takes part in the run; return the reason for which it is excluded, or ``None``."""
        self._met.pop(peer_id, None)
        self._met[peer_id] = None
        if len(self._met) > MAX_MET:
            self._met.popitem(last=False)
        return self.refusal(peer_id)

    def has_met(self, peer_id: str) -> bool:
        """Return whether a peer has taken part in the run, as far as this peer remembers. It has itself."""
        return peer_id in self._met or peer_id == self._me

    def refusal(self, peer_id: str) -> str | None:
        """Return the reason for which a peer is excluded, or ``None``."""
        reason = self._reasons.get(peer_id)
        return None if reason is None else f"it is excluded from the run by evidence: {reason}"

    def refuses(self, candidate: Candidate, now: float) -> str | None:  # noqa: ARG002 - as Settings.refuses
        """Return the reason for which a candidate may not take part, or ``None``."""
        return self.meets(candidate.peer_id)

    def knows(self, named: Named) -> bool:
        """Return whether evidence would change nothing: the peer that it accuses is accused already."""
        return named.peer_id in self._reasons or (named.peer_id == self._me and bool(self.against_me))

    def accuses(self, peer_id: str, digest: bytes) -> bool:
        """Return whether a peer is excluded by the evidence with this digest."""
        named = self._named.get(peer_id)
        return named is not None and named.digest == digest

    def newest(self, count: int) -> tuple[Named, ...]:
        """Return the names of evidence to show to others, newest first; peers that were met come first of all."""
        kept = [self._named[peer_id] for peer_id in reversed(self._evidence)]
        kept.sort(key=lambda named: named.peer_id not in self._met)
        return tuple(kept[:count])

    def evidence(self, digest: bytes) -> bytes | None:
        """Return kept evidence by its digest, or ``None``."""
        for peer_id, evidence in self._evidence.items():
            if self._named[peer_id].digest == digest:
                return evidence
        return None

    def _least(self, peer_ids: Mapping[str, object]) -> str:
        """Return the peer that is given up first: the oldest that was not met, or else the oldest."""
        return next((peer_id for peer_id in peer_ids if peer_id not in self._met), next(iter(peer_ids)))

    def _let_go(self, peer_id: str) -> None:
        self._kept_bytes -= len(self._evidence.pop(peer_id, b""))

    def _forget(self, peer_id: str) -> None:
        self._let_go(peer_id)
        del self._reasons[peer_id], self._named[peer_id]
