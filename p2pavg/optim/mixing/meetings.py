"""Rounds of one optimizer that mixes: looks for another small group each time, and waits for no other peer for long."""

from __future__ import annotations

import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, ClassVar

import torch

from p2pavg.base.limits import LOOK_SECONDS, STOP_SECONDS
from p2pavg.base.result import EXCHANGES, InProgress, NoPeers, RoundResult, Success
from p2pavg.blocking import Averager
from p2pavg.group.places.gossip import SearchPlace, SearchStage, next_round, rounds_of_others, stages_of
from p2pavg.optim.base.state import Lineage
from p2pavg.optim.coordination.progress import Average, Compute, Decision, LeftBehind
from p2pavg.optim.coordination.together import RoundCoordinator
from p2pavg.optim.coordination.view import RunView
from p2pavg.optim.mixing.mixing import ROUND, MixingOptions, is_too_far, lag_behind


class MixingView(RunView):
    """The view of a peer whose run has no common parameters: every peer of the run counts, whatever its round is."""

    hands_over: ClassVar[bool] = False

    @property
    def is_called(self) -> bool:
        """False: no peer waits for the batch of a certain other one."""
        return False

    @property
    def others_rounds(self) -> dict[str, int]:
        """The round numbers that the other peers of the run say."""
        return {peer: word.epoch for peer, word in self.words.items() if word.state == self.lineage.state}

    def took(self, companions: AbstractSet[str], after: Lineage) -> None:
        """Note an outer step; peers that were not in the group have missed nothing."""
        self.pace.rested(time.monotonic())
        self.remember(companions)
        self.lineage = after

    def no_group_formed(self) -> None:
        """Do nothing: a peer that was not there may be in another group."""


class Meetings(RoundCoordinator):
    """Coordinates one optimizer with a few peers at a time; not thread-safe.

    The state that is the name of a run's peers to matchmaking is that of the run's beginning, so peers meet whatever
    updates they have taken. :attr:`~p2pavg.optim.base.state.Lineage.epoch` counts this peer's rounds.

    Args:
        mixing: how to mix.
        options: as for :class:`RoundCoordinator`.
    """

    _view: ClassVar[type[RunView]] = MixingView
    run: MixingView

    def __init__(
        self, averager: Averager, parameters: Sequence[torch.Tensor], *, mixing: MixingOptions, **options: Any
    ) -> None:
        super().__init__(averager, parameters, **options)
        self._mixing = mixing
        self._last_group: frozenset[str] = frozenset()
        self._has_waited = False
        self._why = ""
        """The reason for which this peer found no group where it looked before, in the same round."""
        self.is_looking = False
        """True while the present round has no group."""

    # ------------------------------------------------------------------ decisions

    def decide_when_all_are_ready(self) -> Decision:
        """Return that a round is due, unless this peer is too far behind: it waits for no others before a round."""
        self._wait_to_start()
        behind = self.left_behind()
        if behind is not None:
            return Compute(behind.reason)
        return Average(self._mixing.group_size, "each peer averages when it is due")

    def _wait_to_start(self) -> None:
        """Wait once for ``peers_to_start`` peers, for ``sync_timeout`` at most."""
        until = time.monotonic() + (0.0 if self._has_waited else self.patience)
        self._has_waited = True
        try:
            while self.run.lineage.epoch == 0 and time.monotonic() < until:
                version, peers = self.run.version, self.run.survey().peers
                if peers >= self.run.peers_to_start:
                    return
                self.poll_peers()
                self.run.stand_by()
                self.waits(f"{peers} of {self.run.peers_to_start} peers are there to start", ())
                self.run.wait(version, min(LOOK_SECONDS, max(until - time.monotonic(), 0.0)))
        finally:
            self.waits_no_more()

    def left_behind(self) -> LeftBehind | None:
        """Return the evidence that this peer is too many rounds behind the run; ``None`` if it is not."""
        said, own = self.run.others_rounds, self.run.lineage.epoch
        known = [number for peer, number in said.items() if peer in self.run.companions]
        lag = lag_behind(own, known or said.values(), self._mixing.max_lag)
        if not lag:
            return None
        return LeftBehind(
            own + lag,
            f"half of the other peers are at outer step {own + lag} or later, this one at {own}, and max_lag is"
            f" {self._mixing.max_lag}: its parameters would pull theirs back",
        )

    def goes_alone(self, peers: int) -> bool:  # noqa: ARG002 - no number makes it one
        """Return false: a peer without a partner goes on with its inner steps."""
        return False

    def too_far(self, success: Success, own: float) -> str:
        """Return the reason why a group's average is of no use; empty if it is of use.

        Args:
            own: this peer's round number, as it contributed it.
        """
        others = self._others(success, own)
        if not is_too_far(own, others, self._mixing.max_lag):
            return ""
        return (
            f"the other members of the group are at outer step {others:.0f}, this peer at {own:.0f}, and max_lag is"
            f" {self._mixing.max_lag}"
        )

    def _others(self, success: Success, own: float) -> float:
        median = success.metrics.get(ROUND, own)
        return rounds_of_others(own, median, success.weights, self.averager.peer_id)

    # ------------------------------------------------------------------ rounds

    def average(self, peers: int | None = None) -> RoundResult:  # noqa: ARG002 - a group has its own size
        """Average with a group, or in the round that runs already.

        Returns InProgress if no partner is there within ``partner_timeout``: the search goes on in the background.
        """
        began = time.monotonic()
        try:
            self.run.stand_by()
            while True:
                result = self.poll(LOOK_SECONDS / 4)
                if not isinstance(result, InProgress):
                    return result
                limit = self._mixing.partner_timeout if self.is_looking else self.patience
                if time.monotonic() >= began + limit:
                    return result
                self.waits(result.reason, ())
                self.poll_peers()
        finally:
            self.waits_no_more()

    def begin_round(self, peers: int) -> RoundResult:  # noqa: ARG002 - a group has its own size
        """Begin to look for a group in the background; anything accumulated from now on belongs to the next round."""
        return self.poll()

    def look_on(self) -> RoundResult:
        """Return the background round's result, or InProgress."""
        return self.poll()

    def stop_looking(self, reason: str) -> RoundResult | None:
        """End the search for a group; return its result, or ``None`` if the round has a group by now."""
        if not self.averager.cancel_matchmaking(reason):
            return None
        self._stopped = True
        self.is_looking = False
        # Usually a search is over at once when this peer ends it.
        return self._go_on(STOP_SECONDS)

    def poll(self, wait: float = 0.0) -> RoundResult:
        """Look for a group, in one place after the other, or at the round that has one."""
        if self.averager.round_state is None:
            self._why = ""
            self._stages = stages_of(
                self.averager.peer_id,
                self.run.lineage.epoch,
                self.run.survey().peers,
                self._last_group,
                group_size=self._mixing.group_size,
                seconds=self._mixing.partner_timeout,
                patience=self._mixing.partner_timeout,
            )
        result = self._go_on(wait)
        if isinstance(result, NoPeers) and self.averager.weight > 0:
            # It found no group in any place: it looks again in the last one, among all peers.
            self._why = result.reason
            self._stages = (SearchStage(SearchPlace(patience=self._mixing.partner_timeout)),)
            return self._go_on(0.0)
        return result

    def _go_on(self, wait: float) -> RoundResult:
        """Begin the round, or look at the one that runs."""
        result = self._step(wait, self._mixing.group_size)
        self.is_looking = isinstance(result, InProgress) and result.reason != EXCHANGES
        if self.is_looking and isinstance(result, InProgress) and self._why:
            return replace(result, reason=f"{result.reason}; {self._why}")
        return result

    def took(self, success: Success, result: bytes = b"", numbers: bytes = b"") -> None:  # noqa: ARG002
        """Note an outer step with a group."""
        before = self.run.lineage
        others = self._others(success, before.epoch)
        number = next_round(before.epoch, others, self._mixing.max_lag)
        self._last_group = frozenset(success.peers) - {self.averager.peer_id}
        self.run.took(self._last_group, Lineage(number, before.state))
        self.waiting.updated()
