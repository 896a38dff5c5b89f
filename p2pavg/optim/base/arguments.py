"""Checks of the arguments that all optimizers have."""

from __future__ import annotations

from contextlib import AbstractContextManager

from p2pavg.blocking import Averager
from p2pavg.group.topology import Gossip
from p2pavg.optim.base.state import checked_count
from p2pavg.peer.averager import DecentralizedAverager


def check_min_peers(min_peers: int | None, smallest: int) -> None:
    """Raise ValueError if a run whose groups have at least ``smallest`` members cannot have this ``min_peers``."""
    if min_peers is None:
        return
    checked_count("min_peers", min_peers)
    if min_peers < smallest and (min_peers, smallest) != (1, 2):
        raise ValueError(
            f"min_peers is {min_peers}, and the config's min_group_size is {smallest}: fewer peers form no group."
            " Give 1, with a min_group_size of 2, for a peer that also trains alone"
        )


def check_meets_all(averager: Averager) -> None:
    """Raise ValueError if rounds of this averager are among a few peers, and need to be among all of the run."""
    topology = averager.config.aggregation.topology
    if isinstance(topology, Gossip):
        raise ValueError(  # noqa: TRY004 - its type is right
            f"averager has the topology {topology.text!r}, in which peers differ, and here all peers of a run hold the"
            " same parameters: train with p2pavg.optim.gossip or noloco, or give the config topology='butterfly'"
        )


def check_averager(averager: object) -> None:
    """Raise TypeError if this is not an averager for ordinary threads; the message says where to get one."""
    advice = "open one in a block: with p2pavg.blocking.open_averager(config) as averager"
    if isinstance(averager, DecentralizedAverager):
        raise TypeError(f"averager is for trio, and an optimizer needs one of p2pavg.blocking; {advice}")
    if isinstance(averager, AbstractContextManager) and not hasattr(averager, "accumulate"):
        raise TypeError(f"averager is not open yet; {advice}")
    if not hasattr(averager, "accumulate"):
        raise TypeError(f"averager must be one of p2pavg.blocking, got {type(averager).__name__}; {advice}")
