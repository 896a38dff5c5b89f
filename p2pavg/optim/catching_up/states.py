"""One optimizer's states: what it offers to other peers, what it fetches from them, and its checkpoints.

All of this runs in the training thread, between two updates. What takes time runs in trio's thread, where
:class:`~p2pavg.state.sharing.StateSharing` does it.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from functools import partial

from p2pavg.base.result import Success
from p2pavg.blocking import Averager
from p2pavg.optim.catching_up.checkpoints import Checkpoints, Owner
from p2pavg.optim.catching_up.common_state import CommonState
from p2pavg.optim.catching_up.following import Follower, Following
from p2pavg.optim.catching_up.pausing import Pausing
from p2pavg.optim.catching_up.run_state import RunState
from p2pavg.optim.coordination.news import tell_download
from p2pavg.optim.coordination.progress import Survey
from p2pavg.optim.coordination.together import Together
from p2pavg.optim.coordination.waiting import GrowingPauses
from p2pavg.optim.ranks.shards import Ranks
from p2pavg.peer.shared_states import ShareSettings
from p2pavg.state.choice import DonorView, next_average, takes_snapshot
from p2pavg.state.progress import StateProgress
from p2pavg.state.snapshot import copy_of

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.2  # between two looks at the other peers' records
SAY_SECONDS = 2.0
"""Between two records of a peer while no other one fetches a state: each costs calls to the peers that store it."""
UNWANTED_SECONDS = 120.0
"""A donor keeps its snapshot for this long after the last peer has asked for one or read from it."""
IN_USE_SECONDS = 10.0
"""A snapshot of which a piece was read within this time is in use."""
OBSERVE_SECONDS = 10.0
"""If the run takes updates faster than this, a peer that has caught up observes a round before it computes a batch."""
MIN_LOG_BYTES = 2**24
LATER_SECONDS = 60.0
"""In a run that begins again, a peer with an earlier checkpoint waits this long for the latest one's state."""
LATER_FAILURES = 3  # transfers in a row, after which it waits no longer
REST = 20.0
"""A donor takes no snapshot for this many times the time that its last one took: at most a twentieth of its training,
for joiners that ask for ever, and for joiners that never catch up."""
PACE_UPDATES = 8  # of this peer, over which the usual time between two updates is measured


class States:
    """The states of one optimizer.

    Args:
        run_state: the caller's settings.
        averager: averager of the run.
        common: the state that all peers share.
        owner: the optimizer.
        together: its coordination with the other peers.
        ranks: the ranks of this peer.
    """

    def __init__(
        self,
        run_state: RunState,
        averager: Averager,
        common: CommonState,
        owner: Owner,
        together: Together,
        ranks: Ranks,
    ) -> None:
        run_state.claim()
        self._ranks = ranks
        self._settings = run_state
        self._common = common
        self._owner = owner
        self._together = together
        self._sharing = averager.share_states(
            ShareSettings(
                log_bytes=MIN_LOG_BYTES if run_state.log_bytes is None else run_state.log_bytes,
                upload_mbps=run_state.upload_mbps,
                download_mbps=run_state.download_mbps,
                directory=run_state.directory,
            )
        )
        self._checkpoints = Checkpoints(run_state, common, owner, together.run, self._sharing)
        self.follower = Follower(
            self._sharing,
            common,
            owner,
            ranks,
            companions=lambda: together.run.companions,
            on_progress=partial(_moved, averager, run_state),
        )
        self._looked_at = self._wanted_at = self._said_at = -UNWANTED_SECONDS
        self._update_times: deque[float] = deque(maxlen=PACE_UPDATES)
        self._took_at: float | None = None
        self._has_log_size = run_state.log_bytes is not None
        self._drift = GrowingPauses()
        self._rests_until = -math.inf
        self._pausing = Pausing()
        self._caught_up = 0
        """Times that this peer has caught up since it was in a round."""
        self._fetches_later = False
        self._later_at: float | None = None
        """The time at which a peer was first seen to have a later checkpoint, or its state was last on its way."""

    # ------------------------------------------------------------------ offering

    def look(self, *, at_step: bool = False) -> None:
        """Offer what other peers ask for. Called between two updates, also while this peer waits for others.

        Args:
            at_step: true at the beginning of a step, where all ranks of this peer look together: they take their
                snapshots of the same update.
        """
        now = time.monotonic()
        if self._ranks.are_several:
            if not at_step:
                return
        elif now < self._looked_at + LOOK_SECONDS:
            return
        self._looked_at = now
        epoch = self._common.lineage.epoch
        self._say(now)
        if self.follower.is_active:
            return
        if any(said.wants for said in self._sharing.news().values()):
            self._wanted_at = now
        shelf = self._sharing.shelf
        used_at = max(self._wanted_at, shelf.read_at)
        if shelf.snapshot is not None and now >= used_at + UNWANTED_SECONDS:
            shelf.put(None)
        is_its_turn = self._sharing.gives_snapshots and now >= self._rests_until
        due = is_its_turn and takes_snapshot(self._situation(now)), not self._sharing.is_working
        ranks = self._ranks.gather(due)
        if ranks[0][0] and all(idle for _, idle in ranks):
            shelf.put(None)  # at most one is held
            data = copy_of(self._common.content())
            self._rests_until = time.monotonic() + REST * (time.monotonic() - now)
            self._sharing.offer(data, epoch, self._common.lineage.state)

    def _say(self, now: float) -> None:
        """Publish this peer's record: after each update while a peer fetches a state, and else every few seconds."""
        if now >= self._said_at + SAY_SECONDS or now < self._wanted_at + IN_USE_SECONDS:
            self._said_at = now
            self._sharing.say(wants=self.follower.is_active, epoch=self._common.lineage.epoch)

    def _situation(self, now: float) -> DonorView:
        shelf = self._sharing.shelf
        held = None if shelf.snapshot is None else shelf.snapshot.offer.epoch
        return DonorView(
            epoch=self._common.lineage.epoch,
            update_seconds=statistics.median(self._update_times) if self._update_times else 0.0,
            wanted=now < self._wanted_at + LOOK_SECONDS,
            snapshot_epoch=held,
            log_first=shelf.log_first,
            log_full=0.0 if held is None else shelf.log_full(held),
            in_use=now < shelf.read_at + IN_USE_SECONDS,
        )

    def pauses(self, seen: Survey) -> str:
        """Return the reason why this peer, alone in its run, takes no update now; empty if it takes one."""
        fetches = any(said.wants for said in self._sharing.news().values())
        if not self._pausing.is_due(fetches or seen.coming > 0, time.monotonic()):
            return ""
        return "another peer joins, and could not replay the next update: it waits for that peer"

    def took(self, success: Success) -> None:
        """Note an update that this peer took in a round, or alone."""
        epoch, now = self._common.lineage.epoch, time.monotonic()
        self._caught_up = 0
        if not success.certificate:
            # No log leads from one update of a peer alone to the next: a snapshot has to be of the present one.
            self._update_times.clear()
        elif self._took_at is not None:
            self._update_times.append(now - self._took_at)
        self._took_at = now
        if not self._has_log_size:
            self._has_log_size = True
            size = sum(tensor.nbytes for tensor in self._common.content().tensors.values())
            self._sharing.shelf.set_log_bytes(max(2 * size, MIN_LOG_BYTES))
        self._sharing.took(bytes.fromhex(success.group_id), epoch)
        self._say(now)
        self._looked_at = now - LOOK_SECONDS
        self._checkpoints.took(epoch)

    def replaced(self) -> None:
        """Note that all peers of the run have replaced the common state alike, by something that no average tells.

        What this peer has offered until now leads to no state of the run.
        """
        epoch = self._common.lineage.epoch
        self._sharing.shelf.put(None)
        self._sharing.shelf.begin(epoch)
        self._say(time.monotonic())

    # ------------------------------------------------------------------ following

    @property
    def should_observe(self) -> bool:
        """True if a batch of this peer would probably come too late: it observes a round first."""
        return self._caught_up > 1 or 0 < self.follower.pace.update_seconds < OBSERVE_SECONDS

    def must_follow(self, behind: str | None, *, outnumbered: bool) -> bool:
        """Return whether this peer has to fetch the run's state, and begin if it has.

        Args:
            behind: the reason for which it cannot follow the run, if there is one.
            outnumbered: true if more peers hold the same other parameters.
        """
        if self._ranks.as_the_first(self._later_is_gone):
            self._give_up_later()
        drifted = outnumbered and not self.follower.is_active and self._drift.is_due(time.monotonic())
        reasons = self._ranks.gather((drifted, behind is not None, bool(self.has_later())))
        if any(drifted for drifted, _, _ in reasons):
            logger.warning("more peers hold other parameters than this one's: this peer fetches theirs")
            self.follower.begin(snapshot=True)
        if any(late for _, late, _ in reasons):
            self.follower.begin()
        if any(later for _, _, later in reasons) and not self.follower.is_active:
            self._fetches_later = not self._ranks.as_the_first(self._has_next_average)
            self.follower.begin(snapshot=self._fetches_later, at_least=self._common.lineage.epoch + 1)
        return self.follower.is_active

    def _has_next_average(self) -> bool:
        """Return whether a peer offers the next average. Peers that begin again have none: only a snapshot helps."""
        news = self._sharing.news()
        deciding = self._sharing.deciding(news, self._together.run.companions)
        return next_average(news, deciding, self._common.lineage.epoch + 1) is not None

    def has_later(self) -> str:
        """Return the reason why a run that begins, or begins again, has a later state; empty if it has none.

        The latest checkpoint counts, also if one peer alone has it. So one of the peers that decide can give its state
        to a run that begins again, or delay it by :data:`LATER_SECONDS`.
        """
        if self._together.run.has_started or not self._together.run.is_start:
            return ""
        news = self._sharing.news()
        deciding = self._sharing.deciding(news, self._together.run.companions)
        latest = max((news[peer_id].epoch for peer_id in deciding), default=0)
        if latest <= self._common.lineage.epoch:
            return ""
        now = time.monotonic()
        if self._later_at is None or self.follower.is_fetching:
            self._later_at = now
        if now >= self._later_at + LATER_SECONDS or self.follower.failures >= LATER_FAILURES:
            return ""
        return f"the run begins again from a checkpoint of update {latest}"

    def catch_up(self, until: float) -> Following:
        """Follow the run until this peer has caught up, something failed, or the time is over.

        Args:
            until: moment of :func:`time.monotonic`.
        """
        while True:
            version, run = self._sharing.version, self._together.run
            over = time.monotonic() >= until
            if self._ranks.as_the_first(self._later_is_gone):
                self._give_up_later()
                return Following(over=True)
            following = self.follower.advance(behind=run.is_behind(), over=over)
            run.follow(self.should_observe and self.follower.is_on_the_log)
            self._sharing.say(wants=self.follower.is_active, epoch=self._common.lineage.epoch)
            if following.caught_up:
                self._caught_up += 1
                self._fetches_later = False
                return following
            if following.failed or following.over:
                run.follow(False)
                return following
            if not following.progressed:
                self.follower.wait(version)

    def _give_up_later(self) -> None:
        logger.warning("the peer with a later checkpoint offers no state: this peer continues from its own")
        self.follower.stop()
        self._together.run.follow(False)
        self._fetches_later, self._later_at = False, -math.inf

    def _later_is_gone(self) -> bool:
        """Return whether this peer waits for a later checkpoint's state that no peer has any more."""
        waits = self._fetches_later and not self.follower.is_on_the_log and not self.follower.is_fetching
        return waits and not self._together.run.is_behind() and not self.has_later()

    def load_newest(self) -> None:
        """Continue from the newest checkpoint, if there is one; see :meth:`Checkpoints.load_newest`."""
        self._checkpoints.load_newest()


def _moved(averager: Averager, run_state: RunState, progress: StateProgress) -> None:
    """Tell the subscribers, and the training loop if it wants to know, of a transfer to this peer."""
    tell_download(averager, progress)
    if run_state.on_progress is not None:
        run_state.on_progress(progress)
