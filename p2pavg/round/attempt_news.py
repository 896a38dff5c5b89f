"""News of an exchange's attempts: tells the agreement what happens on their lanes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from p2pavg.allreduce.attempt import Attempt
from p2pavg.allreduce.events import (
    AttemptEvent,
    BytesArrived,
    ContributionOwed,
    DirectLaneBroke,
    LaneFailed,
    ResultComplete,
)
from p2pavg.consensus.member import RoundPhase
from p2pavg.round.voting import Voting


class AttemptNews:
    """Tells the agreement of the events of one exchange's attempts.

    Args:
        positions: of the members in the group's roster, by peer id.
        is_current: returns whether an attempt is the one that runs.
        completed: is told an attempt whose whole result is here, and one digest a share.
    """

    def __init__(
        self,
        voting: Voting,
        positions: Mapping[str, int],
        *,
        is_current: Callable[[Attempt], bool],
        completed: Callable[[Attempt, tuple[bytes, ...]], None],
    ) -> None:
        self._completed = completed
        self._voting = voting
        self._positions = positions
        self._is_current = is_current

    def happened(self, attempt: Attempt, event: AttemptEvent) -> None:
        """Tell the agreement of an event."""
        match event:
            case ResultComplete(digests):
                self._completed(attempt, digests)
            case BytesArrived(peer_id, count):
                self._voting.control.arrived(peer_id, count)
            case ContributionOwed(peer_id, owed):
                if self._is_current(attempt):
                    self._voting.control.owes(peer_id, owed)
            case DirectLaneBroke(peer_id):
                # No other message tells of a member that died before its votes' stream was open: it is asked.
                position = self._positions[peer_id]
                if self._is_current(attempt) and position not in self._voting.member.lost:
                    self._voting.missing(position)
            case LaneFailed(peer_id, reason, hostile):
                self._lane_failed(attempt, peer_id, reason, hostile)

    def lose(self, peer_id: str, reason: str, *, hostile: bool) -> None:
        """Lose a reducer whose averages this member could not verify."""
        self._voting.lost(self._positions[peer_id], reason, hostile=hostile, silent=not hostile)

    def _lane_failed(self, attempt: Attempt, peer_id: str, reason: str, hostile: bool) -> None:
        """Note that a lane broke. It is no loss if its other end has gone on to a newer attempt."""
        member = self._voting.member
        current = self._is_current(attempt) and member.promised == member.begun.ballot
        # It is no loss either if this member itself waits for a newer attempt.
        current = current and not member.trouble
        position = self._positions[peer_id]
        if hostile and attempt.number and position not in member.lost:
            # Noted first, and not as hostile: the members of a later attempt are one leader's word, and a ban of ten
            # minutes must not follow from what a leader told the two.
            self._voting.losses.note(position, reason)
        if hostile or (current and member.phase is RoundPhase.EXCHANGING):
            # The leader of a later attempt may have told the two members different things.
            self._voting.lost(position, reason, hostile=hostile, reachable=hostile and attempt.number > 0)
