"""Distribution of one peer's parameters to all peers before a run starts."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import replace

import torch

from p2pavg.base.errors import P2PAvgError
from p2pavg.base.limits import GLANCE_SECONDS, LOOK_SECONDS, MAX_TIMEOUT_SECONDS
from p2pavg.base.messages import Hash, Message, decoded_all
from p2pavg.base.result import Failed, InProgress, NoPeers, Success
from p2pavg.blocking import Averager
from p2pavg.group.topology import among_all
from p2pavg.optim.base.arguments import check_averager
from p2pavg.optim.base.state import checked_amount, digest_of
from p2pavg.runs.membership.certificate import Role
from p2pavg.runs.records.board import Topic

logger = logging.getLogger(__name__)

RUN_SUFFIX = "/sync"
TOPIC = "sync"


class ReceivedDigest(Message, frozen=True, tag=2):
    """The digest of the tensors that a peer received in a round."""

    group: Hash
    digest: Hash


class SyncError(P2PAvgError):
    """The parameters came late, from several sources, or differently to some peers; the tensors are unchanged."""


@torch.no_grad()
def sync_parameters(
    averager: Averager,
    tensors: Iterable[torch.Tensor],
    *,
    source: bool,
    peers: int,
    timeout: float = 120.0,
    source_id: str | None = None,
) -> None:
    """Give all peers of a run the tensors of one of them, to the last bit, before they begin to train.

    All peers call it before they make an optimizer. In one round, the source alone contributes, uncompressed, and all
    others observe. Afterwards every peer publishes the digest of the tensors that it received. No peer accepts the
    tensors unless all members of the round received the same. The tensors may include buffers of a model, such as a
    batch norm's means.

    Any peer that knows the run's id can claim to be the source. To prevent that, give ``source_id`` on every peer. A
    peer then accepts tensors only from the peer with that id, which the connection authenticates, and keeps looking for
    it if another peer claims to be the source. The id is the source's :attr:`Averager.peer_id`; an identity file keeps
    it the same between starts. In a run with an authority, only a peer whose certificate grants the role ``source`` can
    be the source.

    Args:
        averager: averager of the run. The round uses another averager of the same peer.
        tensors: float32, float16 or bfloat16, in the same order on all peers; overwritten unless this peer is the
            source.
        source: true on the one peer whose tensors all peers are given.
        peers: number of participating peers, the source included, 2 to 64.
        timeout: seconds until :class:`SyncError`. The exchange may use all of it, whatever the run's
            ``exchange_timeout``.
        source_id: the source's peer id.

    Raises:
        SyncError: the timeout has passed, more than one peer is the source, or another peer received other tensors.
            ``tensors`` are unchanged.
        TypeError: ``averager`` is not one of :mod:`p2pavg.blocking`.
        ValueError: an argument is out of range; the message names it.
        p2pavg.AccumulateError: a tensor cannot be averaged, for example because it is not finite.
    """
    check_averager(averager)
    kept, until = list(tensors), time.monotonic() + checked_amount("timeout", timeout)
    _check_source(averager, source, source_id)
    longest, access = min(timeout, MAX_TIMEOUT_SECONDS), averager.config.access
    config = replace(
        averager.config,
        run_id=averager.config.run_id + RUN_SUFFIX,
        compression=None,
        participation=None,
        robust=None,
        max_norm=None,
        topology=among_all(averager.config.aggregation.topology),
        group_size=peers,
        min_group_size=peers,
        match_timeout=min(averager.config.match_timeout, longest),
        exchange_timeout=longest,
        access=None if access is None else replace(access, contributing=Role.SOURCE),
    )
    # The run's board, which stays open when the round's averager closes. A digest outlives its peer: a program may end
    # as soon as this call has returned, while others still wait for its digest.
    board = averager.board(TOPIC, lasts=timeout)
    with averager.sibling(config) as sibling:
        result = _until_all_came(sibling, kept, source=source, source_id=source_id, until=until)
    if not isinstance(result, Success):
        raise SyncError(f"the parameters did not arrive within {timeout:g} s: {result.reason}")
    if len(result.peers) != 1:
        raise SyncError(f"{len(result.peers)} peers claim to be the source")
    if not _is_of(result, source_id):
        raise SyncError(
            f"the parameters did not arrive within {timeout:g} s: peer {result.peers[0]} claims to be the source,"
            f" not {source_id}"
        )
    assert isinstance(result.averaged, list)
    # Every observer reduces a share and could send all others the same false result, so the source publishes the true
    # digest. Adding 0.0 turns -0.0 into 0.0, as averaging does.
    true = [tensor + 0.0 for tensor in kept] if source else result.averaged
    _compare(board, averager.peer_id, result, digest_of(true), until)
    # The source too: averaging turns -0.0 into 0.0, and all peers need the same bits.
    for tensor, came in zip(kept, result.averaged, strict=True):
        tensor.copy_(came)


def _check_source(averager: Averager, source: bool, source_id: str | None) -> None:
    if source_id is not None and not (isinstance(source_id, str) and source_id):
        raise ValueError(f"source_id must be a peer's id or None, got {source_id!r}")
    if source_id is not None and source != (source_id == averager.peer_id):
        raise ValueError(
            f"source must be true on the peer source_id alone: this peer is {averager.peer_id},"
            f" source_id is {source_id} and source is {source!r}"
        )
    access = averager.config.access
    if source and access is not None and Role.SOURCE not in access.roles:
        raise ValueError(
            "source must be false: this peer's certificate does not grant the role source; ask the run's operator for"
            " one that does"
        )


def _is_of(result: Success, source_id: str | None) -> bool:
    """Return whether the tensors come from the named source; always true if none was named."""
    return source_id is None or result.peers == (source_id,)


def _until_all_came(
    averager: Averager, tensors: list[torch.Tensor], *, source: bool, source_id: str | None, until: float
) -> Success | InProgress | NoPeers | Failed:
    averager.declare(tensors)
    while True:
        if source and not averager.weight and averager.round_state is None:
            averager.accumulate(tensors)
        result = averager.step(wait=max(until - time.monotonic(), 0.0), observe=not source)
        if (isinstance(result, Success) and _is_of(result, source_id)) or time.monotonic() >= until:
            return result
        if isinstance(result, Success):
            others = ", ".join(peer for peer in result.peers if peer != source_id)
            logger.warning("ignoring the parameters of a peer that is not the named source: %s", others)
        else:
            logger.info("not all peers are present yet: %s", result.reason)
        if not isinstance(result, InProgress):
            averager.clear()  # the next attempt contributes the same tensors again
            time.sleep(GLANCE_SECONDS)


def _compare(board: Topic, me: str, result: Success, digest: bytes, until: float) -> None:
    """Publish the digest of the received tensors; wait until all others of the round have published the same.

    Raises:
        SyncError: a member received other tensors, or published no digest in time.
    """
    group = bytes.fromhex(result.group_id)
    board.publish(ReceivedDigest(group, digest).encode(), now=True)
    # The source's digest is required, even if the source was lost after it had sent everything.
    members = {*result.peers, *(set(result.observers) - result.lost.keys())} - {me}
    while True:
        version = board.version
        # What peers published for this round; malformed words are left out.
        said = decoded_all({peer: entry.value for peer, entry in board.entries.items()}, ReceivedDigest)
        told = {peer: word.digest for peer, word in said.items() if word.group == group}
        others = sorted(peer for peer in members & told.keys() if told[peer] != digest)
        if others:
            raise SyncError(f"{_peers(others)} received other parameters than this one")
        missing = sorted(members - told.keys())
        if not missing:
            return
        left = until - time.monotonic()
        if left <= 0:
            raise SyncError(f"{_peers(missing)} published no digest of the received parameters")
        board.wait(version, min(left, LOOK_SECONDS))


def _peers(ids: list[str]) -> str:
    return f"{len(ids)} peer{'s' if len(ids) > 1 else ''} ({', '.join(ids)})"
