"""Limits of values in messages and configuration. Rules, messages and configuration share them."""

from __future__ import annotations

MAX_GROUP_SIZE = 64
USUAL_GROUP_SIZE = 4  # that a group aims at, if a configuration says nothing
MAX_MEMBERS = 2 * MAX_GROUP_SIZE
"""Largest number of members of a roster: half for contributors and observers, half for auxiliaries."""
MAX_RUN_ID_CHARS = 128
MAX_CODEC_CHARS = 64
MAX_STATE_BYTES = 32
MAX_CERTIFICATE_BYTES = 640  # of membership; one that a delegate has signed has about 470
# On a link slower than MIN_BANDWIDTH the smallest part takes minutes, and the other members would have to wait as long
# for a peer that sends nothing. No machine has a faster link than MAX_BANDWIDTH, so a larger number is a lie.
MIN_BANDWIDTH = 0.1  # Mbit/s
MAX_BANDWIDTH = 100_000.0  # Mbit/s
MAX_MBPS = 1e6  # largest limit that a user can set, in Mbit/s
MAX_VERSION = 2**53  # of a run's program
MAX_WEIGHT = 1e15  # sums of 64 such weights are exact enough as floats, and no run has as many samples
MAX_NORM = 2.0**118  # of a contribution: 2**34 values of 2**100 each have a norm of 2**117
MAX_NAME_CHARS = 32  # of a tag or a metric; its UTF-8 has at most as many bytes
MAX_TAGS = 16
MAX_METRICS = 16
MAX_METRIC = 1e100  # magnitude; the mean of larger values may leave the range of a float
MAX_RULE_CHARS = 512  # length of a participation rule's text
MAX_ROBUST_CHARS = 64  # length of a robust rule's text
MAX_AUDIT_CHARS = 64  # length of an audit's text
MAX_TOPOLOGY_CHARS = 64  # length of a topology's text
MAX_AUXILIARY_ELEMENTS = 2**26
"""Largest share of an auxiliary: 256 MiB of averages. It helps strangers, who could ask for more than it has."""

# The times that many modules share. A wait that has another reason stands in its own module, with that reason.
#
# Between two looks at what changes. News wake the task that waits; a look finds what has not.
GLANCE_SECONDS = 0.25
"""Within this process, while a caller waits: too short to be noticed. Also between two dials to one peer, as RFC 8305
recommends in section 5."""
LOOK_SECONDS = 1.0
"""At what other peers publish, and between two words on one thing that goes on."""
CALM_LOOK_SECONDS = 5.0
"""The same where no caller waits for what is found."""
SPREAD_LOOK_SECONDS = 20.0
"""At what must be everywhere within a minute: a revocation, evidence of a lie."""

# For another peer to do something.
ROUND_TRIPS_SECONDS = 1.0
"""For a few round trips among peers that are there, and the pause of a busy machine."""
QUICK_REPLY_SECONDS = 5.0
"""For an answer of a few round trips and no work, where there is another way, or another peer to ask."""
REPLY_SECONDS = 10.0
"""For one word of a peer that is there: to open a stream to it, for its first message, for its answer. A message of 256
KiB takes three seconds at 0.7 Mbit/s, and a busy machine a few more: it is slow, and not gone."""
STALL_SECONDS = 30.0
"""For one piece of data to move, or one stream to be used. A link of 70 kbit/s carries 256 KiB in this time. What takes
longer holds memory and a place for nothing."""
IDLE_STREAM_SECONDS = 2 * STALL_SECONDS
"""After which the serving side closes a stream without another round or call. The side that opened it keeps it for half
as long, and so never writes to a stream that is closed there."""
EXCHANGE_SECONDS = 60.0  # the exchange timeout of a configuration that names none
MAX_TIMEOUT_SECONDS = 1800.0  # about half of the lifetime of a signed candidate

# Before something is tried again.
ASK_AGAIN_SECONDS = 1.0
"""For a peer that is there, and could not answer as hoped; doubled where it goes on."""
HOLD_OFF_SECONDS = 10.0
"""For a peer that could not be reached, or that spoiled a group; doubled each time. Honest peers do it within seconds
of each other, so while all of them hold it off, they find each other."""
RETRY_SECONDS = 60.0
"""For a way, a relay or a peer that failed, where others serve meanwhile."""
MAX_BACKOFF_SECONDS = 600.0
"""The longest pause of those that double: between two groups with a peer that spoiled them, or two words of the log on
one wait. The log of a night then shows that it lasted all night. A peer that broke the protocol is not met again for as
long. And half of a peer's wasted waits or silences is forgotten after as long: a program that stands still now and then
does so many times meanwhile, and one that has started anew, or has moved to a better link, is soon a member like any
other."""

# For this program to begin, to wait in silence and to end.
START_SECONDS = 180.0  # for a process to start: importing torch on a busy machine
WARN_WAIT_SECONDS = 10.0  # about the time after which a user wonders why a program stands still
STOP_SECONDS = 10.0
"""For a thread, a process or a search of this program to end after it was told to. A peer leaves within 5 s."""
TAIL_SECONDS = 2.0
"""For what others may wait for when this peer ends something: the last votes of a round, its end, a lane's end."""
FAREWELL_SECONDS = 1.0
"""For what this process tells others when it ends something: they also notice without it, only later."""

# Records and clocks.
RECORD_LIFE_SECONDS = 600.0  # of records that all peers of a run keep, and renew in time
CLOCK_SKEW_SECONDS = 60.0  # that peers' clocks may differ by
DAY_SECONDS = 86400.0
