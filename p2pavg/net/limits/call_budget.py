"""The budget of inbound record calls: processor time, and bytes of answers.

This module decides; it does no I/O and has no clock. After each answer, the call's cost is charged to its caller and to
the caller's prefix (:mod:`p2pavg.base.hosts`). A caller in debt has to wait, and is refused if the wait would
be long.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2pavg.net.limits.rate import Accounts, TokenBucket


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


class CallBudget:
    """Accounts of callers and of their prefixes.

    A caller that was forgotten has full buckets again. An attacker needs thousands of identities for that, and meets
    its prefixes' limits first.
    """

    def __init__(self, rates: CallRates | None = None) -> None:
        rates = rates or CallRates()
        self._peers, self._prefixes = (
            (
                Accounts(rates.peer_seconds * factor, rates.peer_burst_seconds * factor),
                Accounts(rates.peer_bytes * factor, rates.peer_burst_bytes * factor),
            )
            for factor in (1.0, rates.prefix_factor)
        )

    def delay(self, now: float, peer_id: str, prefix: str) -> float | None:
        """Return the seconds to wait before the next call of this peer is answered; ``None`` refuses the call.

        Args:
            peer_id: empty if the caller has proved no identity: its prefix pays alone.
        """
        buckets = [bucket for pair in self._buckets_of(peer_id, prefix) for bucket in pair]
        delay = max((bucket.take(now, 0.0) for bucket in buckets), default=0.0)
        return delay if delay <= LONGEST_DELAY else None

    def charge(self, now: float, peer_id: str, prefix: str, *, seconds: float, count: int) -> None:
        """Charge a call to its caller and to the caller's prefix.

        Args:
            seconds: the processor time that it took to find the answer.
            count: the bytes of the answer.
        """
        for times, sizes in self._buckets_of(peer_id, prefix):
            times.take(now, OVERHEAD * seconds)
            sizes.take(now, count)

    def _buckets_of(self, peer_id: str, prefix: str) -> list[tuple[TokenBucket, TokenBucket]]:
        """Return the buckets of time and of bytes of a caller and of its prefix, as far as they are known."""
        named = ((peer_id, self._peers), (prefix, self._prefixes))
        return [(times.of(name), sizes.of(name)) for name, (times, sizes) in named if name]
