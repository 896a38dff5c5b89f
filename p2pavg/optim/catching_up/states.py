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
from dataclasses import replace
from functools import partial

from p2pavg.base.errors import StateError
from p2pavg.base.limits import GLANCE_SECONDS, WARN_WAIT_SECONDS
from p2pavg.base.result import Success
from p2pavg.blocking import Averager
from p2pavg.optim.catching_up.checkpoints import Checkpoints
from p2pavg.optim.catching_up.common_state import CommonState
from p2pavg.optim.catching_up.following import Follower, Following, Owner, record_state
from p2pavg.optim.catching_up.pausing import Pausing
from p2pavg.optim.catching_up.run_state import RunState
from p2pavg.optim.coordination.ending import GrowingPauses, named
from p2pavg.optim.coordination.progress import Survey
from p2pavg.optim.coordination.together import RoundCoordinator
from p2pavg.optim.coordination.watch import tell_download
from p2pavg.optim.ranks.shards import Ranks
from p2pavg.peer.shared_states import ShareSettings
from p2pavg.state.choice import DonorView, next_average, takes_snapshot
from p2pavg.state.progress import StateProgress
from p2pavg.state.snapshot import copy_of

logger = logging.getLogger(__name__)

SAY_STATE_SECONDS = 2.0
"""Between two records of a peer while no other one fetches a state: each costs calls to the peers that store it."""
UNWANTED_SECONDS = 120.0
"""A donor keeps its snapshot for this long after the last peer has asked for one or read from it."""
IN_USE_SECONDS = 10.0
"""A snapshot of which a piece was read within this time is in use."""
OBSERVE_SECONDS = 10.0
"""If the run takes updates faster than this, a peer that has caught up observes a round before it computes a batch."""
MIN_LOG_BYTES = 2**24
LATER_STATE_SECONDS = 60.0
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
        together: RoundCoordinator,
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
                history=run_state.history_settings(common.labels),
            )
        )
        self._checkpoints = Checkpoints(run_state, common, owner, together.run, self._sharing)
        self.follower = Follower(
            self._sharing, common, owner, ranks, together.run, partial(_moved, averager, run_state)
        )
        self._looked_at = self._wanted_at = self._said_at = -UNWANTED_SECONDS
        self._update_times: deque[float] = deque(maxlen=PACE_UPDATES)
        self._took_at: float | None = None
        self._has_taken = False
        self._unoffered = ""
        """The reason why this peer could not offer its last snapshot."""
        self._drift, self._stopped = GrowingPauses(), GrowingPauses()
        self._rests_until = -math.inf
        self._pausing = Pausing()
        self._caught_up = 0
        """Times that this peer has caught up since it was in a round."""
        self._is_useless = False
        """True if this peer's state turned out to be of no use since the last step."""
        self._alone_since: float | None = None
        """The time since which this peer has needed a state, and none has offered one."""
        self._fetches_later = False
        self._later_at: float | None = None
        """The time at which a peer was first seen to have a later checkpoint, or its state was last on its way."""

    # ------------------------------------------------------------------ offering

    def poll(self, *, at_step: bool = False) -> None:
        """Offer what other peers ask for. Called between two updates, also while this peer waits for others.

        Args:
            at_step: true at the beginning of a step, where all ranks of this peer look together: they take their
                snapshots of the same update.
        """
        now = time.monotonic()
        # The ranks take their snapshots together. They all call this at a step, and not all of them while they wait.
        if self._ranks.are_several:
            if not at_step:
                return
        elif now < self._looked_at + GLANCE_SECONDS:
            return
        self._looked_at = now
        epoch = self._common.lineage.epoch
        # A peer that follows offers nothing, but the others still have to see that it wants a state.
        self._publish(now)
        if self.follower.is_active:
            return
        if any(said.wants for said in self._sharing.news().values()):
            self._wanted_at = now
        shelf = self._sharing.shelf
        # A joiner that fetches the snapshot may not say so for a while. What it
        # reads shows that the snapshot is in use.
        used_at = max(self._wanted_at, shelf.read_at)
        if shelf.snapshot is not None and now >= used_at + UNWANTED_SECONDS:
            shelf.put(None)
        rested = now >= self._rests_until
        # The first rank decides whether a snapshot is due. Each rank has to be free, as it copies its own shard.
        due = rested and takes_snapshot(self._situation(now)), not self._sharing.is_working
        ranks = self._ranks.gather(due)
        if ranks[0][0] and all(idle for _, idle in ranks):
            shelf.put(None)  # at most one is held
            data = self._snapshot()
            # Counted from the copy itself, which took until now. So joiners that
            # ask for ever cost a fixed part of the training.
            self._rests_until = time.monotonic() + REST * (time.monotonic() - now)
            if data is None:
                self._rests_until += IN_USE_SECONDS
            else:
                self._sharing.offer(data, epoch, self._common.lineage.state)

    def _snapshot(self) -> memoryview | None:
        """Return a copy of the state; ``None`` if there can be none. A peer that asks for one never ends this peer."""
        try:
            data = copy_of(self._common.content())
        except (StateError, MemoryError) as error:
            if self._unoffered != (reason := str(error) or type(error).__name__):
                logger.error("this peer cannot offer its state to peers that join: %s", reason)  # noqa: TRY400
            self._unoffered = reason
            return None
        self._unoffered = ""
        return data

    def publish(self) -> None:
        """Publish this peer's record now."""
        self._said_at = -math.inf
        self._publish(time.monotonic())

    @property
    def served_at(self) -> float:
        """The time at which another peer last read a part of this peer's snapshot; -inf before the first one."""
        return self._sharing.shelf.read_at

    def _publish(self, now: float) -> None:
        """Publish this peer's record: after each update while a peer fetches a state, and else every few seconds."""
        # A joiner fetches the next average as soon as a record names it, so
        # records must not be late while one is there.
        if now >= self._said_at + SAY_STATE_SECONDS or now < self._wanted_at + IN_USE_SECONDS:
            self._said_at = now
            self._sharing.publish(wants=self.follower.is_active, epoch=self._common.lineage.epoch)

    def _situation(self, now: float) -> DonorView:
        shelf = self._sharing.shelf
        held = None if shelf.snapshot is None else shelf.snapshot.offer.epoch
        return DonorView(
            epoch=self._common.lineage.epoch,
            update_seconds=statistics.median(self._update_times) if self._update_times else 0.0,
            since_update=0.0 if self._took_at is None else now - self._took_at,
            wanted=now < self._wanted_at + GLANCE_SECONDS,
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

    @property
    def is_followed(self) -> bool:
        """True if a peer that is in no round will want the last average; see :attr:`Shelf.is_followed`."""
        return self._sharing.shelf.is_followed

    def took(self, success: Success) -> None:
        """Note an update that this peer took in a round, or alone.

        Raises:
            StateError: since this update, the state cannot be saved or offered; the message names the value.
        """
        epoch, now = self._common.lineage.epoch, time.monotonic()
        self._caught_up = 0
        if not success.certificate:
            # No log leads from one update of a peer alone to the next: a snapshot has to be of the present one.
            self._update_times.clear()
        elif self._took_at is not None:
            self._update_times.append(now - self._took_at)
        self._took_at = now
        after, numbers = self._common.lineage.state, self._common.numbers
        self._sharing.took(bytes.fromhex(success.group_id), epoch, after, numbers)
        self._publish(now)
        # The next look, which may take the snapshot of this update, comes at once.
        self._looked_at = now - GLANCE_SECONDS
        self._checkpoints.took(epoch)
        # Last, since it may raise: the update is noted and its record published by then.
        self._common.check_saves()
        # The size of the state is known now: the optimizer has made its own tensors in this update.
        if not self._has_taken:
            self._has_taken = True
            size = sum(tensor.nbytes for tensor in self._common.content().tensors.values())
            if self._settings.log_bytes is None:
                self._sharing.shelf.set_log_bytes(max(2 * size, MIN_LOG_BYTES))

    def before_update(self, success: Success) -> None:
        """Let the history have a snapshot of the state before an update, if it needs one to go on."""
        # Of an update that this peer takes alone there is no proof, and nothing to record.
        if success.certificate:
            record_state(self._sharing, self._common)

    def save(self) -> None:
        """Write a checkpoint of the present update, if there is a folder for checkpoints."""
        self._checkpoints.save(self._common.lineage.epoch)

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
        # Decisions that depend on the network are the first rank's. Ranks that decided by themselves would call
        # different collectives, and wait for each other for ever.
        if self._ranks.as_the_first(self._later_is_gone):
            self._give_up_later()
        drifted = outnumbered and not self.follower.is_active and self._drift.is_due(time.monotonic())
        mine = (self._is_useless, drifted, behind is not None, bool(self.has_later()))
        useless, drifted, late, later = map(any, zip(*self._ranks.gather(mine), strict=True))
        self._is_useless = False
        # A state with other parameters cannot be mended by averages. A peer that is only late may replay the log.
        if drifted:
            logger.warning("more peers hold other parameters than this one's: this peer fetches theirs")
        if drifted or useless:
            self.follower.begin(snapshot=True)
        if late:
            self.follower.begin()
        if later and not self.follower.is_active:
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
        to a run that begins again, or delay it by :data:`LATER_STATE_SECONDS`.
        """
        # In a run that goes on, the rules for peers that are behind decide, and not a single record.
        if self._together.run.has_started or not self._together.run.is_start:
            return ""
        news = self._sharing.news()
        deciding = self._sharing.deciding(news, self._together.run.companions)
        latest = max((news[peer_id].epoch for peer_id in deciding), default=0)
        if latest <= self._common.lineage.epoch:
            return ""
        now = time.monotonic()
        # The time counts while nothing comes: a large state may take longer than the limit.
        if self._later_at is None or self.follower.is_fetching:
            self._later_at = now
        if now >= self._later_at + LATER_STATE_SECONDS or self.follower.failures >= LATER_FAILURES:
            return ""
        return f"the run begins again from a checkpoint of update {latest}"

    def fetch_state(self) -> None:
        """Fetch the run's state from this step on, since the present one is of no use."""
        self._is_useless = True

    def check_company(self) -> None:
        """Raise an error if this peer has begun with what keeps it apart from its run, as no state can mend.

        The peers that the run goes on with have to be members of a run with an authority, or peers that this program
        named. A stranger's record ends no program: ``StepReport.behind`` has the reason then.

        Raises:
            StateError: this peer has another architecture, or other rules of training.
        """
        run = self._together.run
        why = ""
        if not self._common.lineage.epoch and not run.has_started:
            ahead = run.peers_ahead()
            judges = ahead if self._sharing.members_only else self._sharing.bootstrap & frozenset(ahead)
            why = self._together.watch.keeps_apart(judges)
        # All ranks raise, or one of them would go on and wait for the others.
        for told in self._ranks.gather(why):
            if told:
                raise StateError(
                    f"this peer cannot join its run: {told}",
                    remedy="start it with the model and the settings that the run trains, or give it another run_id."
                    " Buffers and frozen parameters are settings too: give state=model on all peers or on none",
                )

    def catch_up(self, until: float) -> Following:
        """Follow the run until this peer has caught up, something failed, or the time is over.

        Args:
            until: moment of :func:`time.monotonic`.

        Raises:
            StateError: see :meth:`check_company`.
        """
        try:
            return self._follow(until)
        finally:
            self._together.waits_no_more()

    def _follow(self, until: float) -> Following:
        began = time.monotonic()
        while True:
            self.check_company()
            # Read before the look at the news: a word that comes in between ends the wait below at once.
            version, run = self._sharing.version, self._together.run
            gives_up = self._gives_up(began)
            over = bool(gives_up) or time.monotonic() >= until
            later_is_gone, is_alone = self._ranks.as_the_first(
                lambda: (self._later_is_gone(), self._is_alone())
            )
            if later_is_gone:
                self._give_up_later()
                return Following(over=True)
            if is_alone:
                self._go_on_alone()
                return Following(over=True)
            behind, few = run.is_behind_few()
            following = self.follower.advance(behind=behind, few=few, over=over)
            # The others keep no place for a contribution of a peer that says so.
            run.follow(self.should_observe and self.follower.is_on_the_log)
            self._sharing.publish(wants=self.follower.is_active, epoch=self._common.lineage.epoch)
            if following.caught_up:
                self._caught_up += 1
                self._fetches_later = False
                return following
            if following.failed or following.over:
                run.follow(False)
                if gives_up and self._stopped.is_due(time.monotonic()):
                    logger.warning("this peer is behind, and cannot catch up now: %s", gives_up)
                return replace(following, reason="; ".join(filter(None, (following.reason, gives_up))))
            if not following.progressed:
                self._together.waits(following.reason or "waiting for the run's state", ())
                self.follower.wait(version)

    def _gives_up(self, began: float) -> str:
        """Return the reason why this call waits no longer for the peers that have the run's state; empty if it waits.

        Donors answer in their next step. Those whose loops have ended, or pause for long, have none: the training loop
        gets the reason, and asks again in its own next step.
        """
        if (end := self._together.run.run_end()) is not None:
            return end.reason
        if self.follower.is_fetching or self._fetches_later:  # a run that begins again has a limit of its own
            return ""
        deciding = self._sharing.deciding(self._sharing.news(), self._together.run.companions)
        if not deciding:
            waited = time.monotonic() >= began + WARN_WAIT_SECONDS
            return "no peer of the run offers a state" if waited else ""
        if not self._together.run.are_asleep(deciding):
            return ""
        several = len(deciding) > 1
        return (
            f"{named(sorted(deciding))} {'have' if several else 'has'} the run's state, and"
            f" {'have' if several else 'has'} computed nothing for long: the training there pauses, or has ended while"
            " its averager is open"
        )

    def _is_alone(self) -> bool:
        """Return whether this peer has needed a state for a while, in this call or earlier ones, and none offers one.

        Without an end to that, a peer whose update was interrupted would wait for ever if it is alone in its run. Peers
        that join would wait too, since a peer that needs a state offers none.
        """
        news, now = self._sharing.news(), time.monotonic()
        needs = self.follower.is_useless and not self._fetches_later and not self.follower.is_fetching
        if not needs or self._sharing.deciding(news, self._together.run.companions):
            self._alone_since = None
            return False
        if self._alone_since is None:
            self._alone_since = now
        return now >= self._alone_since + WARN_WAIT_SECONDS

    def _go_on_alone(self) -> None:
        logger.warning("no other peer has the run's state: this peer goes on with its own")
        self.follower.pause()
        self._together.run.follow(False)
        self._alone_since = None

    def _give_up_later(self) -> None:
        logger.warning("the peer with a later checkpoint offers no state: this peer continues from its own")
        self.follower.stop()
        self._together.run.follow(False)
        # With a time long past, `has_later` finds the limit exceeded, and the peer does not begin to wait again.
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
