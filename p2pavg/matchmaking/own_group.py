"""The group that a peer leads: its followers, its proposal, and who has accepted. No I/O, no clock.

:class:`~p2pavg.matchmaking.rules.Matchmaking` decides when these steps are taken.
"""

from __future__ import annotations

from p2pavg.base.limits import GLANCE_SECONDS, MAX_GROUP_SIZE
from p2pavg.group.candidate import Candidate
from p2pavg.group.roster import Roster
from p2pavg.matchmaking.actions import Actions, Close, Expect, Formed, Send
from p2pavg.matchmaking.attempt_state import AttemptPhase, AttemptState
from p2pavg.matchmaking.messages import Disband, GroupCommit, GroupProposal, Joined, LeaderStatus
from p2pavg.matchmaking.timing import HEARTBEAT_SECONDS, PROPOSAL_ANSWER_SECONDS, SETTLE_SECONDS, patience


class OwnGroup:
    """This peer and its followers."""

    def __init__(self, state: AttemptState) -> None:
        self._state = state
        self.followers: dict[str, Candidate] = {}
        self.answers_due = 0.0  # end of the wait for answers to the proposal
        self._patience_end = 0.0  # of the wait for slow members, from the first proposal on
        self._accepted: set[str] = set()
        self._proposals = 0
        self._tell_at = state.begun + HEARTBEAT_SECONDS  # time of the next status for the followers
        # Time since which the group has had enough members to go ahead.
        self._enough_since: float | None = None

    @property
    def holders(self) -> int:
        """Number of contributors and observers, this peer included."""
        return 1 + sum(not follower.auxiliary for follower in self.followers.values())

    @property
    def is_full(self) -> bool:
        """True if the group has as many members that want the result as it aims at, and enough contributors.

        Contributors that nobody expected come on top, up to the largest group.
        """
        settings, extra = self._state.settings, self.extra
        return self.holders >= MAX_GROUP_SIZE or (
            self.holders - extra >= settings.target and self.contributors - extra >= settings.contributors
        )

    @property
    def extra(self) -> int:
        """Number of contributors that take no expected member's place: what the expected ones leave is open to all."""
        settings = self._state.settings
        if not settings.expected:
            return 0
        unexpected = sum(
            follower.weight > 0 and follower.peer_id not in settings.expected
            for follower in self.followers.values()
        )
        return max(unexpected - max(settings.target - 1 - len(settings.expected), 0), 0)

    @property
    def contributors(self) -> int:
        """Number of members that announce a contribution, this peer included."""
        return sum(member.weight > 0 for member in (self._state.me, *self.followers.values()))

    @property
    def has_contributor(self) -> bool:
        """True if at least one member has something to contribute."""
        members = (self._state.me, *self.followers.values())
        holders = {member.peer_id for member in members if not member.auxiliary}
        return bool(holders - self._state.observers_among(members))

    @property
    def has_enough(self) -> bool:
        """True if the group may be proposed once the deadline is over."""
        return self.holders >= self._state.settings.minimum and self.has_contributor

    # ------------------------------------------------------------------ members

    def admit(self, candidate: Candidate, now: float) -> Actions:
        """Take a candidate as a follower."""
        self.followers[candidate.peer_id] = candidate
        self._state.peers[candidate.peer_id].nudges.awaited_until = None
        # Not at once: a group that meets again would send a message for each pair of members, and is complete soon.
        self._tell_at = min(self._tell_at, now + GLANCE_SECONDS)
        joined = Joined(self._state.me)
        return [Send(candidate.peer_id, joined, "it comes after this peer, and there is room")]

    def disband(self, reason: str, why: str, *, leader: Candidate | None = None) -> Actions:
        """Send the followers away.

        Args:
            reason: told to the followers.
            why: the reason for these actions.
            leader: the leader that the followers should ask instead.
        """
        actions: Actions = []
        for peer_id in self.followers:
            actions += [Send(peer_id, Disband(reason, leader), why), Close(peer_id, why)]
        self.followers.clear()
        self._enough_since = None
        return actions

    def tell(self, now: float, *, decided: bool = False) -> Actions:
        """Send the followers the group's status.

        Args:
            decided: the deadline is over, so each follower reports to its caller.
        """
        self._tell_at = now + HEARTBEAT_SECONDS
        status = LeaderStatus(self.holders, decided)
        return [
            Send(peer_id, status, "its group has changed, or time has passed") for peer_id in self.followers
        ]

    def heartbeat(self, now: float) -> Actions:
        """Send the status, if the group has grown, or the followers have heard nothing for a while."""
        return self.tell(now) if self.followers and now >= self._tell_at else []

    def times(self) -> list[float]:
        """Return the times of the next heartbeat and of going ahead although the group is incomplete."""
        times = [self._tell_at] if self.followers else []
        if self._enough_since is not None:
            times.append(max(self._state.me.deadline, self._enough_since + SETTLE_SECONDS))
        return times

    # ------------------------------------------------------------------ the proposal

    def why_propose(self, now: float) -> str | None:
        """Return the reason for proposing the group now, or ``None``."""
        state = self._state
        if self.is_full and not state.peers.awaits_auxiliaries and self.has_contributor:
            return "the group is complete"
        if not self.has_enough:
            self._enough_since = None
            return None
        # An incomplete group goes ahead at the deadline if it has enough members by then, and else when others have had
        # time to come too.
        if self._enough_since is None:
            self._enough_since = now
        in_time = self._enough_since <= state.me.deadline
        if now < (state.me.deadline if in_time else self._enough_since + SETTLE_SECONDS):
            return None
        return f"the deadline is over with {self.holders} of {state.settings.target}"

    def propose(self, reason: str, now: float) -> Actions:
        """Propose the group as it is to all followers."""
        state = self._state
        members = (state.me, *sorted(self.followers.values(), key=lambda follower: follower.order))
        self._proposals += 1
        roster = state.roster = Roster(
            members=members,
            shares=state.settings.cutter.cut(members),
            proposal=self._proposals,
            observers=state.observers_among(members),
        )
        state.phase, self._accepted = AttemptPhase.PROPOSING, set()
        self.answers_due = now + PROPOSAL_ANSWER_SECONDS
        # Once for all proposals: followers expect no more, and each might have another slow member.
        self._patience_end = self._patience_end or now + patience(state.settings.match_timeout)
        expect = Expect(roster.group_id, "members may hear of the commit first")
        return [expect, *(Send(peer_id, GroupProposal(roster), reason) for peer_id in self.followers)]

    def accepted(self, peer_id: str) -> Actions:
        """Note that a follower has accepted the proposal; commit if it was the last one."""
        self._accepted.add(peer_id)
        roster = self._state.roster
        if self._accepted != self.followers.keys() or roster is None:
            return []
        self._state.phase = AttemptPhase.COMMITTED
        actions: Actions = [Send(p, GroupCommit(roster.group_id), "all accepted") for p in self.followers]
        actions += [Close(p, "committed") for p in self.followers]
        return [*actions, Formed(roster, "all accepted")]

    def refused(self, peer_id: str, reason: str, now: float) -> Actions:
        """Drop a follower that refused the proposal."""
        del self.followers[peer_id]
        self._state.peers[peer_id].hold_off(f"refused: {reason}", now)
        return [Close(peer_id, "refused")]

    @property
    def silent(self) -> frozenset[str]:
        """Ids of the followers whose answers to the proposal are awaited."""
        if self._state.phase is not AttemptPhase.PROPOSING:
            return frozenset()
        return frozenset(self.followers.keys() - self._accepted)

    def ask_again(self, now: float) -> Actions:
        """Repeat the proposal while only slow followers are silent; return nothing if they had their time.

        The repetition tells those that have accepted that the leader is there. It also shows whether the systems of
        the others still acknowledge what they get.
        """
        roster = self._state.roster
        if roster is None or now >= self._patience_end:
            return []
        self.answers_due = min(now + HEARTBEAT_SECONDS, self._patience_end)
        again = GroupProposal(roster)
        return [Send(peer_id, again, "a slow member is waited for") for peer_id in self.followers]

    def drop_silent(self, reason: str, now: float) -> Actions:
        """Drop the followers that have not answered the proposal."""
        actions: Actions = []
        for peer_id in sorted(self.silent):
            del self.followers[peer_id]
            # Otherwise it would rejoin at once, and delay the next roster too.
            self._state.peers[peer_id].hold_off(reason, now)
            actions += [Send(peer_id, Disband(reason), reason), Close(peer_id, reason)]
        return actions
