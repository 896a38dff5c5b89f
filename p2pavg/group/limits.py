"""Bounds of what peers may say and users may ask for. Rules, messages and configuration share them."""

from __future__ import annotations

MAX_GROUP_SIZE = 64
MAX_MEMBERS = 2 * MAX_GROUP_SIZE
"""Members of a roster: contributors and observers of a group, and at most as many auxiliaries."""
MAX_RUN_ID_CHARS = 128
MAX_CODEC_CHARS = 64
MAX_STATE_BYTES = 32
# On a slower link a part of the smallest size takes minutes, and the other members would have to wait as long for a
# peer that sends nothing. No machine has a faster link than MAX_BANDWIDTH: a larger number is a lie.
MIN_BANDWIDTH = 0.1  # Mbit/s
MAX_BANDWIDTH = 100_000.0  # Mbit/s
MAX_MBPS = 1e6  # of limits and rules that a user sets, in Mbit/s
MAX_WEIGHT = 1e15  # sums of 64 such weights are exact enough as floats, and no run has as many samples
MAX_TIMEOUT_SECONDS = 1800.0  # half of the time for which a signed candidate counts
MAX_NAME_CHARS = 32  # of a tag or a metric; as UTF-8 at most as many bytes
MAX_TAGS = 16
MAX_METRICS = 16
MAX_METRIC = 1e100  # magnitude; means of larger ones may leave the range of a float
MAX_RULE_CHARS = 512  # of the text of a participation rule
