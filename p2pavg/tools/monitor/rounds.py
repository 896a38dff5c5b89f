"""The rounds of a run, merged from the words of their members. No I/O, no clock.

Each word is a claim of one peer. A merged round gives the median of the claims, and who made them.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping

from p2pavg.base.limits import RECORD_LIFE_SECONDS
from p2pavg.telemetry.events import RoundKind
from p2pavg.telemetry.status import PeerStatus, RoundClaim

MAX_ROUNDS = 256
MAX_CLAIMS = 128
"""Peers whose words on one round are kept: as many as a group has."""


class MergedRound:
    """One round, or one peer's failure to find a group.

    Args:
        name: the first 8 bytes of the group's id in hex; empty without a group.
        at: wall clock of this peer, seconds, about when the round ended.
    """

    def __init__(self, name: str, at: float) -> None:
        self.name = name
        self.at = at
        self.claims: dict[str, RoundClaim] = {}

    def shown(self, ids: Mapping[str, str]) -> dict[str, object]:
        """Return the round as JSON values.

        Args:
            ids: of known peers, by the keys that statuses have in their place.
        """
        claims = list(self.claims.values())
        ended = [claim for claim in claims if claim.result is RoundKind.SUCCESS] or claims
        results = Counter(str(claim.result) for claim in claims)
        reasons = Counter(claim.reason for claim in claims if claim.reason)
        lost = Counter(key.hex() for claim in claims for key in claim.lost)
        return {
            "group": self.name,
            "at": self.at,
            "results": dict(results),
            "members": statistics.median(claim.members for claim in ended),
            "contributors": statistics.median(claim.contributors for claim in ended),
            "duration": statistics.median(claim.duration for claim in ended),
            "exchange": statistics.median(claim.exchange_duration for claim in ended),
            "bytes": sum(claim.sent for claim in claims),
            "clipped": statistics.median(claim.clipped for claim in ended),
            "lost": [
                {"peer": ids.get(key, ""), "key": key, "by": count} for key, count in lost.most_common(8)
            ],
            "reason": reasons.most_common(1)[0][0] if reasons else "",
            "by": sorted(self.claims),
        }


class MergedRounds:
    """The last rounds of a run."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[str, str], MergedRound] = {}

    def receive(self, peer_id: str, status: PeerStatus, now: float) -> list[MergedRound]:
        """Note the rounds of a status; return those of which no peer has spoken before."""
        new = []
        for claim in reversed(status.rounds):
            # Without a group, each peer has a round of its own.
            name = claim.group.hex()
            key = (name, "") if name else (peer_id, f"{claim.ended:.3f}")
            known = self._rounds.get(key)
            if known is None:
                # One that ended before its peer's record began, or is to end, is taken for one that ended now: that
                # peer's clock is off.
                at = claim.ended if now - RECORD_LIFE_SECONDS < claim.ended <= now else now
                known = self._rounds[key] = MergedRound(name, at)
                new.append(known)
            if peer_id in known.claims or len(known.claims) < MAX_CLAIMS:
                known.claims[peer_id] = claim
        while len(self._rounds) > MAX_ROUNDS:
            self._forget_one()
        return new

    def _forget_one(self) -> None:
        """Forget the oldest of the rounds that one peer alone tells of: of the peer that tells of most such ones.

        So a peer that invents rounds pushes out its own. If there are none, the oldest round goes.
        """
        alone = [
            (key, next(iter(each.claims))) for key, each in self._rounds.items() if len(each.claims) == 1
        ]
        counts = Counter(peer_id for _, peer_id in alone)
        loudest, count = counts.most_common(1)[0] if counts else ("", 0)
        if count > MAX_ROUNDS // 8:
            del self._rounds[next(key for key, peer_id in alone if peer_id == loudest)]
        else:
            del self._rounds[next(iter(self._rounds))]

    def shown(self, most: int, ids: Mapping[str, str]) -> list[dict[str, object]]:
        """Return the last rounds as JSON values, the newest first; see :meth:`MergedRound.shown`."""
        newest = sorted(self._rounds.values(), key=lambda each: each.at, reverse=True)
        return [each.shown(ids) for each in newest[:most]]
