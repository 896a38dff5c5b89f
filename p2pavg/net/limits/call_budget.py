"""The budget of inbound record calls: processor time, and bytes of answers.

This module decides; it does no I/O and has no clock. After each answer, the call's cost is charged to its caller and to
the caller's prefix (:mod:`p2pavg.net.limits.sources`). A caller in debt has to wait, and is refused if the wait would
be long.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from p2pavg.net.limits.rate import TokenBucket


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRates:
    """The rates that callers may use on average, and the bursts after a pause.

    A peer makes a few dozen calls to another peer while it joins a run, and a few calls a second in rounds. A call
    takes about 1 ms. An answer has a few KiB, or 64 KiB under the ready key of a large run. The burst is 1,000 such
    calls, or 64 of the large answers. That is enough for joining, and for withdrawing all records of a peer.

    - ``peer_seconds``, ``peer_burst_seconds``: processor time for one identity: 5 % of a core.
    - ``peer_bytes``, ``peer_burst_bytes``: answers to one identity: 2 Mbit/s.
    - ``prefix_factor``: the rates of a /24 or /48: eight peers at their limit, so 40 % of a core and 16 Mbit/s.
    """

    peer_seconds: float = 0.05
    peer_burst_seconds: float = 2.0
    peer_bytes: float = 256 * 1024
    peer_burst_bytes: float = 4 * 1024 * 1024
    prefix_factor: float = 8.0


# The caller's timeout is 5 s (RPC_TIMEOUT), which includes dialling.
LONGEST_DELAY = 2.0

# The processor time of a call, relative to the time that finding its answer takes. On loopback, the tasks, frames and
# encryption of a small answer take half as long again. In simulations the clock stands still during a call, so only
# bytes are charged there.
OVERHEAD = 1.5

# The number of accounts of peers, and of prefixes: more than a process has connections and contacts. A forgotten caller
# has a full bucket again. An attacker needs thousands of identities for that, and meets its prefixes' limits first.
MAX_ACCOUNTS = 4096


class _CallAccount:
    def __init__(self, rates: CallRates, factor: float) -> None:
        self._time = TokenBucket(rates.peer_seconds * factor, rates.peer_burst_seconds * factor)
        self._bytes = TokenBucket(rates.peer_bytes * factor, rates.peer_burst_bytes * factor)

    def take(self, now: float, seconds: float, count: int) -> float:
        return max(self._time.take(now, seconds), self._bytes.take(now, count))


class CallBudget:
    """Accounts of callers and of their prefixes."""

    def __init__(self, rates: CallRates | None = None) -> None:
        self._rates = rates or CallRates()
        self._accounts: OrderedDict[tuple[str, str], _CallAccount] = OrderedDict()

    def delay(self, now: float, peer_id: str, prefix: str) -> float | None:
        """Return the seconds to wait before the next call of this peer is answered; ``None`` refuses the call.

        Args:
            peer_id: empty if the caller has proved no identity: its prefix pays alone.
        """
        accounts = self._accounts_of(peer_id, prefix)
        delay = max((account.take(now, 0.0, 0) for account in accounts), default=0.0)
        return delay if delay <= LONGEST_DELAY else None

    def charge(self, now: float, peer_id: str, prefix: str, *, seconds: float, count: int) -> None:
        """Charge a call to its caller and to the caller's prefix.

        Args:
            seconds: the processor time that it took to find the answer.
            count: the bytes of the answer.
        """
        for account in self._accounts_of(peer_id, prefix):
            account.take(now, OVERHEAD * seconds, count)

    def _accounts_of(self, peer_id: str, prefix: str) -> list[_CallAccount]:
        found = [self._account("peer", peer_id, 1.0)] if peer_id else []
        if prefix:
            found.append(self._account("prefix", prefix, self._rates.prefix_factor))
        return found

    def _account(self, kind: str, name: str, factor: float) -> _CallAccount:
        key = (kind, name)
        if key not in self._accounts:
            self._accounts[key] = _CallAccount(self._rates, factor)
        self._accounts.move_to_end(key)
        while len(self._accounts) > 2 * MAX_ACCOUNTS:
            self._accounts.popitem(last=False)
        return self._accounts[key]
