"""News of an exchange's attempts: tells the agreement what happens on their lanes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from p2pavg.allreduce.attempt import Attempt
from p2pavg.consensus.member import RoundPhase
from p2pavg.group.milestones import OnMilestone
from p2pavg.round.voting import Voting


class AttemptNews:
    """Listener of the attempts of one exchange: see :class:`~p2pavg.allreduce.attempt.Reports`.

    Args:
        positions: of the members in the group's roster, by peer id.
        is_current: returns whether an attempt is the one that runs.
        completed: is told an attempt whose whole result is here, and one digest a share.
        reached: is told a milestone that this member has reached.
    """

    def __init__(
        self,
        voting: Voting,
        positions: Mapping[str, int],
        *,
        is_current: Callable[[Attempt], bool],
        completed: Callable[[Attempt, tuple[bytes, ...]], None],
        reached: OnMilestone,
    ) -> None:
        self.completed = completed
        self.reached = reached
        self._voting = voting
        self._positions = positions
        self._is_current = is_current

    def lose(self, peer_id: str, reason: str, *, hostile: bool) -> None:
        """Lose a reducer whose averages this member could not verify."""
        self._voting.lost(self._positions[peer_id], reason, hostile=hostile, silent=not hostile)

    def troubled(self, attempt: Attempt, peer_id: str, reason: str, *, hostile: bool) -> None:
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

    def lane_broke(self, attempt: Attempt, peer_id: str) -> None:
        """Ask the other end of a broken lane: no other message tells of a member that died before its votes' stream
        was open."""
        position = self._positions[peer_id]
        if self._is_current(attempt) and position not in self._voting.member.lost:
            self._voting.missing(position)

    def arrived(self, peer_id: str, count: int) -> None:
        """Note bytes of a member."""
        self._voting.control.arrived(peer_id, count)

    def owes(self, attempt: Attempt, peer_id: str, yes: bool) -> None:
        """Note whether a member's contribution is waited for."""
        if self._is_current(attempt):
            self._voting.control.owes(peer_id, yes)
