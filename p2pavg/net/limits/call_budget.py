"""What the record calls of others may cost this process: time of its processor, and bytes of answers.

Decides; no I/O, no clock. Each call is charged to its caller and to the caller's prefix
(:mod:`p2pavg.net.limits.sources`), after it was answered, with what it took. A caller in debt waits, and is refused
when the wait would be long.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from p2pavg.net.limits.rate import TokenBucket


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRates:
    """What callers may use on average, and at once after a pause.

    A peer in a run makes a few dozen calls to one other peer while it joins and a few a second in rounds; a call takes
    about 1 ms and an answer has a few KiB, 64 KiB under the ready key of a large run. The burst is 1,000 such calls, or
    64 of the large answers: enough for joining, and for withdrawing all that a peer says.

    - ``peer_seconds``, ``peer_burst_seconds``: processor time of one identity: 5 % of a core.
    - ``peer_bytes``, ``peer_burst_bytes``: answers to one identity: 2 Mbit/s.
    - ``prefix_factor``: what a /24 or /48 may use: eight peers at their limit, so 40 % of a core and 16 Mbit/s.
    """

    peer_seconds: float = 0.05
    peer_burst_seconds: float = 2.0
    peer_bytes: float = 256 * 1024
    peer_burst_bytes: float = 4 * 1024 * 1024
    prefix_factor: float = 8.0


# The other side gives a call up after 5 s (RPC_TIMEOUT), dialling included.
LONGEST_DELAY = 2.0

# What a call costs for each second that it takes to find its answer: tasks, frames and encryption of a small answer
# took half as long again on loopback. In simulations, where the clock stands still meanwhile, only bytes are charged.
OVERHEAD = 1.5

# Of peers, and as many of prefixes: more than a process has connections and contacts. A caller that is forgotten has a
# full bucket again: an attacker that needs thousands of identities for that meets its prefixes' limits first.
MAX_ACCOUNTS = 4096


class _Account:
    def __init__(self, rates: CallRates, factor: float) -> None:
        self._time = TokenBucket(rates.peer_seconds * factor, rates.peer_burst_seconds * factor)
        self._bytes = TokenBucket(rates.peer_bytes * factor, rates.peer_burst_bytes * factor)

    def take(self, now: float, seconds: float, count: int) -> float:
        return max(self._time.take(now, seconds), self._bytes.take(now, count))


class CallBudget:
    """Accounts of callers and of their prefixes."""

    def __init__(self, rates: CallRates | None = None) -> None:
        self._rates = rates or CallRates()
        self._accounts: OrderedDict[tuple[str, str], _Account] = OrderedDict()

    def delay(self, now: float, peer_id: str, prefix: str) -> float | None:
        """Seconds to wait before the next call of this peer is answered; ``None`` refuses it."""
        delay = max(account.take(now, 0.0, 0) for account in self._accounts_of(peer_id, prefix))
        return delay if delay <= LONGEST_DELAY else None

    def charge(self, now: float, peer_id: str, prefix: str, *, seconds: float, count: int) -> None:
        """Note what a call has taken.

        Args:
            seconds: of the processor, to find the answer.
            count: bytes of the answer.
        """
        for account in self._accounts_of(peer_id, prefix):
            account.take(now, OVERHEAD * seconds, count)

    def _accounts_of(self, peer_id: str, prefix: str) -> list[_Account]:
        found = [self._account("peer", peer_id, 1.0)]
        if prefix:
            found.append(self._account("prefix", prefix, self._rates.prefix_factor))
        return found

    def _account(self, kind: str, name: str, factor: float) -> _Account:
        key = (kind, name)
        if key not in self._accounts:
            self._accounts[key] = _Account(self._rates, factor)
        self._accounts.move_to_end(key)
        while len(self._accounts) > 2 * MAX_ACCOUNTS:
            self._accounts.popitem(last=False)
        return self._accounts[key]
