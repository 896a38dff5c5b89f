"""The members that a round lost, and why: what this member saw itself, and what other members say.

Only what this member saw itself counts against another member later. What others say (hearsay) explains a loss to the
user, and changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from p2pavg.allreduce.reduction import RoundFault
from p2pavg.base.result import FailedCode
from p2pavg.consensus.votes import Trouble
from p2pavg.group.roster import Roster

logger = logging.getLogger(__name__)

SILENT_MEMBER_SECONDS = 5.0  # about what a silent member costs the others


class Losses:
    """The losses of one member of a group. Members are named by their position in the roster."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._own: dict[int, RoundFault] = {}
        self._hearsay: dict[int, Trouble] = {}

    def __contains__(self, position: int) -> bool:
        return position in self._own

    def __bool__(self) -> bool:
        return bool(self._own)

    def note(self, position: int, reason: str, *, hostile: bool = False, silent: bool = False) -> None:
        """Note that this member lost another one. The first reason counts.

        Args:
            hostile: the other member broke the protocol.
            silent: the other member cost the round some seconds, and is not met for a while if it does so again.
        """
        peer_id = self._peer_id(position)
        logger.info("group %s lost %s: %s", self._roster.group_id.hex()[:8], peer_id, reason)
        seconds = SILENT_MEMBER_SECONDS if silent else 0.0
        verdict = RoundFault(f"{peer_id} was lost: {reason}", peer_id, hostile=hostile, seconds=seconds)
        self._own.setdefault(position, verdict)

    def convict(self, position: int, reason: str) -> None:
        """Note that a member's own signatures prove that it lied, whatever was noted of it before."""
        self._own.pop(position, None)
        self.note(position, reason, hostile=True)

    def forget(self, position: int) -> None:
        """Forget why a member was left out: it was right."""
        self._own.pop(position, None)

    def note_overdue(self, verdict: RoundFault) -> None:
        """Note the member that kept the round from ending in time, if the verdict names one."""
        if verdict.peer_id is not None:
            self._own.setdefault(self._roster.position(verdict.peer_id), verdict)

    def note_idle_leader(self, leader: int, timeout: float) -> None:
        """Note a leader that neither committed nor went on without others, until the round was over."""
        peer_id = self._peer_id(leader)
        reason = f"{peer_id} led the round and did not end it within {timeout:g} s"
        # Once may be the fault of another member that held the leader up. A second time is a strike.
        self._own[leader] = RoundFault(reason, peer_id, seconds=SILENT_MEMBER_SECONDS)

    def receive(self, trouble: Trouble) -> None:
        """Note what another member says of a loss. The first word on each member counts."""
        self._hearsay.setdefault(trouble.peer, trouble)

    def all(self, view: frozenset[int]) -> tuple[RoundFault, ...]:
        """Return a verdict for each lost member: those lost here, and those that the members of ``view`` left out."""
        absent = set(range(len(self._roster.members))) - view - self._own.keys()
        left_out = [self._peer_id(position) for position in sorted(absent)]
        by_others = [RoundFault(f"{peer_id} was given up by others", peer_id) for peer_id in left_out]
        return tuple(map(self._with_hearsay, (*self._own.values(), *by_others)))

    def explanations(self, own_view: frozenset[int], view: frozenset[int]) -> Iterable[Trouble]:
        """Return why members outside of ``view`` were left out, for a member that may not have seen the losses."""
        for verdict in self.all(own_view):
            assert verdict.peer_id is not None
            position = self._roster.position(verdict.peer_id)
            if position not in view:
                reason = verdict.reason.removeprefix(f"{verdict.peer_id} was lost: ")
                yield Trouble(position, verdict.hostile, reason)

    def failure(self, reason: str, code: FailedCode) -> RoundFault:
        """Return why the round failed, with the member that was lost first."""
        first = next(iter(self._own.values()), None)
        if first is not None and first.reason not in reason:
            reason += f" ({'; '.join(self.reasons())})"
        return RoundFault(reason, first.peer_id if first is not None else None, code=code)

    def reasons(self) -> list[str]:
        """Return the reasons of this member's own losses, the first loss first."""
        return [verdict.reason for verdict in self._own.values()]

    def _peer_id(self, position: int) -> str:
        return self._roster.members[position].peer_id

    def _with_hearsay(self, verdict: RoundFault) -> RoundFault:
        """Add what others say of a member that was lost here after they had given it up."""
        assert verdict.peer_id is not None
        told = self._hearsay.get(self._roster.position(verdict.peer_id))
        if verdict.hostile or told is None or told.reason in verdict.reason:
            return verdict
        return replace(verdict, reason=f"{verdict.reason} ({told.reason})")
