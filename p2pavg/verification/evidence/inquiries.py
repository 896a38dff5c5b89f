"""Decides which evidence a peer fetches from which accuser. No I/O, no clock, no random source.

Every record that names evidence may be a lie that costs this peer a fetch. The rules under attack:

* An accuser whose evidence is not what it has named, or proves nothing, is ignored from then on. So a lie costs its
  identity. Only what an accuser has sent to this peer counts against it.
* Evidence against a peer that is excluded already is not fetched, however many pieces of it are named.
* Evidence against peers that were met in the run comes first. Invented identities can lie and be accused in any number;
  evidence against them has a small allowance of its own, and cannot delay the other.
* Accusers whose evidence has proved a lie come first, those that gave no answer come last and are asked ever more
  rarely. One accuser is asked for one piece at a time, and a few pieces are fetched at once.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from p2pavg.base.limits import HOLD_OFF_SECONDS, RETRY_SECONDS
from p2pavg.group.candidate import Candidate
from p2pavg.net.limits.rate import TokenBucket
from p2pavg.verification.evidence.accusation import Accusation, Named, Notice, is_readable

# The peers that are excluded from one run, because evidence proves that they lied.
#
# A peer is excluded by evidence only, and for as long as this process takes part in the run. The tables are bounded.
# Invented identities can lie and be accused in any number. So peers that were met in the run have priority in all
# tables.

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

    @property
    def kept(self) -> list[bytes]:
        """The evidence that is kept."""
        return list(self._evidence.values())

    def _least(self, peer_ids: Mapping[str, object]) -> str:
        """Return the peer that is given up first: the oldest that was not met, or else the oldest."""
        return next((peer_id for peer_id in peer_ids if peer_id not in self._met), next(iter(peer_ids)))

    def _let_go(self, peer_id: str) -> None:
        self._kept_bytes -= len(self._evidence.pop(peer_id, b""))

    def _forget(self, peer_id: str) -> None:
        self._let_go(peer_id)
        del self._reasons[peer_id], self._named[peer_id]


REST = 9.0
"""After a piece about a peer that was not met, the next such piece waits so many times as long as that one took, a
minute at most: they take about a tenth of one core."""
MAX_FETCHES = 2
"""Pieces of evidence that are fetched at once."""
MAX_ACCUSERS = 1024
"""Peers whose records are remembered. New ones are left out while there are so many."""
MAX_IGNORED = 4096
"""Accusers that are ignored for a lie; the one that lied longest ago is forgotten."""
MAX_INQUIRY_RETRY_SECONDS = 3600.0
"""The longest pause before an accuser that gave no answer is asked again. It begins with HOLD_OFF_SECONDS, and doubles:
the accuser may have been busy with showing the same evidence to others."""
ACCUSER_FETCHES, ACCUSER_SECONDS = 32, 30.0
"""Fetches from one accuser: so many at once, and one more each time these seconds have passed."""
UNMET_FETCHES, UNMET_SECONDS = 16, 60.0
"""Fetches of evidence against peers that were not met in the run, from all accusers together."""
ALL_FETCHES, ALL_SECONDS = 64, 5.0
"""Fetches from all accusers together. Identities of an open run cost nothing."""


def _bucket(count: float, seconds: float) -> TokenBucket:
    return TokenBucket(1.0 / seconds, count)


@dataclass(frozen=True, slots=True)
class EvidenceFetch:
    """A piece of evidence, and the accuser to fetch it from."""

    accuser: str
    addresses: tuple[str, ...]
    named: Named


@dataclass(slots=True)
class _Accuser:
    notice: Notice
    sequence: int
    expires: float
    budget: TokenBucket = field(default_factory=lambda: _bucket(ACCUSER_FETCHES, ACCUSER_SECONDS))
    failures: int = 0  # one after the other
    proved: bool = False
    asked: float = float("-inf")
    not_before: float = float("-inf")

    @property
    def order(self) -> tuple[int, bool, float]:
        return self.failures, not self.proved, self.asked


class Inquiries:
    """The accusers of one run, and what is fetched from them. Times are of one wall clock, in seconds.

    Args:
        exclusions: of the run.
        me: this peer's id.
    """

    def __init__(self, exclusions: Exclusions, me: str) -> None:
        self._exclusions = exclusions
        self._me = me
        self._accusers: dict[str, _Accuser] = {}
        self._ignored: OrderedDict[str, None] = OrderedDict()
        self._running: dict[str, EvidenceFetch] = {}  # by accuser
        self._unmet = _bucket(UNMET_FETCHES, UNMET_SECONDS)
        self._all = _bucket(ALL_FETCHES, ALL_SECONDS)
        self._rests_until = -math.inf

    def heard(self, accuser: str, notice: Notice, sequence: int, expires: float, now: float) -> None:
        """Take the record of an accuser; a newer one replaces an older one.

        Args:
            sequence: the record's. Records that were heard before change nothing.
            expires: the moment after which the record no longer counts.
        """
        if accuser == self._me or accuser in self._ignored:
            return
        known = self._accusers.get(accuser)
        if known is not None:
            if sequence >= known.sequence:
                known.notice, known.sequence, known.expires = notice, sequence, expires
            return
        if len(self._accusers) >= MAX_ACCUSERS:
            self._drop_expired(now)
        if len(self._accusers) < MAX_ACCUSERS:
            self._accusers[accuser] = _Accuser(notice, sequence, expires)

    def is_heard(self, accuser: str, sequence: int) -> bool:
        """Return whether a record is known, so that it need not be read again."""
        known = self._accusers.get(accuser)
        return accuser in self._ignored or (known is not None and sequence <= known.sequence)

    def next(self, now: float) -> EvidenceFetch | None:
        """Return what to fetch now, or ``None``. The caller says by :meth:`ended` when the fetch has ended."""
        if len(self._running) >= MAX_FETCHES or self._all.level(now) < 1:
            return None
        for met in (True, False):
            if not met and (self._unmet.level(now) < 1 or now < self._rests_until):
                continue
            for fetch in self._candidates(met, now):
                accuser = self._accusers[fetch.accuser]
                accuser.asked = now
                accuser.budget.take(now, 1)
                self._all.take(now, 1)
                if not met:
                    self._unmet.take(now, 1)
                self._running[fetch.accuser] = fetch
                return fetch
        return None

    def ended(self, fetch: EvidenceFetch) -> None:
        """Note that a fetch has ended, in whatever way."""
        self._running.pop(fetch.accuser, None)

    def verified(self, fetch: EvidenceFetch, seconds: float, now: float) -> None:
        """Note the processor time that a piece of evidence took.

        Evidence about peers that were not met comes from identities that may cost nothing. It rests then, for
        :data:`REST` times as long; evidence about peers that were met goes on.
        """
        if not self._exclusions.has_met(fetch.named.peer_id):
            self._rests_until = now + min(REST * seconds, RETRY_SECONDS)

    def proved(self, fetch: EvidenceFetch) -> None:
        """Note that the evidence was what its accuser had named."""
        if (accuser := self._accusers.get(fetch.accuser)) is not None:
            accuser.proved, accuser.failures = True, 0

    def failed(self, fetch: EvidenceFetch, now: float) -> None:
        """Note that an accuser could not be reached, or gave no evidence in time."""
        if (accuser := self._accusers.get(fetch.accuser)) is not None:
            accuser.not_before = now + min(
                HOLD_OFF_SECONDS * 2.0 ** min(accuser.failures, 10), MAX_INQUIRY_RETRY_SECONDS
            )
            accuser.failures += 1

    def ignore(self, accuser: str) -> None:
        """Ignore an accuser from now on: it has lied."""
        self._accusers.pop(accuser, None)
        self._ignored[accuser] = None
        if len(self._ignored) > MAX_IGNORED:
            self._ignored.popitem(last=False)

    def _candidates(self, met: bool, now: float) -> Iterator[EvidenceFetch]:
        for peer_id, accuser in sorted(self._accusers.items(), key=lambda item: item[1].order):
            if peer_id in self._running or now < accuser.not_before or now >= accuser.expires:
                continue
            if accuser.budget.level(now) < 1 or self._exclusions.refusal(peer_id) is not None:
                continue
            for named in accuser.notice.named:
                if self._wants(named) and self._exclusions.has_met(named.peer_id) == met:
                    yield EvidenceFetch(peer_id, accuser.notice.addresses, named)

    def _wants(self, named: Named) -> bool:
        # Other evidence against the same peer is not held back: an accomplice that answers slowly could delay it.
        running = (fetch.named.digest for fetch in self._running.values())
        return is_readable(named) and not self._exclusions.knows(named) and named.digest not in running

    def _drop_expired(self, now: float) -> None:
        for peer_id, accuser in list(self._accusers.items()):
            if now >= max(accuser.expires, accuser.not_before) and peer_id not in self._running:
                del self._accusers[peer_id]
