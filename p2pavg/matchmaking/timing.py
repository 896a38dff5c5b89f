"""Timeouts, delays and backoffs of matchmaking, in seconds. No I/O, no clock."""

from __future__ import annotations

from p2pavg.base.limits import (
    ASK_AGAIN_SECONDS,
    CLOCK_SKEW_SECONDS,
    GLANCE_SECONDS,
    HOLD_OFF_SECONDS,
    MAX_BACKOFF_SECONDS,
    MAX_TIMEOUT_SECONDS,
    REPLY_SECONDS,
    ROUND_TRIPS_SECONDS,
)

# Records: how soon others see a candidate, and when they forget it.
POLL_SECONDS = 4.0  # between two looks at the records, at most; the first ones follow each other faster
RECORD_TTL_SECONDS = 30.0  # the record of a peer that died expires after this
RENEW_SECONDS = 2 * RECORD_TTL_SECONDS  # a leader begins a new attempt this long after its deadline
ATTEMPT_SECONDS = 2 * (MAX_TIMEOUT_SECONDS - CLOCK_SKEW_SECONDS)
"""The longest attempt. Its signed candidate is valid for a little longer, and others take no later deadline."""

# A leader and its followers.
HEARTBEAT_SECONDS = 2.0  # a leader that has followers sends them a status this often
LEADER_SILENCE_SECONDS = 3 * HEARTBEAT_SECONDS  # timeout after which a follower gives up a silent leader
PROPOSAL_ANSWER_SECONDS = 3 * ROUND_TRIPS_SECONDS  # timeout of a proposal
DUE_SECONDS = POLL_SECONDS + ROUND_TRIPS_SECONDS
"""A follower leaves a leader that has been due for so long. Other peers may need a poll of the records to find that
leader."""
PUT_OFF_SECONDS = DUE_SECONDS / 2 - ASK_AGAIN_SECONDS
"""A leader keeps a place for better candidates so long, from the first time that another candidate asks for it. They
are told of the leader at once, and ask within a few round trips. With the delay before the other one asks again, this
is well below the time after which followers leave a leader that is due."""
SETTLE_SECONDS = 2 * ROUND_TRIPS_SECONDS
"""Peers that leave another leader arrive within so long of each other. So if ``minimum`` members come together after
the leader's deadline, it waits so long for more before it proposes. And a leader that was left before its deadline is
asked again so long before the deadline. If it waits for a member that has died, it goes ahead with the others then. So
it is left only if it can be held off for at least as long."""
REUNION_SECONDS = 2 * GLANCE_SECONDS
"""Members of the last group wait so long for the record of the peer that led it, before they announce themselves. The
record needs a trip, and two training steps do not end at the same time."""


def backoff(times: int) -> float:
    """Return for how many seconds a peer is held off that was held off so many times before."""
    return min(HOLD_OFF_SECONDS * 2.0 ** min(times, 10), MAX_BACKOFF_SECONDS)


def patience(match_timeout: float) -> float:
    """Return how long a leader waits for the answers of members whose systems acknowledge its proposals, in seconds.

    They are slow, and not gone. So they are waited for as long as the user would wait for a group, from the attempt's
    first proposal on. Followers allow for the most, since they do not know the leader's match timeout.
    """
    return min(max(match_timeout, PROPOSAL_ANSWER_SECONDS), REPLY_SECONDS)
