"""Checks of the arguments that all optimizers have."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from p2pavg.base.errors import AccumulateError
from p2pavg.blocking import Averager
from p2pavg.group.topology import Gossip
from p2pavg.optim.base.joined import parts_of
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


def check_inner(inner: object) -> None:
    """Raise TypeError if this is no optimizer of torch."""
    if not isinstance(inner, Optimizer):
        raise TypeError(
            f"inner must be a torch.optim.Optimizer, or a list of some, got {type(inner).__name__}"
        )


def check_schedule(scheduler: object, inner: Optimizer) -> None:
    """Check that a schedule is one of ``inner``, and needs no metric.

    Raises:
        TypeError: it cannot be stepped and saved, or needs a metric.
        ValueError: it sets the rates of another optimizer.
    """
    if scheduler is None:
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError("scheduler needs a metric at every step, and gets none: ReduceLROnPlateau")
    if not (hasattr(scheduler, "step") and hasattr(scheduler, "state_dict")):
        raise TypeError(f"scheduler must be one of torch.optim.lr_scheduler, got {type(scheduler).__name__}")
    steers = getattr(scheduler, "optimizer", None)
    if steers is not None and not any(steers is each for each in (inner, *parts_of(inner))):
        raise ValueError(
            f"scheduler sets the rates of another {type(steers).__name__} than `inner`: make it of the optimizer that"
            " is given here"
        )


def check_dtypes(
    labels: Sequence[str], parameters: Sequence[torch.Tensor], dtypes: Collection[torch.dtype]
) -> None:
    """Raise AccumulateError, with the parameter's name, if one is of another dtype than these."""
    for label, parameter in zip(labels, parameters, strict=False):
        if parameter.dtype not in dtypes:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise AccumulateError(
                f"{label} is {parameter.dtype}, and {known} can be averaged: convert the model before its optimizer is"
                " made, for example by model.float()"
            )
