"""Optimizers of peers that divide their model among several ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from p2pavg.blocking import Averager
from p2pavg.optim.base.arguments import check_averager
from p2pavg.optim.large_batch.averaged import AveragedOptimizer
from p2pavg.optim.local.local import LocalUpdates
from p2pavg.optim.ranks.mesh import PeerMesh
from p2pavg.optim.ranks.replicas import ReplicatedOptimizer
from p2pavg.optim.ranks.shards import RankRefusedError, Ranks

Recipe = Callable[..., AveragedOptimizer | LocalUpdates]


def divided_optimizer(
    inner: Optimizer,
    averager: Averager | None,
    place: PeerMesh,
    *,
    model: torch.nn.Module,
    recipe: Recipe = AveragedOptimizer,
    **options: Any,
) -> AveragedOptimizer | LocalUpdates | ReplicatedOptimizer:
    """Make the optimizer of one rank of a peer that divides its model; call it on all ranks of the peer together.

    The ranks update together or not at all: if the round of one part fails, no rank takes its result, and all ranks
    forget what they have accumulated. Every rank gives :meth:`step` the samples of the whole peer, the same number. The
    norm to which gradients are clipped is that of the whole model. Measurements are averaged rank by rank: give the
    loss on the ranks that have it, which are those of the last stage.

    Args:
        inner: optimizer of this rank's parameters.
        averager: averager with the configuration ``place.config(config)``; ``None`` on the ranks of further copies, for
            which ``place.averages`` is false.
        place: this rank's place in its peer.
        model: this rank's part of the model: its stage, or the module that is sharded.
        recipe: makes the optimizer of ``inner``, ``averager`` and ``options``, such as :func:`diloco`.
        options: for ``recipe``, such as ``target_batch_size``.

    Returns:
        What ``recipe`` makes. With copies it is a :class:`ReplicatedOptimizer`, which has it on the ranks of the first
        copy.

    Raises:
        ValueError: an averager is missing or one too many, its configuration is that of another rank, ``inner`` has
            nothing to train, or another argument is wrong. It is raised on all ranks; the other ranks' message names
            the rank concerned.
        TypeError: as ``recipe``, on the rank concerned. The others raise ValueError.
    """
    _check_on_all(averager, place)
    make = partial(_make, place=place, model=model, recipe=recipe)
    if place.copies_group is None:
        assert averager is not None  # checked above
        return make(inner, averager, **options)
    return ReplicatedOptimizer.of(
        inner, model, averager, recipe=make, process_group=place.copies_group, **options
    )


def _make(
    inner: Optimizer,
    averager: Averager,
    *,
    place: PeerMesh,
    model: torch.nn.Module,
    recipe: Recipe,
    **options: Any,
) -> AveragedOptimizer | LocalUpdates:
    """Make the optimizer of a rank of the first copy; an error on one of these ranks is one on all of them."""
    ranks = Ranks(place)
    try:
        made = recipe(inner, averager, process_group=place, model=model, **options)
    except RankRefusedError:
        raise  # of another rank
    except Exception as error:
        ranks.refuse(error)
        raise
    ranks.gather(None)  # another rank may have refused since the last words of this one
    return made


def _check_on_all(averager: Averager | None, place: PeerMesh) -> None:
    """Raise ValueError on all ranks if one of them has no averager, one too many, or that of another rank."""
    import torch.distributed as dist  # needs a torch that was built with it

    for rank, text in enumerate(Ranks(dist.group.WORLD).gather(_wrong(averager, place))):
        if text:
            raise ValueError(text if rank == dist.get_rank() else f"on rank {rank} of this peer: {text}")


def _wrong(averager: Averager | None, place: PeerMesh) -> str:
    """Return the reason for which this rank cannot use its averager; empty if it can."""
    if averager is None and place.averages:
        return (
            "averager is missing: each rank of the first copy averages its part; open one with"
            " open_averager(place.config(config))"
        )
    if averager is None:
        return ""
    if not place.averages:
        return (
            "averager must be None on this rank: it holds a copy, and takes what the first copy has averaged. Open one"
            " only if place.averages"
        )
    try:
        check_averager(averager)
    except TypeError as error:
        return str(error)
    run_id = averager.config.run_id
    if place.part and not run_id.endswith(f"/{place.part}"):
        return (
            f"averager is of the run {run_id!r}, and this rank holds the part {place.part!r}: open it with"
            " open_averager(place.config(config))"
        )
    return ""
