"""An archivist that trains nothing, for ``p2pavg archive``: it follows a run's updates, and keeps its history.

It holds a replica of the run's state, for the snapshots of the history. It publishes nothing but the wish for a
snapshot, so the run's peers neither wait for it nor count it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
import trio

from p2pavg.base.errors import ConfigError, RemoteProtocolError, StateError
from p2pavg.base.limits import GLANCE_SECONDS, LOOK_SECONDS, WARN_WAIT_SECONDS
from p2pavg.optim.base.recipe import numbers_digest
from p2pavg.optim.base.state import Lineage, digest_of
from p2pavg.peer.joining.member import join_run, open_peer_of
from p2pavg.peer.peer import Peer, PeerOptions
from p2pavg.peer.shared_states import ShareSettings
from p2pavg.runs.config import AveragingConfig
from p2pavg.state.average import read_numbers
from p2pavg.state.choice import StateNews, choose_snapshot, head_of, named_donors, next_average
from p2pavg.state.history.recording import HistorySettings
from p2pavg.state.joiner.transfers import AverageTransfer, SnapshotTransfer
from p2pavg.state.sharing import StateSharing
from p2pavg.state.snapshot import copy_of, read
from p2pavg.tools.daemon.life import until_signal
from p2pavg.tools.history.replica import Replica

logger = logging.getLogger(__name__)

AHEAD = 4  # averages that are on their way while one is recorded
LOG_BYTES = 1
"""Memory for averages that other peers fetch: an archivist publishes none, so it keeps none."""
_UNKNOWN = (torch.zeros(1, dtype=torch.float32, device="cpu"),)
"""Stands for the run's tensors until the first snapshot says what they are."""


def run_archive(run: str, directory: Path, *, home: Path | None, keep: int | None) -> None:
    """Keep the history of a run until SIGINT or SIGTERM.

    Args:
        run: folder, run file or invitation link, as for ``p2pavg join``.
        directory: of the history.
        home: folder of this peer; ``None`` for the usual one.
        keep: updates that stay.

    Raises:
        P2PAvgError: the run cannot be joined, the folder cannot be used, or the run's optimizer is not known here.
    """
    if keep is not None and keep < 1:
        raise ConfigError(f"--keep must be at least 1, got {keep}")
    config = join_run(run, home=home)
    settings = HistorySettings(directory, keep)

    async def main() -> None:
        async with until_signal(), open_peer_of(config, None, PeerOptions()) as peer:
            print(f"keeping the history of {config.run_id!r} in {directory}", flush=True)
            await _archive(peer, config, settings)

    trio.run(main)


async def _archive(peer: Peer, config: AveragingConfig, settings: HistorySettings) -> None:
    """Keep the history of a run until cancelled.

    Raises:
        StateError: the folder cannot be used, or the run's optimizer is not known here: then one of its members can
            keep the history, with ``RunState(history=...)``.
    """
    replica: Replica | None = None
    while True:
        like: Sequence[torch.Tensor] = _UNKNOWN if replica is None else replica.like
        kept = ShareSettings(log_bytes=LOG_BYTES, history=None if replica is None else settings)
        # An averager has one kind of tensors. The first one only fetches a snapshot, which says what they are.
        async with peer.averager(config) as averager:
            averager.declare(list(like))
            sharing = await averager.share_states(kept)
            archivist = _Archivist(sharing)
            if replica is None:
                replica = await archivist.first_state()
            else:
                replica = await archivist.follow(replica)


class _Archivist:
    def __init__(self, sharing: StateSharing) -> None:
        self._sharing = sharing
        self._refused: deque[bytes] = deque(maxlen=64)
        self._said_at = -WARN_WAIT_SECONDS
        self._reason = ""

    # ------------------------------------------------------------------ a snapshot

    async def first_state(self, at_least: int = 0) -> Replica:
        """Fetch a snapshot that most of the run's peers offer; return the replica that begins there."""
        began_at = trio.current_time()
        while True:
            transfer = await self._chosen(began_at, at_least)
            replica = await self._loaded(transfer)
            if replica is not None:
                return replica

    async def _chosen(self, began_at: float, at_least: int) -> SnapshotTransfer:
        """Begin to fetch the snapshot that the rules for joiners choose."""
        while True:
            # Said again and again: the record that asks lives for a while only.
            self._sharing.publish(wants=True, epoch=0)
            news = self._sharing.news()
            deciding = self._sharing.deciding(news, ())
            waited = trio.current_time() - began_at
            chosen = choose_snapshot(news, deciding, at_least=at_least, waited=waited, refused=self._refused)
            if chosen.offer is not None:
                transfer = self._sharing.fetch_snapshot(chosen.offer)
                transfer.set_donors(self._sharing.addresses_of(news, chosen.donors))
                return transfer
            self._tell(chosen.reason)
            await trio.sleep(LOOK_SECONDS)

    async def _loaded(self, transfer: SnapshotTransfer) -> Replica | None:
        """Wait for a snapshot; return ``None`` if it cannot be had."""
        offer = transfer.offer
        try:
            while not transfer.ended:
                news = self._sharing.news()
                offering = (peer_id for peer_id, said in news.items() if said.snapshot == offer)
                donors = named_donors(offering, self._sharing.deciding(news, ()))
                transfer.set_donors(self._sharing.addresses_of(news, donors))
                if transfer.stands_still and not donors:
                    return None
                await trio.sleep(GLANCE_SECONDS)
        finally:
            transfer.cancel()  # nothing, if it has ended
        if transfer.failure:
            self._tell(transfer.failure)
            return None
        self._sharing.publish(wants=False, epoch=0)

        def load() -> Replica:
            with transfer.data() as data:
                return Replica(read(data))

        replica = await trio.to_thread.run_sync(load)
        if replica.lineage != Lineage(offer.epoch, offer.state):
            self._refused.append(offer.root)
            return None
        logger.info("the history goes on from the snapshot of update %d", offer.epoch)
        return replica

    def _tell(self, reason: str) -> None:
        now = trio.current_time()
        if reason != self._reason or now >= self._said_at + WARN_WAIT_SECONDS:
            self._reason, self._said_at = reason, now
            logger.info("waiting: %s", reason)

    # ------------------------------------------------------------------ the log

    async def follow(self, replica: Replica) -> Replica:
        """Record update after update; return a replica with other tensors, when the run goes on with such."""
        like = _shapes(replica)
        while True:
            await self._follow_log(replica)
            # There is a hole: the next segment begins where the run is.
            replica = await self.first_state(at_least=replica.lineage.epoch)
            if _shapes(replica) != like:
                return replica

    async def _follow_log(self, replica: Replica) -> None:
        """Record updates until one is missing, or belongs to another state."""
        transfers: deque[AverageTransfer] = deque()
        try:
            while True:
                news = self._sharing.news()
                deciding = self._sharing.deciding(news, ())
                self._fetch(transfers, news, deciding, replica.lineage.epoch)
                if not transfers:
                    if head_of(news, deciding) > replica.lineage.epoch and news:
                        logger.warning(
                            "no peer offers the average of update %d any more: it is missing in the history",
                            replica.lineage.epoch + 1,
                        )
                        return
                    # The members keep 64 averages at most, so it may not be late by more.
                    self._sharing.poll()
                    await trio.sleep(GLANCE_SECONDS)
                    continue
                first = transfers[0]
                if first.before not in (None, replica.lineage.state):
                    logger.warning(
                        "the run has taken other updates than this history since %d", replica.lineage.epoch
                    )
                    return
                if not first.ended:
                    await trio.sleep(GLANCE_SECONDS / 5)
                    continue
                if first.failure:
                    logger.warning("update %d is missing: %s", replica.lineage.epoch + 1, first.failure)
                    return
                # In a thread: decoding and the step take as long as in training.
                transfers.popleft()
                await trio.to_thread.run_sync(self._record, replica, first)
                logger.info("recorded update %d", replica.lineage.epoch)
        except (StateError, RemoteProtocolError) as error:
            logger.warning("update %d cannot be recorded: %s", replica.lineage.epoch + 1, error)
        finally:
            for transfer in transfers:
                transfer.cancel()

    def _fetch(
        self,
        transfers: deque[AverageTransfer],
        news: dict[str, StateNews],
        deciding: frozenset[str],
        epoch: int,
    ) -> None:
        while len(transfers) < AHEAD:
            found = next_average(news, deciding, epoch + len(transfers) + 1)
            if found is None:
                break
            transfers.append(self._sharing.fetch_average(found[0]))
        for transfer in transfers:
            offering = (peer_id for peer_id, said in news.items() if transfer.group_id in said.log)
            if donors := named_donors(offering, deciding):
                transfer.set_donors(self._sharing.addresses_of(news, donors))

    def _record(self, replica: Replica, transfer: AverageTransfer) -> None:
        history, proven = self._sharing.history, transfer.proven()
        assert history is not None
        averaged, numbers = transfer.decode(), read_numbers(proven.numbers)
        before = replica.lineage
        after = before.after(proven.group_id.hex(), digest_of(averaged), numbers_digest(numbers))
        if history.needs_snapshot(before.state):
            history.begin(copy_of(replica.content()), before.epoch, before.state)
        replica.take(averaged, numbers, after)
        history.took(transfer.logged(proven.numbers), after.epoch, after.state)


def _shapes(replica: Replica) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in replica.like]
