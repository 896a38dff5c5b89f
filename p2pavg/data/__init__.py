"""Data without a coordinator: which samples each peer of a run takes.

:class:`SharedSampler` deals each epoch's samples out to the peers of an optimizer, so that each is taken once.
:class:`PeerSampler` needs no optimizer and no word of other peers, and repeats a part of the work. :func:`shard` cuts a
data set into fixed parts.
"""

from p2pavg.data.peer_sampler import PeerSampler, shard
from p2pavg.data.plan import EpochPlan
from p2pavg.data.shared_sampler import SharedSampler

__all__ = ["EpochPlan", "PeerSampler", "SharedSampler", "shard"]
