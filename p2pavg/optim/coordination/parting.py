"""One optimizer at the end of its training: it says its last word, and stays while others lack its last update.

It runs in the thread that closes the averager, or calls ``finish()``. The rules are in
:mod:`p2pavg.optim.coordination.ending`.
"""

from __future__ import annotations

import logging
import math
import threading
import time

from p2pavg.base.errors import ClosedError
from p2pavg.base.limits import LOOK_SECONDS
from p2pavg.blocking import Averager
from p2pavg.optim.catching_up.states import States
from p2pavg.optim.coordination.ending import Goes, GroupMember, Handover
from p2pavg.optim.coordination.together import RoundCoordinator

logger = logging.getLogger(__name__)


class Parting:
    """The end of one optimizer's training.

    Args:
        averager: its averager.
        together: its coordination with the other peers.
        snapshots: true if this thread may take snapshots for others: not on one of several ranks, which take theirs
            together.
    """

    def __init__(self, averager: Averager, together: RoundCoordinator, *, snapshots: bool) -> None:
        self._averager = averager
        self._together = together
        self._snapshots = snapshots
        self.states: States | None = None
        """The states of an optimizer that shares them, from then on."""
        config = averager.config
        # As long as a straggler may cost a round: the time to find its group, and beyond that the time to exchange.
        self._quiet, self._most = config.match_timeout, config.match_timeout + config.exchange_timeout
        self._handover: Handover | None = None
        self._began = 0.0
        self._told: frozenset[str] = frozenset()
        self.has_ended = False
        """True after :meth:`begin` and :meth:`leave`, until :meth:`resume`."""
        self.stepping = threading.Lock()
        """Held by a step: another thread that closes the averager meanwhile takes no snapshot."""
        self.stepper = 0
        """Identifier of the thread that holds it."""

    # ------------------------------------------------------------------ this peer's end

    def begin(self) -> bool:
        """Say this peer's last word; return whether there may be a reason to stay."""
        if self.has_ended or not self.stepping.acquire(blocking=False):
            return False
        try:
            run = self._together.run
            if not run.hands_over or not run.lineage.epoch:
                return False
            try:
                self._averager.cancel_matchmaking("this peer has taken its last update")
            except ClosedError:  # the program has closed it in its own block
                return False
            self.has_ended = True
            run.end()
            if self.states is not None:
                self.states.publish()
            run.say_last()
            self._began = time.monotonic()
            self._handover = Handover(self._began, quiet=self._quiet, most=self._most)
            return True
        finally:
            self.stepping.release()

    def leave(self) -> None:
        """Say this peer's last word, and stay for no other peer."""
        run = self._together.run
        if run.hands_over and run.lineage.epoch and not self.has_ended:
            run.say_last()
        self.has_ended = True

    def resume(self) -> None:
        """Take part again, after :meth:`begin` or :meth:`leave`."""
        if self.has_ended:
            self.has_ended = False
            self._together.run.resume()

    def stays(self) -> bool:
        """Offer what other peers ask for; return whether to stay longer."""
        assert self._handover is not None
        if not self.has_ended:  # another thread steps again
            return False
        run, states, now = self._together.run, self.states, time.monotonic()
        # A step of another thread may have begun since: a snapshot that is taken now would be half updated.
        if states is not None and self._snapshots and self.stepping.acquire(blocking=False):
            try:
                states.poll()
            finally:
                self.stepping.release()
        served_at = -math.inf if states is None else states.served_at
        said, words = run.last_words, run.words
        members = [
            GroupMember(
                peer_id=peer_id,
                word=words.get(peer_id),
                connected=self._averager.is_connected(peer_id),
                has_ended=peer_id in said,
            )
            for peer_id in run.last_members
        ]
        is_followed = states is not None and states.is_followed
        found = self._handover.decide(run.lineage.epoch, members, served_at, now, is_followed=is_followed)
        if isinstance(found, Goes):
            logger.log(logging.WARNING if self._told else logging.DEBUG, "this peer ends: %s", found.reason)
            return False
        waiting = frozenset(found.peers)
        # A word takes a second or two: most members are at the last update by then, and nothing is to be told.
        if now >= self._began + 2 * LOOK_SECONDS and not waiting <= self._told:
            self._told |= waiting
            logger.warning(
                "this peer has taken its last update, %d, and stays for peers that lack it, for %.0f s at most while"
                " nothing comes from them: %s. Ctrl-C ends this",
                run.lineage.epoch,
                found.seconds,
                found.reason,
            )
        return True

    def wait(self) -> None:
        """Block until other peers may have said something new, for a second at most."""
        run = self._together.run
        run.wait(run.version, LOOK_SECONDS)
