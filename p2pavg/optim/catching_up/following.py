"""A peer that follows its run from behind: it fetches a snapshot, and replays the averages since.

All of this runs in the training thread, in short calls of :meth:`Follower.advance`. Transfers run in trio's thread.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from p2pavg.base.errors import RemoteProtocolError, StateError
from p2pavg.base.limits import GLANCE_SECONDS, LOOK_SECONDS
from p2pavg.base.result import Success
from p2pavg.optim.base.state import Lineage
from p2pavg.optim.catching_up.common_state import CommonState
from p2pavg.optim.catching_up.following_news import Attempts, ProgressReporter, UpdatePace
from p2pavg.optim.coordination.attendance import MIN_ABSENCE_SECONDS
from p2pavg.optim.coordination.view import RunView
from p2pavg.optim.ranks.shards import Ranks
from p2pavg.state.average import MIN_TRUSTED_SIGNERS
from p2pavg.state.checking import is_finite
from p2pavg.state.choice import Chosen, StateNews, choose_snapshot, head_of, named_donors, next_average
from p2pavg.state.joiner.transfers import AverageTransfer, SnapshotTransfer
from p2pavg.state.progress import StateProgress, amount
from p2pavg.state.sharing import StateSharing
from p2pavg.state.snapshot import copy_of, read

logger = logging.getLogger(__name__)

AHEAD, MAX_AHEAD = 2, 4
"""Averages that are fetched at once: while one is applied, the next one is on its way. More if they are small."""
SMALL_BYTES = 2**24
MAX_REFUSED = 64  # roots of snapshots that could not be used


class Owner(Protocol):
    """The optimizer, as its states see it."""

    def adopted(self) -> None:
        """Note that the common state was replaced: work that belongs to other parameters is dropped."""

    def replay(self, averaged: list[torch.Tensor], success: Success) -> None:
        """Take one update of the run from the log, as the peers that were in its round did."""

    def own_state(self) -> dict[str, Any]:
        """Return what a checkpoint has beside the common state: plain values and tensors."""

    def load_own(self, saved: Mapping[str, Any]) -> None:
        """Continue from :meth:`own_state`; raise ValueError if it does not fit."""


@dataclass(frozen=True, slots=True)
class Following:
    """The situation of a peer that follows."""

    reason: str = ""
    """Reason for waiting, as a sentence."""
    caught_up: bool = False
    progressed: bool = False
    """True if a snapshot was loaded or an update taken: more may be possible at once."""
    failed: bool = False
    """True if a transfer has just failed; the next attempt comes after a pause."""
    over: bool = False
    """True if the caller's time is over, on the first rank."""


class Ready(enum.Enum):
    """The next thing that one rank can do."""

    NOTHING = enum.auto()
    SNAPSHOT = enum.auto()
    """Load the snapshot, which is here."""
    AVERAGE = enum.auto()
    """Take the next average, which is here."""
    END = enum.auto()
    """Go on with the run: it has caught up."""


@dataclass(frozen=True, slots=True)
class SyncStatus:
    """The situation of one rank, for the other ranks of its peer."""

    ready: Ready = Ready.NOTHING
    epoch: int = 0
    """Update to which ``ready`` leads."""
    offer: tuple[int, bytes] | None = None
    """Epoch and state of the snapshot that it fetches."""
    failed: str = ""
    """Reason why it could not fetch something; empty if it could."""
    needs_snapshot: bool = False
    over: bool = False
    """True if its caller's time is over."""


def record_state(sharing: StateSharing, common: CommonState) -> None:
    """Give the history a snapshot of the present state, if it needs one to record the next update."""
    if sharing.history is None or not sharing.history.needs_snapshot(common.lineage.state):
        return
    try:
        data = copy_of(common.content())
    except (StateError, MemoryError) as error:
        logger.error("the history lacks the next updates: %s", error)  # noqa: TRY400 - one line is enough
    else:
        sharing.history.begin(data, common.lineage.epoch, common.lineage.state)


class Follower:
    """Brings one peer to the update at which its run is.

    A peer of several ranks has a follower on each. Each fetches its own shard's state, and all act together: a snapshot
    is loaded, or an average taken, when it is there on all ranks.

    Args:
        sharing: the states of the run's peers.
        common: this peer's own common state.
        owner: the optimizer.
        ranks: the ranks of this peer.
        run: this peer's view of its run.
        on_progress: called about once a second while a transfer runs.
    """

    def __init__(
        self,
        sharing: StateSharing,
        common: CommonState,
        owner: Owner,
        ranks: Ranks,
        run: RunView,
        on_progress: Callable[[StateProgress], None] | None,
    ) -> None:
        self._sharing = sharing
        self._common = common
        self._owner = owner
        self._ranks = ranks
        self._run = run
        self.pace = UpdatePace()
        self._snapshot: SnapshotTransfer | None = None
        self._averages: deque[AverageTransfer] = deque()
        self._ahead = MAX_AHEAD if sharing.average_bytes <= SMALL_BYTES else AHEAD
        self._needs_snapshot = False
        self.is_useless = False
        """True if this peer's present state is not one of the run's."""
        self._at_least = 0
        self._refused: deque[bytes] = deque(maxlen=MAX_REFUSED)
        self._first_offer: tuple[int, bytes] | None = None
        """Epoch and state of the snapshot that the first rank fetches."""
        self._began_at: float | None = None
        self._trusted: frozenset[str] = frozenset()
        self._follows_few = False
        self._last_found = 0.0
        self._attempts = Attempts()
        self._teller = ProgressReporter(sharing, on_progress)

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
        """Number of transfers in a row that failed, or brought nothing of use."""
        return self._attempts.count

    @property
    def is_on_the_log(self) -> bool:
        """True while this peer replays averages, or has just replayed the last one."""
        return not self._needs_snapshot

    def begin(self, *, snapshot: bool = False, at_least: int = 0) -> None:
        """Begin to follow.

        Args:
            snapshot: true if the present state is of no use: the log alone does not help.
            at_least: a snapshot of an earlier update is of no use.
        """
        if self._began_at is None:
            self._began_at = self._last_found = time.monotonic()
            self._at_least = at_least
            self._attempts = Attempts()
            # Loading a state, or replaying an update, makes this peer forget its companions.
            # So the voters are fixed before that.
            self._trusted = frozenset(self._run.companions)
        # A later call while this peer follows may ask for more, and never for less.
        self.is_useless = self.is_useless or snapshot
        self._needs_snapshot = self._needs_snapshot or self.is_useless

    def advance(self, *, behind: bool, few: Collection[str] = (), over: bool = False) -> Following:
        """Do what can be done now, without waiting for the network.

        Args:
            behind: true if the run goes on with another state than this peer's.
            few: the peers that have that state, if they are few: then each average needs signatures of members of this
                peer's last groups, and a snapshot proves nothing.
            over: true if the caller's time is over.
        """
        self.begin()
        now = time.monotonic()
        news = self._sharing.news()
        deciding = self._sharing.deciding(news, self._trusted)
        if self.is_useless:  # then any snapshot of the run is better than this state
            few = ()
        deciding = deciding & frozenset(few) if few else deciding
        head = head_of(news, deciding)
        if deciding:
            self.pace.note(head, now)
        if bool(few) != self._follows_few and behind:
            self._follows_few = bool(few)
            self._drop_averages()  # they were chosen by other peers
        if self._follows_few and not behind:
            found, reason = SyncStatus(ready=Ready.END, epoch=self._common.lineage.epoch), ""
        elif self._follows_few and self._needs_snapshot:
            found, reason = SyncStatus(), "the few peers that are ahead have no averages that lead to them"
        elif self._needs_snapshot:
            found, reason = self._towards_snapshot(news, deciding, head, now, behind=behind)
        else:
            found, reason = self._along_the_log(news, deciding, head, now, behind=behind)
        # From here on all ranks decide by the same values.
        # A rank that went another way would leave the others in a collective call that it never makes.
        stands = self._ranks.gather(replace(found, needs_snapshot=self._needs_snapshot, over=over))
        self._first_offer = stands[0].offer
        reason = self._teller.tell(reason, self._common.lineage.epoch, head, self._transfer(), self.pace, now)
        # One shard alone is of no use, so a failure on one rank is that of all.
        if any(stand.failed for stand in stands):
            self._fail(found.failed or "another rank of this peer could not fetch its part", now)
            return Following(reason=reason, failed=True)
        if any(stand.needs_snapshot for stand in stands) and not self._needs_snapshot:
            self._lose_the_log(now)
        # Ranks get their parts at different times. They act once all are ready for the same update.
        elif len({(stand.ready, stand.epoch) for stand in stands}) == 1 and found.ready is not Ready.NOTHING:
            return self._act(found.ready, now)
        return Following(reason=reason, over=stands[0].over)

    def _act(self, ready: Ready, now: float) -> Following:
        """Do what all ranks are ready for."""
        if ready is Ready.END:
            # The few may have proven nothing.
            said = "goes on" if self._follows_few else "has caught up with its run"
            logger.info("this peer %s at update %d", said, self._common.lineage.epoch)
            self.stop()
            return Following(caught_up=True)
        if ready is Ready.AVERAGE:
            reason = self._replay(self._averages.popleft(), now)
            self._last_found = now
        else:
            reason = self._load(now)
        return Following(progressed=not reason, failed=bool(reason), reason=reason)

    def wait(self, version: int) -> None:
        """Block until there may be something to do.

        Args:
            version: the sharing's, before the last :meth:`advance`.
        """
        transfer = self._transfer()
        if self.is_on_the_log and transfer is None:
            # The others are about to begin a round. This peer is in it if it hears of their last one at once.
            self._sharing.poll()
            # Between two looks at records, while all that this peer lacks is the news of the next average.
            self._sharing.wait(version, GLANCE_SECONDS)
        elif transfer is None or transfer.ended:
            self._sharing.wait(version, LOOK_SECONDS)
        else:
            transfer.wait(LOOK_SECONDS)

    def _transfer(self) -> SnapshotTransfer | AverageTransfer | None:
        return self._snapshot or (self._averages[0] if self._averages else None)

    def stop(self) -> None:
        """Give up what is on its way. The present state stays."""
        self.pause()
        self.is_useless = False

    def pause(self) -> None:
        """Stop for now: no peer has a state to give. The next :meth:`begin` needs a snapshot, if this one does."""
        self._drop_snapshot()
        self._drop_averages()
        self._began_at = None
        self._needs_snapshot = self._follows_few = False

    # ------------------------------------------------------------------ the snapshot

    def _towards_snapshot(
        self, news: dict[str, StateNews], deciding: Collection[str], head: int, now: float, *, behind: bool
    ) -> tuple[SyncStatus, str]:
        transfer, epoch = self._snapshot, self._common.lineage.epoch
        if transfer is None and not behind and epoch >= head and not self.is_useless:
            # Those that were further are gone.
            return SyncStatus(ready=Ready.END, epoch=epoch, needs_snapshot=True), ""
        if transfer is None:
            return self._choose(news, deciding, now)
        offer = transfer.offer
        reason = f"fetching the state of update {offer.epoch}"
        stand = SyncStatus(offer=(offer.epoch, offer.state))
        if not transfer.ended:
            # A newer offer alone does not replace a snapshot that a donor still sends:
            # what is here already would be lost.
            if transfer.stands_still and self._chosen(news, deciding, now).offer not in (None, offer):
                gone = "no peer sends the state of update %d any more, and another is offered"
                logger.info(gone, offer.epoch)
                self._drop_snapshot()
                return self._choose(news, deciding, now)
            # Donors come and go while the snapshot is on its way.
            offering = (peer_id for peer_id, said in news.items() if said.snapshot == offer)
            donors = named_donors(offering, deciding)
            transfer.set_donors(self._sharing.addresses_of(news, donors))
            return stand, reason
        if transfer.failure:
            return replace(stand, failed=transfer.failure), transfer.failure
        return replace(stand, ready=Ready.SNAPSHOT, epoch=offer.epoch), reason

    def _chosen(self, news: dict[str, StateNews], deciding: Collection[str], now: float) -> Chosen:
        assert self._began_at is not None
        # When a run begins again, most peers may have earlier checkpoints than the latest one.
        return choose_snapshot(
            news,
            [peer_id for peer_id in deciding if news[peer_id].epoch >= self._at_least],
            at_least=self._at_least,
            waited=now - self._began_at,
            refused=self._refused,
        )

    def _choose(
        self, news: dict[str, StateNews], deciding: Collection[str], now: float
    ) -> tuple[SyncStatus, str]:
        """Begin to fetch a snapshot, if there is one to take now."""
        if why := self._attempts.pauses(now):
            return SyncStatus(), why
        # All shards have to be of one update, so the first rank chooses,
        # and the others look for donors of the same state.
        if not self._ranks.is_first:
            if self._first_offer is None:
                return SyncStatus(), "waiting for the first rank of this peer to choose a state"
            news = {peer_id: said for peer_id, said in news.items() if said.offers(*self._first_offer)}
            deciding = [peer_id for peer_id in deciding if peer_id in news]
        chosen = self._chosen(news, deciding, now)
        offer = chosen.offer
        if offer is None:
            return SyncStatus(), "; ".join(part for part in (chosen.reason, self._attempts.failure) if part)
        # The size is part of the offer, so a state that is too large is refused before any byte of it is fetched.
        if offer.size > self._common.max_bytes:
            self._refused.append(offer.root)
            why = (
                f"the run's state has {amount(offer.size)}, and this model's has at most"
                f" {amount(self._common.max_bytes)}: it is of another model"
            )
            return SyncStatus(failed=why), why
        logger.info(
            "this peer fetches the state of update %d, %s; %d can send it; of the peers that decide, %s",
            offer.epoch,
            amount(offer.size),
            len(chosen.donors),
            chosen.reason,
        )
        self._snapshot = self._sharing.fetch_snapshot(offer)
        self._snapshot.set_donors(self._sharing.addresses_of(news, chosen.donors))
        return SyncStatus(offer=(offer.epoch, offer.state)), f"fetching the state of update {offer.epoch}"

    def _load(self, now: float) -> str:
        """Load the snapshot that is here; return the reason if it cannot be used. Then nothing has changed."""
        transfer, self._snapshot = self._snapshot, None
        assert transfer is not None
        offer, why, unusable = transfer.offer, "", False
        # ``take`` copies from the snapshot's bytes, so it has to run within the block that lends them.
        with ExitStack() as stack:
            try:
                # If the disk fails, this raises, and the same state may be fetched again.
                data = stack.enter_context(transfer.data())
                unusable = True
                take = self._common.prepare(read(data), Lineage(offer.epoch, offer.state))
                unusable = False
            except StateError as error:
                why = str(error)
            except Exception as error:
                if not unusable or isinstance(error, MemoryError | torch.OutOfMemoryError):
                    raise  # this peer's own disk or memory
                # Of a stranger's state, which no check has foreseen.
                logger.exception("a state cannot be used")
                why = f"{type(error).__name__} was raised: {error}"
            # ``take`` does not fail, so once all ranks have checked their parts, all of them change or none does.
            is_taken = self._ranks.all_agree(not why)
            if is_taken:
                take()
        # Not told from the lineage: a peer that has drifted fetches the state of its own update.
        if not is_taken:
            if any(self._ranks.gather(unusable)):
                self._refused.append(offer.root)
            self._fail(why or "another rank of this peer cannot use its part of the state", now)
            return self._attempts.failure
        logger.info("this peer has loaded the state of update %d", offer.epoch)
        self._needs_snapshot = self.is_useless = False
        self._attempts, self._last_found = Attempts(), now
        # What this peer offered before belongs to other parameters.
        self._sharing.shelf.begin(offer.epoch)
        self._sharing.publish(wants=True, epoch=offer.epoch)
        self._owner.adopted()
        return ""

    def _fail(self, reason: str, now: float) -> None:
        self._drop_snapshot()
        # An average that could not be used would fail again, so a snapshot leads past it.
        if not self._needs_snapshot:
            self._lose_the_log(now)
        self._attempts.failed(reason, now)
        # A donor may have dropped the state since it offered it, so the first failure says little.
        level = logging.WARNING if self._attempts.count > 1 else logging.INFO
        logger.log(level, "this peer could not fetch the run's state: %s", reason)

    def _drop_snapshot(self) -> None:
        if self._snapshot is not None:
            self._snapshot.cancel()
            self._snapshot = None
        self._first_offer = None

    # ------------------------------------------------------------------ the log

    def _along_the_log(
        self, news: dict[str, StateNews], deciding: Collection[str], head: int, now: float, *, behind: bool
    ) -> tuple[SyncStatus, str]:
        """Fetch the next averages; see whether the first of them is here, or this peer has caught up."""
        epoch = self._common.lineage.epoch
        self._fetch_averages(news, deciding)
        if not self._averages:
            if not behind and epoch >= head:
                return SyncStatus(ready=Ready.END, epoch=epoch), ""
            return SyncStatus(), self._without_average(head, now)
        self._last_found = now
        first, reason = self._averages[0], f"fetching the average of update {epoch + 1}"
        if first.ended and first.failure:
            return SyncStatus(failed=first.failure), first.failure
        # The certificate comes before the average, and names the state that the update began from.
        if first.before not in (None, self._common.lineage.state):
            self._lose_the_log(now, forked=True)  # before the average itself was fetched
            return SyncStatus(), "this peer's updates are not those of the run: it needs a snapshot"
        if self._follows_few and first.before is not None:
            # Several other members of this peer's last groups have to say that they hold it. One alone may lie: it can
            # form a group with strangers, or with members whose records it has from another one.
            known = first.proven().signers & frozenset(self._run.last_members)
            if len(known) < MIN_TRUSTED_SIGNERS:
                why = f"the average of update {epoch + 1} has too few signatures of this peer's last groups"
                return SyncStatus(), why
        if not first.ended:
            if first.stands_still and not any(first.group_id in said.log for said in news.values()):
                self._lose_the_log(now)  # it has left all logs while it was fetched
                why = f"no peer sends the average of update {epoch + 1} any more: it needs a snapshot"
                return SyncStatus(), why
            return SyncStatus(), reason
        return SyncStatus(ready=Ready.AVERAGE, epoch=epoch + 1), reason

    def _fetch_averages(self, news: dict[str, StateNews], deciding: Collection[str]) -> None:
        epoch = self._common.lineage.epoch
        while len(self._averages) < self._ahead:
            # The transfers are in the order of the updates, without a gap:
            # each average applies to the result of the one before.
            found = next_average(news, deciding, epoch + len(self._averages) + 1)
            if found is None:
                break
            self._averages.append(self._sharing.fetch_average(found[0]))
        for transfer in self._averages:
            offering = (peer_id for peer_id, said in news.items() if transfer.group_id in said.log)
            donors = named_donors(offering, deciding)
            if donors:  # a donor may still hold what its record does not name any more
                transfer.set_donors(self._sharing.addresses_of(news, donors))

    def _replay(self, transfer: AverageTransfer, now: float) -> str:
        """Take one update, whose average belongs to this peer's state; return the reason if it cannot be used.

        The members of a group in an open run may be strangers, and sign anything.
        """
        averaged: list[torch.Tensor] = []
        try:
            averaged = transfer.decode()
            # One NaN would spread to all parameters, and this peer would lose the state that it has.
            is_good = all(map(is_finite, averaged))
            why = "" if is_good else "an average that members have signed has NaN or infinite values"
        except RemoteProtocolError as error:
            why = f"an average that members have signed cannot be used: {error}"
        # All ranks take the update, or none does.
        if not self._ranks.all_agree(not why):
            self._fail(why or "another rank of this peer cannot use its part of an average", now)
            return self._attempts.failure
        record_state(self._sharing, self._common)
        epoch = self._common.lineage.epoch + 1
        self._owner.replay(averaged, transfer.success(averaged))
        self._sharing.replayed(transfer, epoch, self._common.lineage.state, self._common.numbers)
        self._sharing.publish(wants=True, epoch=epoch)
        return ""

    def _drop_averages(self) -> None:
        while self._averages:
            self._averages.popleft().cancel()

    def _lose_the_log(self, now: float, *, forked: bool = False) -> None:
        """Fetch a snapshot instead; ``forked`` if the run has taken other updates than this peer."""
        self._drop_averages()
        self._needs_snapshot = True
        # An earlier snapshot would take back updates, and lead to the same average that could not be used. After a
        # fork it is what is needed: the log leads from there to the run's updates, and this peer's own are lost anyway.
        self._at_least = 0 if forked else self._common.lineage.epoch
        self._last_found = now

    def _without_average(self, head: int, now: float) -> str:
        """Return the reason for waiting when no peer offers the next average."""
        epoch = self._common.lineage.epoch
        if head <= epoch:
            # At first, the next average may just not be made yet. If this lasts, the others have taken another update
            # than this peer. The members of a round have as long to say their new state.
            if now >= self._last_found + MIN_ABSENCE_SECONDS:
                # Voters that are further back are late, and their snapshots would take back this peer's updates.
                self._lose_the_log(now, forked=head == epoch)
            return f"no peer offers a later state than that of update {epoch}"
        self._lose_the_log(now)
        return f"no peer offers the average of update {epoch + 1} any more; most are at update {head}"
