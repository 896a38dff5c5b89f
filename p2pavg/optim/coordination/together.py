"""Rounds of one optimizer: waits for the other peers, averages with them, and reports the waiting."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch

from p2pavg.base.limits import GLANCE_SECONDS, LOOK_SECONDS, MAX_GROUP_SIZE
from p2pavg.base.result import EXCHANGES, Failed, FailedCode, InProgress, NoPeers, RoundResult, Success
from p2pavg.blocking import Averager
from p2pavg.group.places.gossip import SearchStage
from p2pavg.optim.base.state import Lineage, checked_amount, checked_count, first_lineage
from p2pavg.optim.coordination.attendance import MIN_ABSENCE_SECONDS
from p2pavg.optim.coordination.ending import GrowingPauses, Waiting
from p2pavg.optim.coordination.progress import Average, Compute, Decision, LeftBehind, Survey, WaitForPeers
from p2pavg.optim.coordination.turns import Turn
from p2pavg.optim.coordination.view import RunView
from p2pavg.optim.coordination.watch import DriftMonitor, tell_waiting

logger = logging.getLogger(__name__)


class SharedStates(Protocol):
    """The states of an optimizer, as its coordination sees them: :class:`~p2pavg.optim.catching_up.states.States`."""

    def poll(self) -> None:
        """Offer what other peers ask for."""

    def has_later(self) -> str:
        """Return the reason why this peer must fetch another state before it goes on; empty if it need not."""

    def pauses(self, seen: Survey) -> str:
        """Return the reason why this peer takes no update alone now; empty if it takes one."""


class RoundCoordinator:
    """Coordinates one optimizer with the other peers of its run; not thread-safe.

    Args:
        averager: the run's averager; nothing else may call its ``step``.
        parameters: this peer's parameters at the beginning.
        target: number of samples, of all peers together, that make a round due; infinite if every peer counts its own
            steps.
        peers_to_start: number of peers that this peer's first round needs; ``config.min_group_size`` if ``None``.
        sync_timeout: seconds that this peer waits for the others before it begins a round without them, and for a round
            before it continues alone.
        min_peers: number of peers that an update needs; 1 if this peer may take updates alone, and
            ``config.min_group_size`` if ``None``.
        recipe: digest of this peer's recipe.
        watch: compares this peer's training with that of the others.
        delay: batches for which the rounds of a peer that counts its own steps run in the background.
        grace: seconds that peers that are due wait for those that still compute; infinite for as long as these are
            expected. ``None``: for the time of ``delay``, and :data:`MIN_ABSENCE_SECONDS` at least.

    Raises:
        ValueError: ``peers_to_start`` or ``sync_timeout`` is out of range.
    """

    _view: ClassVar[type[RunView]] = RunView

    def __init__(
        self,
        averager: Averager,
        parameters: Sequence[torch.Tensor],
        *,
        target: float,
        peers_to_start: int | None,
        sync_timeout: float,
        min_peers: int | None = None,
        recipe: bytes = b"",
        watch: DriftMonitor,
        delay: int = 0,
        grace: float | None = math.inf,
    ) -> None:
        self.averager = averager
        smallest = averager.config.min_group_size
        self._least = smallest if min_peers is None else min_peers
        to_start = smallest if peers_to_start is None else checked_count("peers_to_start", peers_to_start)
        self.patience = checked_amount("sync_timeout", sync_timeout)
        """Seconds that one call waits at most for other peers."""
        self._delay, self._grace = delay, grace
        self._looks_since = math.inf
        """The time at which this peer began to look for the group of its background round."""
        self._stages: tuple[SearchStage, ...] | None = None
        """Where the next round's group is looked for, if not among all peers that are ready."""
        self._not_ours = averager.round_state is not None  # an earlier optimizer began this round
        self.run = self._view(
            averager,
            first_lineage(parameters, recipe),
            target=target,
            peers_to_start=to_start,
            least=self._least,
            overlaps=delay > 0,
            sync_timeout=self.patience,
        )
        self.watch = watch
        """Compares this peer's training with that of the others."""
        self.states: SharedStates | None = None
        """See :meth:`share`."""
        self.turn = Turn(averager.config.run_id)
        """The turn of this optimizer among those that the same loop steps."""
        self._has_failed = False
        """True if this peer's last step was in a round that failed."""
        self.waiting = Waiting()
        self._waited_for_start: int | None = None
        """Number of peers that were there when a call had waited in vain for the peers to start with."""
        self._behind, self._split = GrowingPauses(), GrowingPauses()
        self._regroups = False
        self._stopped = False
        self._observes = False
        self._peers = 1
        """Number of peers with which the last round of the optimizer's own averager began."""
        self._observers = 0  # among the peers that the last decision or round counted
        self._expected: tuple[str, ...] = ()  # these peers

    def share(self, states: SharedStates) -> None:
        """Note that the optimizer shares states: this peer offers them while it waits, and can fetch one."""
        # A peer with states mends by itself that it is behind. One without them is told to load a newer state.
        self.states, self.run.comes_back = states, True

    def poll_peers(self) -> None:
        """Compare with the other peers, and offer them states: at least once a second while this peer waits."""
        self.compare(forked=self.run.survey().others > 0)
        if self.states is not None:
            self.states.poll()

    def compare(self, *, forked: bool) -> None:
        """Compare with the other peers; see :meth:`DriftMonitor.poll`."""
        self.watch.poll(self.run.companions, forked=forked)
        self.run.differs = self.watch.differs

    def computed(self, batch: float) -> None:
        """Note that a batch of this many samples was computed."""
        self._has_failed = False
        self.waiting.begin()
        self.run.pace.computed(batch, time.monotonic())

    def decide_when_all_are_ready(self) -> Decision:
        """Decide as :meth:`RunView.decide`, but first wait while that is the decision, ``sync_timeout`` at most."""
        began = time.monotonic()
        until = began + self.patience
        try:
            while True:
                # The version is read before the words are,
                # so that a word that comes in between ends the wait below at once.
                version = self.run.version
                self._hurry(began)
                self.poll_peers()
                seen = self.run.survey()
                self._observers, self._expected = self._observers_in(seen), seen.expected
                decision, left = self.run.decide(seen), until - time.monotonic()
                # Whatever the decision is, it is about a state that this peer will replace.
                if self.states is not None and (later := self.states.has_later()):
                    return Compute(later)
                if (end := self.run.run_end()) is not None:
                    return Compute(end.reason)
                # Only a step that would wait can keep its loop from another run. One that computes returns anyway.
                if isinstance(decision, Average | WaitForPeers) and (first := self.turn.gives_way()):
                    return Compute(first)
                if isinstance(decision, Average) and self.goes_alone(decision.peers):
                    # No group signs the average, so no peer that joins could replay the update.
                    why = "" if self.states is None else self.states.pauses(seen)
                    return Compute(why) if why else decision
                if not isinstance(decision, WaitForPeers):
                    return decision
                if seen.peers < self.run.peers_to_start and self._has_waited_to_start(seen.peers, left):
                    return decision
                if left <= 0:
                    return Average(seen.peers, f"waited {self.patience:g} s: {decision.reason}")
                # The others may wait for exactly this word, so it is said before the wait.
                self.run.stand_by()
                self.waits(decision.reason, seen.computing)
                self.run.wait(version, min(left, self._grace_seconds, self._look_seconds))
        finally:
            self.waits_no_more()

    def wants_step(self, at: float) -> bool:
        """Return whether the next update waits for a step of this optimizer, while the loop is in a step of another.

        It does not if its last round failed, or it has waited in vain for more peers to start: such a run must not keep
        the loop from its other runs. Nor does it if the loop no longer steps it, or its averager is closing. After a
        round to which no other peer came, it does as soon as one says something new: two loops that have waited for
        each other, each in another run's round, would swap their places for ever otherwise.

        Args:
            at: when the step of the other optimizer began; minus infinity if the loop surely steps this one.
        """
        if self._has_failed or self.run.mine.left or not self.run.was_stepped(at):
            return False
        if self.averager.round_state is not None:
            return False
        seen = self.run.survey()
        if seen.peers < self.run.peers_to_start and seen.peers <= (self._waited_for_start or 0):
            return False
        others_wait = len(seen.computing) < len(seen.expected)
        return others_wait or isinstance(self.run.decide(seen), Average | WaitForPeers)

    @property
    def _look_seconds(self) -> float:
        # Between two looks of a peer that has caught up, and looks for the group of the next round: if the others end
        # one without it, it has to replay that update before they have formed their next group, which takes about a
        # second. Also for a peer whose loop steps the optimizer of another run, which may become due meanwhile.
        return GLANCE_SECONDS if self._observes or self.turn.is_shared else LOOK_SECONDS

    @property
    def _grace_seconds(self) -> float:
        if self._grace is not None:
            return self._grace
        # A busy peer has long batches, and so has patience with others. With short ones, a word on its way or a pause
        # of the machine is longer than all of them.
        return max(self._delay * self.run.pace.batch_seconds, MIN_ABSENCE_SECONDS)

    def _hurry(self, began: float) -> None:
        """Leave out the peers that still compute if the grace period, which began at this time, is over."""
        if time.monotonic() >= began + self._grace_seconds and self.run.has_started:
            self.run.hurries = True

    def _has_waited_to_start(self, peers: int, left: float) -> bool:
        """Return whether this peer has waited long enough for the peers to start with, in this call or an earlier one.

        It waits once for ``sync_timeout``, and again whenever another peer has come.
        """
        before = self._waited_for_start
        if left <= 0:
            self._waited_for_start = peers
        return left <= 0 or (before is not None and peers <= before)

    def waits(self, reason: str, peers: Sequence[str]) -> None:
        """Note the reason for waiting; warn the user when it lasts."""
        now = time.monotonic()
        warning = self.waiting.waits(reason, peers, now)
        if self.waiting.is_to_be_told(now):
            tell_waiting(self.averager, self.waiting)
        if warning is not None:
            logger.warning("this peer %s", warning)

    def waits_no_more(self) -> None:
        """Note that this call has stopped waiting."""
        now = time.monotonic()
        self.run.pace.rested(now)
        self.waiting.ends(now)

    # ------------------------------------------------------------------ rounds

    def begin_round(self, peers: int) -> RoundResult:
        """Begin a round in the background; anything accumulated from now on belongs to the next one.

        Returns InProgress, unless the round has ended at once.
        """
        logger.debug("epoch %d: averaging with %d peers", self.run.lineage.epoch, peers)
        self._looks_since, self._peers = time.monotonic(), peers
        return self._step(0.0, peers)

    def goes_alone(self, peers: int) -> bool:
        """Return whether a round of so many peers is an update that this peer takes alone."""
        return peers == 1 and self._least == 1

    def alone(self) -> RoundResult:
        """Return this peer's own contribution as the average, since no other peer is there."""
        found = self.averager.apply_locally(self.run.lineage.state)
        return NoPeers(reason="nothing is accumulated") if found is None else found

    def poll(self) -> RoundResult:
        """Return the running round's result, or InProgress."""
        return self._step(0.0, self._peers)

    def look_on(self) -> RoundResult:
        """Return the background round's result, or InProgress; end it if the run has gone on without this peer."""
        result = self.poll()
        looks = isinstance(result, InProgress) and result.reason != EXCHANGES
        if looks and not self._stop_if_left_behind():
            self._stop_if_some_compute()
        return result

    def _stop_if_some_compute(self) -> None:
        """Cancel matchmaking if the grace period is over, and enough peers are due for a group without the others."""
        before = self.run.hurries
        self._hurry(self._looks_since)
        # Only when the grace period ends: a search that begins later is without these peers from the start.
        if self.run.hurries and not before:
            seen = self.run.survey()
            decision = self.run.decide(seen)
            if isinstance(decision, Average) and decision.peers < seen.peers:
                self._stopped = self.averager.cancel_matchmaking(decision.reason)

    def _stop_if_left_behind(self) -> bool:
        """Cancel matchmaking if no other peer will join this one's group; return whether none will."""
        behind = self.left_behind()
        later = "" if self.states is None else self.states.has_later()
        later = later or ("" if behind is None else behind.reason)
        if not later and (end := self.run.run_end()) is not None:
            later = end.reason
        if later:
            self._stopped = self.averager.cancel_matchmaking(later)
        return bool(later)

    def observe(self) -> RoundResult:
        """Be in the next round without a contribution: the update comes with its result.

        A peer that has caught up with a fast run does this once. The others wait for a peer that was in their last
        round, so its first batch counts then.
        """
        self._observes = True
        try:
            self.run.follow(True)  # the others must not count on a contribution
            seen = self.run.survey()
            self._observers, self._expected = self._observers_in(seen), seen.expected
            return self.average(seen.peers)
        finally:
            self._observes = False

    def average(self, peers: int | None = None) -> RoundResult:
        """Average in a round with this many peers, or in the round that runs already.

        Returns InProgress if the round takes longer than ``sync_timeout``.

        Args:
            peers: ``None`` for the round that runs already: the peers with which it began.
        """
        self._peers = self._peers if peers is None else peers
        try:
            while True:
                result = self._round()
                if not self._regroups:
                    return result
                # The group that was looked for has changed,
                # so this peer decides anew with the peers that are there now.
                self._regroups = False
                decision = self.decide_when_all_are_ready()
                if not isinstance(decision, Average):
                    return result
                self._peers = decision.peers
                if self.goes_alone(self._peers):
                    return self.alone()
        finally:
            self.waits_no_more()

    def _round(self) -> RoundResult:
        until = time.monotonic() + self.patience
        self.run.stand_by()
        while True:
            wait = min(max(until - time.monotonic(), 0.0), self._look_seconds)
            result = self._step(wait, self._peers)
            if not isinstance(result, InProgress) or time.monotonic() >= until:
                return result
            self.poll_peers()
            # An observer that hears late of a round without it cannot replay that update before the next group forms.
            if self._observes and result.reason != EXCHANGES:
                self.run.poll()
            # The others are ahead also if they have heard the end of this peer's own exchange before it has. It will
            # hear it too: a call that returned now would be a step without its update.
            is_behind = self._stop_if_left_behind()
            if result.reason == EXCHANGES:
                # A round that has a group is not cancelled. It may yet be the update of the others.
                self.waits("; ".join(filter(None, (EXCHANGES, result.waits_for))), ())
            elif is_behind:
                # The search was cancelled, or has found its group meanwhile. The next step tells.
                continue
            elif not self._observes and (first := self.turn.gives_way()):
                self._stopped = self.averager.cancel_matchmaking(first)
            else:
                self._look_again(result.reason)

    def _look_again(self, reason: str) -> None:
        """Cancel matchmaking if the group to be formed has changed since this peer began it."""
        seen, peers = self.run.survey(), self._peers
        self.waits(f"the round is to be among {peers} peers: {reason}", seen.computing)
        # A peer that arrives late, but before the first round, must not be left out of the group.
        came = seen.peers > peers and not self.run.has_started
        # The search goes on for a group of the size that it was given.
        # For a peer that has gone, it would last until its deadline.
        size, before = self._group_size(seen.peers), self._group_size(peers)
        ended = seen.peers < max(self._least, 2) <= peers  # those that are left are no group
        went = ended or size < before or size - self._observers_in(seen) < before - self._observers
        if came or went:
            self._regroups = self._stopped = self.averager.cancel_matchmaking(
                "more peers have come to start" if came else "a peer is no longer waited for"
            )

    def _step(self, wait: float, peers: int) -> RoundResult:
        size = self._group_size(peers)
        self.averager.expect(self._expected)
        result = self.averager.step(
            wait=wait,
            state=self.run.lineage.state,
            group_size=size,
            contributors=max(size - self._observers, 0),
            observe=self._observes,
            **({} if self._stages is None else {"meeting": self._stages}),
        )
        # After a search that this peer has cancelled itself, no other peer is to blame for not coming.
        if isinstance(result, NoPeers) and not self._stopped and not self._observes:
            self.run.no_group_formed()
        if not isinstance(result, InProgress):
            self._has_failed = isinstance(result, Failed)
            self._stopped = False
        # The round may have begun with parameters that were replaced since.
        # Its average belongs to those, even if the update's number is the same.
        if not self._not_ours or isinstance(result, InProgress):
            return result
        self._not_ours = False
        if isinstance(result, Success):
            return Failed(
                reason="the round averaged parameters that were replaced meanwhile",
                code=FailedCode.PARAMETERS_REPLACED,
                contribution_used=True,
            )
        return result

    def _observers_in(self, seen: Survey) -> int:
        return seen.observers + self._observes

    def _group_size(self, peers: int) -> int:
        return min(max(peers, self.averager.config.min_group_size), MAX_GROUP_SIZE)

    def left_behind(self) -> LeftBehind | None:
        """Return the evidence that the others went on without this peer while it waited; ``None`` if they did not."""
        seen = self.run.survey()
        decision = self.run.decide(seen)
        if not isinstance(decision, LeftBehind):
            self._warn_of_a_split(seen)
            return None
        if not self._behind.is_due(time.monotonic()):
            return decision
        if self.run.comes_back:
            logger.info("this peer is behind, and fetches the run's state: %s", decision.reason)
        else:
            logger.warning(
                "this peer is left behind, and takes no part until it loads a newer state: %s",
                decision.reason,
            )
        return decision

    def _warn_of_a_split(self, seen: Survey) -> None:
        """Warn if another part of the run may have split off: both parts may have enough peers to continue."""
        if seen.unmet_ahead is None or not self.run.has_started:
            return
        if self._split.is_due(time.monotonic()):
            epoch, peers = seen.unmet_ahead
            logger.warning(
                "%d peers that took none of the last updates with this one report epoch %d and other parameters; this"
                " peer continues with the peers that did. If the others are yours, the run has split: let one part"
                " load the other's state",
                peers,
                epoch,
            )

    def took(self, success: Success, result: bytes = b"", numbers: bytes = b"") -> None:
        """Note an update by an average; ``result`` and ``numbers`` are as for :meth:`Lineage.after`."""
        # A member that was lost in the round may not have taken the update.
        companions = {*success.peers, *success.observers} - success.lost.keys() - {self.averager.peer_id}
        self.run.took(companions, self.run.lineage.after(success.group_id, result, numbers))
        # From now on the run goes on with the peers that are left.
        self.run.peers_to_start = 1
        self.waiting.updated()

    def is_at(self, lineage: Lineage) -> None:
        """Note that the parameters were replaced by those of another lineage, or by earlier ones of the same."""
        self.run.is_at(lineage)
        self._behind.reset()
        # A round that runs at this moment has the former parameters' contribution.
        self._not_ours = self.averager.round_state is not None
        self.run.publish(0.0, waiting=False)
