"""Timeouts, delays and backoffs of matchmaking, in seconds. No I/O, no clock."""

from __future__ import annotations

from p2pavg.base.limits import REPLY_SECONDS

HEARTBEAT_SECONDS = 2.0  # a leader that has followers sends them a status this often
LEADER_SILENCE_SECONDS = 3 * HEARTBEAT_SECONDS  # timeout after which a follower gives up a silent leader
PROPOSAL_ANSWER_SECONDS = 3.0  # timeout of a proposal: one round trip, and the pause of a busy machine
PUT_OFF_SECONDS = 1.5
"""A leader keeps a place for better candidates so long, from the first time that another candidate asks for it. They
are told of the leader at once, and ask within a few round trips. With the delay before the other one asks again, this
is well below the time after which followers leave a leader that is due."""
DUE_SECONDS = 5.0
"""A follower leaves a leader that has been due for so long. Other peers may need a poll of the records, 4 s, to find
that leader."""
BACK_SECONDS = 2.0
"""A leader that was left before its deadline is asked again this long before the deadline. If it waits for a member
that has died, it goes ahead with the others at the deadline. So it is left only if it can be held off for at least as
long."""
SETTLE_GROUP_SECONDS = 2.0
"""If ``minimum`` members come together after the leader's deadline, it waits so long for more before it proposes. Peers
that leave another leader arrive within seconds of each other."""
RENEW_SECONDS = 60.0  # a leader begins a new attempt this long after its deadline
MOVED_SECONDS = 10.0
"""A peer whose reach or addresses have changed has at least so long for its new attempt. Others poll every 4 s."""
NEXT_ATTEMPT_SECONDS = 0.001  # a deadline is moved by this to name another attempt
REUNION_SECONDS = 0.5
"""Members of the last group wait so long for the record of the peer that led it, before they announce themselves. The
record needs a trip, and two training steps do not end at the same time."""
REUNIONS_SECONDS = 30.0
"""Each member announces itself this often all the same, and sees whether there are others for its group. Runs that step
less often hardly notice what it costs."""


def patience(match_timeout: float) -> float:
    """Return how long a leader waits for the answers of members whose systems acknowledge its proposals, in seconds.

    They are slow, and not gone. So they are waited for as long as the user would wait for a group, from the attempt's
    first proposal on. Followers allow for the most, since they do not know the leader's match timeout.
    """
    return min(max(match_timeout, PROPOSAL_ANSWER_SECONDS), REPLY_SECONDS)
