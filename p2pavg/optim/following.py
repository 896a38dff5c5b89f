"""A peer that follows its run from behind: it fetches a snapshot, and replays the averages since.

All of this runs in the training thread, in short calls of :meth:`Follower.advance`. Transfers run in trio's thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from p2pavg.errors import RemoteProtocolError, StateError
from p2pavg.optim.common_state import CommonState
from p2pavg.optim.waiting import GrowingPauses
from p2pavg.result import Success
from p2pavg.state.average import ProvenAverage
from p2pavg.state.checking import is_finite
from p2pavg.state.choice import choose_snapshot, head_of, keeps_up, next_average
from p2pavg.state.news import StateNews
from p2pavg.state.progress import StateProgress, amount, cannot_keep_up, span
from p2pavg.state.sharing import AverageTransfer, SnapshotTransfer, StateSharing
from p2pavg.state.snapshot import read

logger = logging.getLogger(__name__)

AHEAD, MAX_AHEAD = 2, 4
"""Averages that are fetched at once: while one is applied, the next one is on its way. More of them if they are small."""
SMALL_BYTES = 2**24
LOOK_SECONDS = 1.0  # between two looks at transfers and records
RETRY_SECONDS = 2.0  # doubled with each failure in a row
MAX_RETRY_SECONDS = 60.0
LOST_SECONDS = 10.0
"""If most peers hold another state than this one's for this long, and none offers a later average, a snapshot is fetched."""
MAX_REFUSED = 64  # roots of snapshots that could not be used
PACE_UPDATES = 8  # updates of the run over which their usual time is measured


class Replays(Protocol):
    """The part of an optimizer that takes updates from the log."""

    def adopted(self) -> None:
        """Note that the common state was replaced: work that belongs to other parameters is dropped."""

    def replay(self, averaged: list[torch.Tensor], success: Success) -> None:
        """Take one update of the run, as the peers that were in its round did."""


@dataclass(frozen=True, slots=True)
class Following:
    """The situation of a peer that follows."""

    caught_up: bool
    reason: str
    failed: bool = False
    """True if a transfer has just failed; the next attempt comes after a pause."""


class Pace:
    """The usual time between two updates of the run, from the epochs that its peers report."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=PACE_UPDATES)

    def note(self, epoch: int, now: float) -> None:
        """Note the update at which the run is."""
        if not self._seen or epoch > self._seen[-1][0]:
            self._seen.append((epoch, now))
        elif epoch < self._seen[-1][0]:
            self._seen.clear()

    @property
    def update_seconds(self) -> float:
        """Seconds for one update; 0 before two were seen."""
        if len(self._seen) < 2:
            return 0.0
        (first, began), (last, ended) = self._seen[0], self._seen[-1]
        return (ended - began) / (last - first)


class Follower:
    """Brings one peer to the update at which its run is.

    Args:
        sharing: the states of the run's peers.
        common: this peer's own common state.
        owner: the optimizer.
        companions: returns the peers that took one of the last updates with this one.
        on_progress: called about once a second while a transfer runs.
    """

    def __init__(
        self,
        sharing: StateSharing,
        common: CommonState,
        owner: Replays,
        *,
        companions: Callable[[], Collection[str]],
        on_progress: Callable[[StateProgress], None] | None,
    ) -> None:
        self._sharing = sharing
        self._common = common
        self._owner = owner
        self._companions = companions
        self._on_progress = on_progress
        self.pace = Pace()
        self._snapshot: SnapshotTransfer | None = None
        self._averages: deque[AverageTransfer] = deque()
        self._ahead = MAX_AHEAD if sharing.average_bytes <= SMALL_BYTES else AHEAD
        self._needs_snapshot = False
        self._is_useless = False
        """True if this peer's present state is not one of the run's."""
        self._at_least = 0
        self._refused: deque[bytes] = deque(maxlen=MAX_REFUSED)
        self._began_at: float | None = None
        self._trusted: frozenset[str] = frozenset()
        self._last_found = 0.0
        self._retries = 0
        self._not_before = 0.0
        self._failure = ""
        self._told = GrowingPauses()
        self._reported_at = 0.0

    @property
    def is_active(self) -> bool:
        """True from the first :meth:`advance` until this peer has caught up."""
        return self._began_at is not None

    @property
    def is_fetching(self) -> bool:
        """True while a transfer runs."""
        return self._transfer() is not None

    @property
    def failures(self) -> int:
        """Number of transfers that failed since the last one that was of use."""
        return self._retries

    @property
    def is_on_the_log(self) -> bool:
        """True while this peer replays averages, or has just replayed the last one."""
        return not self._needs_snapshot

    def begin(self, *, snapshot: bool = False) -> None:
        """Begin to follow.

        Args:
            snapshot: true if the present state is of no use: the log alone does not help.
        """
        if self._began_at is None:
            self._began_at = self._last_found = time.monotonic()
            self._at_least, self._failure = 0, ""
            self._trusted = frozenset(self._companions())
        self._needs_snapshot = self._needs_snapshot or snapshot
        self._is_useless = self._is_useless or snapshot

    def advance(self, *, behind: bool) -> Following:
        """Do what can be done now, without waiting for the network.

        Args:
            behind: true if most peers of the run have another state than this one.
        """
        self.begin()
        now = time.monotonic()
        news = self._sharing.news()
        deciding = self._sharing.deciding(news, self._trusted)
        failures = self._retries
        head = head_of(news, deciding)
        self.pace.note(head, now)
        if self._needs_snapshot and self._needs_none(head, behind=behind):
            self._end()
            return Following(True, "")
        if self._needs_snapshot:
            reason = self._towards_snapshot(news, deciding, now)
        else:
            reason = self._along_the_log(news, deciding, now)
            if not reason and not behind and self._common.lineage.epoch >= head:
                self._end()
                return Following(True, "")
            reason = reason or self._without_average(head, now)
        reason = self._report(reason, head, now)
        return Following(False, reason, failed=self._retries > failures)

    def _needs_none(self, head: int, *, behind: bool) -> bool:
        """Return whether this peer can go on with its own state after all: those that were further are gone."""
        is_last = not behind and self._common.lineage.epoch >= head
        return is_last and not self._is_useless and self._snapshot is None

    def wait(self, version: int) -> None:
        """Block until there may be something to do.

        Args:
            version: the sharing's, before the last :meth:`advance`.
        """
        transfer = self._transfer()
        if transfer is None or transfer.ended:
            self._sharing.wait(version, LOOK_SECONDS)
        else:
            transfer.wait(LOOK_SECONDS)

    def _transfer(self) -> SnapshotTransfer | AverageTransfer | None:
        return self._snapshot or (self._averages[0] if self._averages else None)

    def stop(self) -> None:
        """Give up what is on its way. The present state stays."""
        if self._snapshot is not None:
            self._snapshot.cancel()
            self._snapshot = None
        self._drop_averages()
        self._began_at = None
        self._needs_snapshot = self._is_useless = False

    def _end(self) -> None:
        logger.info("this peer has caught up with its run at update %d", self._common.lineage.epoch)
        self.stop()
        self._retries, self._told = 0, GrowingPauses()

    # ------------------------------------------------------------------ the snapshot

    def _towards_snapshot(self, news: dict[str, StateNews], deciding: Collection[str], now: float) -> str:
        if self._snapshot is not None:
            return self._receive_snapshot(news, now)
        if now < self._not_before:
            return f"{self._failure}; the next attempt is in {span(self._not_before - now)}"
        assert self._began_at is not None
        chosen = choose_snapshot(
            news,
            deciding,
            at_least=self._at_least,
            waited=now - self._began_at,
            refused=self._refused,
        )
        if chosen.offer is None:
            return "; ".join(part for part in (chosen.reason, self._failure) if part)
        if chosen.offer.size > self._common.max_bytes:
            self._refused.append(chosen.offer.root)
            return self._failed(
                f"the run's state has {amount(chosen.offer.size)}, and this model's has {amount(self._common.max_bytes)}"
                " at most: it is of another model",
                now,
            )
        logger.info(
            "this peer fetches the state of update %d, %s, from %d peers (%s)",
            chosen.offer.epoch,
            amount(chosen.offer.size),
            len(chosen.donors),
            chosen.reason,
        )
        self._snapshot = self._sharing.fetch_snapshot(chosen.offer)
        self._snapshot.set_donors(self._sharing.addresses_of(news, chosen.donors))
        return f"fetching the state of update {chosen.offer.epoch}"

    def _receive_snapshot(self, news: dict[str, StateNews], now: float) -> str:
        transfer = self._snapshot
        assert transfer is not None
        offer = transfer.offer
        if not transfer.ended:
            donors = [peer_id for peer_id, said in news.items() if said.snapshot == offer]
            transfer.set_donors(self._sharing.addresses_of(news, donors))
            return f"fetching the state of update {offer.epoch}"
        self._snapshot = None
        if transfer.failure:
            return self._failed(transfer.failure, now)
        try:
            with transfer.data() as data:
                content = read(data)
                take = self._common.prepare(content)
                if content.values["lineage"] != {"epoch": offer.epoch, "state": offer.state.hex()}:
                    raise StateError("the state is that of another update than its donors say")
                take()
                del content, take
        except StateError as error:
            self._refused.append(offer.root)
            return self._failed(str(error), now)
        self._adopted(offer.epoch)
        return f"the state of update {offer.epoch} is loaded"

    def _adopted(self, epoch: int) -> None:
        logger.info("this peer has loaded the state of update %d", epoch)
        self._needs_snapshot = self._is_useless = False
        self._failure, self._retries = "", 0
        self._last_found = time.monotonic()
        self._sharing.shelf.begin(epoch)
        self._sharing.say(wants=True, epoch=epoch)
        self._owner.adopted()

    def _failed(self, reason: str, now: float) -> str:
        self._retries += 1
        self._failure = reason
        self._not_before = now + min(RETRY_SECONDS * 2.0 ** min(self._retries - 1, 8), MAX_RETRY_SECONDS)
        logger.warning("this peer could not fetch the run's state: %s", reason)
        return reason

    # ------------------------------------------------------------------ the log

    def _along_the_log(self, news: dict[str, StateNews], deciding: Collection[str], now: float) -> str:
        """Replay the averages that are here, and fetch the next ones; return the reason for waiting, if any."""
        while True:
            self._fetch_averages(news, deciding)
            if not self._averages:
                return ""
            self._last_found = now
            first = self._averages[0]
            if not first.ended:
                return f"fetching the average of update {self._common.lineage.epoch + 1}"
            self._averages.popleft()
            if first.failure:
                self._lose_the_log(now)
                return self._failed(first.failure, now)
            try:
                replayed = self._replay(first)
            except StateError as error:
                self._lose_the_log(now)
                return self._failed(str(error), now)
            if not replayed:
                self._lose_the_log(now)
                return "this peer's updates are not those of the run: a snapshot is needed"

    def _fetch_averages(self, news: dict[str, StateNews], deciding: Collection[str]) -> None:
        epoch = self._common.lineage.epoch
        while len(self._averages) < self._ahead:
            found = next_average(news, deciding, epoch + len(self._averages) + 1)
            if found is None:
                break
            group_id, donors = found
            self._averages.append(self._sharing.fetch_average(group_id))
        for transfer in self._averages:
            donors = tuple(peer_id for peer_id, said in news.items() if transfer.group_id in said.log)
            if donors:  # a donor may still hold what its record does not name any more
                transfer.set_donors(self._sharing.addresses_of(news, donors))

    def _replay(self, transfer: AverageTransfer) -> bool:
        """Take one update; return whether its average belongs to this peer's state."""
        proven = transfer.proven()
        if proven.state != self._common.lineage.state:
            return False
        try:
            averaged = transfer.decode()
        except RemoteProtocolError as error:
            raise StateError(f"an average that members have signed cannot be used: {error}") from None
        if not all(is_finite(tensor) for tensor in averaged):
            raise StateError("an average that members have signed has NaN or infinite values")
        epoch = self._common.lineage.epoch + 1
        self._owner.replay(averaged, replayed_success(proven, averaged))
        self._sharing.shelf.took(transfer.logged(), epoch)
        self._sharing.say(wants=True, epoch=epoch)
        return True

    def _drop_averages(self) -> None:
        while self._averages:
            self._averages.popleft().cancel()

    def _lose_the_log(self, now: float) -> None:
        self._drop_averages()
        self._needs_snapshot = True
        self._at_least = self._common.lineage.epoch
        self._last_found = now

    def _without_average(self, head: int, now: float) -> str:
        """Return the reason for waiting when no peer offers the next average."""
        epoch = self._common.lineage.epoch
        if head <= epoch:
            if now >= self._last_found + LOST_SECONDS:
                self._lose_the_log(now)
            return f"no peer offers a later state than that of update {epoch}"
        self._lose_the_log(now)
        return f"no peer offers the average of update {epoch + 1} any more; most are at update {head}"

    # ------------------------------------------------------------------ progress

    def _report(self, reason: str, head: int, now: float) -> str:
        """Tell the user how far this peer is; return it as a sentence."""
        transfer = self._transfer()
        progress = StateProgress(reason=reason, epoch=self._common.lineage.epoch, target=head)
        if transfer is not None and not transfer.ended:
            progress = transfer.progress(progress)
        if self._on_progress is not None and now >= self._reported_at + 1.0:
            self._reported_at = now
            self._on_progress(progress)
        if self._told.is_due(now):
            logger.info("%s", progress.reason)
            self._warn_of_the_link(progress)
        return progress.reason

    def _warn_of_the_link(self, progress: StateProgress) -> None:
        size, seconds = self._sharing.average_bytes, self.pace.update_seconds
        if not size or not seconds or not progress.bytes_per_second or progress.seconds_left is None:
            return
        if not keeps_up(size, seconds, progress.bytes_per_second):
            logger.warning("%s", cannot_keep_up(size, seconds, progress.bytes_per_second))


def replayed_success(proven: ProvenAverage, averaged: list[torch.Tensor]) -> Success:
    """Return the result of a round of which this peer was no member, as its certificate describes it."""
    roster = proven.roster
    return Success(
        averaged=averaged,
        peers=tuple(member.peer_id for member in roster.contributors),
        weights={member.peer_id: member.weight for member in roster.contributors},
        total_weight=roster.total_weight,
        compression_ratio=1.0,
        bytes_sent=0,
        bytes_received=sum(proven.sizes),
        duration=0.0,
        exchange_duration=0.0,
        group_id=proven.group_id.hex(),
        share=(0, 0),
        metrics=roster.metrics,
        observers=tuple(m.peer_id for m in roster.holders if m.peer_id in roster.observers),
        auxiliaries=tuple(member.peer_id for member in roster.members if member.auxiliary),
        certificate=proven.certificate,
    )
