"""Starting from one peer's parameters."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import replace

import torch

from p2pavg.blocking import Averager
from p2pavg.errors import P2PAvgError
from p2pavg.optim.state import checked_amount
from p2pavg.result import Failed, InProgress, NoPeers, Success

logger = logging.getLogger(__name__)

RUN_SUFFIX = "/sync"
AGAIN_SECONDS = 0.2  # after a round that came to nothing


class SyncError(P2PAvgError):
    """The parameters did not come within the time, or of several peers; they are as they were."""


@torch.no_grad()
def sync_parameters(
    averager: Averager,
    tensors: Iterable[torch.Tensor],
    *,
    source: bool,
    peers: int,
    timeout: float = 120.0,
) -> None:
    """Give all peers of a run the tensors of one of them, to the last bit, before they begin to train.

    A round in which the source alone contributes, uncompressed, and everybody else listens. All call it, before they
    make an optimizer. Buffers of a model, such as a batch norm's means, may be among the tensors.

    Args:
        averager: of the run; the round is one of its peer's own, beside it.
        tensors: float32, float16 or bfloat16, in the same order on all peers; overwritten where this is not the source.
        source: whether the tensors of this peer are the ones; of exactly one peer.
        peers: that take part, the source included, 2 to 64.
        timeout: seconds until it is given up.

    Raises:
        SyncError: it did not come about in time, or more than one peer is the source.
        p2pavg.AccumulateError: a tensor that cannot be averaged, such as one that is not finite.
    """
    kept, until = list(tensors), time.monotonic() + checked_amount("timeout", timeout)
    config = replace(
        averager.config,
        run_id=averager.config.run_id + RUN_SUFFIX,
        compression=None,
        participation=None,
        group_size=peers,
        min_group_size=peers,
    )
    with averager.sibling(config) as sibling:
        result = _until_all_came(sibling, kept, source=source, until=until)
    if not isinstance(result, Success):
        raise SyncError(f"the parameters did not come within {timeout:g} s: {result.reason}")
    if len(result.peers) != 1:
        raise SyncError(f"{len(result.peers)} peers say that they are the source")
    assert isinstance(result.averaged, list)
    # The source too: a sum makes 0.0 of -0.0, and all are to have the same bits.
    for tensor, came in zip(kept, result.averaged, strict=True):
        tensor.copy_(came)


def _until_all_came(
    averager: Averager, tensors: list[torch.Tensor], *, source: bool, until: float
) -> Success | InProgress | NoPeers | Failed:
    averager.declare(tensors)
    while True:
        if source and not averager.weight and averager.round_state is None:
            averager.accumulate(tensors)
        result = averager.step(wait=max(until - time.monotonic(), 0.0), listen=not source)
        if isinstance(result, Success) or time.monotonic() >= until:
            return result
        logger.info("not everybody is there yet: %s", result.reason)
        if not isinstance(result, InProgress):
            averager.clear()  # what became of it does not matter: it is the same again
            time.sleep(AGAIN_SECONDS)
