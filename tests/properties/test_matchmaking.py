"""Invariants and termination of matchmaking for any order of arrivals, deliveries, losses and crashes."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from p2pavg.base.limits import ROUND_TRIPS_SECONDS
from p2pavg.group.reach import Reach
from p2pavg.matchmaking.timing import LEADER_SILENCE_SECONDS, PROPOSAL_ANSWER_SECONDS
from tests.unit.matchmaking.bus import MATCH_TIMEOUT, SIGNERS, Attempt, Bus

PEERS = 7
TARGET, MINIMUM = 3, 2
# A follower may hear nothing for SILENCE_SECONDS, or be in the middle of a proposal, when its deadline passes.
RESULT_SECONDS = ROUND_TRIPS_SECONDS + LEADER_SILENCE_SECONDS + PROPOSAL_ANSWER_SECONDS


class Matchmaker(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bus = Bus()

    def _active(self) -> list[Attempt]:
        return [attempt for attempt in self.bus.attempts.values() if attempt.active]

    @rule(index=st.integers(0, PEERS - 1), auxiliary=st.booleans(), reach=st.sampled_from(Reach))
    def announce(self, index: int, auxiliary: bool, reach: Reach) -> None:
        """Announce a peer, again if it is in a group or gave up."""
        self.bus.advance(0.001)  # no peer uses a deadline twice
        known = self.bus.attempts.get(SIGNERS[index].peer_id)
        if known is None or not known.active:
            helps = auxiliary and index == 0
            self.bus.announce(index, auxiliary=helps, target=TARGET, minimum=MINIMUM, reach=reach)

    @precondition(lambda self: self.bus.attempts)
    @rule(data=st.data())
    def discover(self, data: st.DataObject) -> None:
        attempts = [a for a in self.bus.attempts.values() if a.active]
        if attempts:
            self.bus.discover(data.draw(st.sampled_from(attempts)))

    @precondition(lambda self: self.bus.deliverable())
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        self.bus.deliver(*data.draw(st.sampled_from(self.bus.deliverable())))

    @precondition(lambda self: self.bus.nudges)
    @rule(lose=st.booleans())
    def nudge(self, lose: bool) -> None:
        if lose:
            self.bus.nudges.popleft()
        else:
            self.bus.deliver_nudge()

    @precondition(lambda self: self.bus.links)
    @rule(data=st.data())
    def break_a_stream(self, data: st.DataObject) -> None:
        self.bus.break_link(data.draw(st.sampled_from(self.bus.links)))

    @precondition(lambda self: self.bus.attempts)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        self.bus.crash(data.draw(st.sampled_from(list(self.bus.attempts.values()))))

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 3.0, 7.0]))
    def time_passes(self, seconds: float) -> None:
        self.bus.advance(seconds)

    @invariant()
    def groups_are_sound(self) -> None:
        for attempt in self.bus.history:
            if attempt.formed is None:
                continue
            ids = [member.peer_id for member in attempt.formed.members]
            assert attempt.me in attempt.formed.members, "in a group that does not know it"
            assert len(set(ids)) == len(ids), "a member twice"
            assert MINIMUM <= len(attempt.formed.contributors) <= TARGET, "a group of a size nobody asked for"
            assert attempt.expected == attempt.formed.group_id, "streams of its own group would be refused"

    @invariant()
    def all_peers_hear_by_their_deadlines(self) -> None:
        for attempt in self._active():
            if not attempt.me.auxiliary and self.bus.now > attempt.me.deadline + RESULT_SECONDS:
                assert attempt.reports, "no word at the deadline"

    @invariant()
    def peers_never_wait_in_a_circle(self) -> None:
        for attempt in self._active():
            leader = attempt.rules.state.leader
            assert leader is None or leader.order < attempt.me.order

    def teardown(self) -> None:
        """Without further faults, every peer that can be in a group is in one."""
        for _ in range(40):
            for attempt in self._active():
                self.bus.discover(attempt)
            self.bus.settle()
            self.bus.advance(MATCH_TIMEOUT / 10)
            self.bus.settle()
        left = [attempt for attempt in self._active() if not attempt.me.auxiliary]
        assert len(left) < MINIMUM, [(a.me.peer_id, a.rules.state.phase, a.rules.state.leader) for a in left]


TestMatchmaker = Matchmaker.TestCase
TestMatchmaker.settings = settings(
    max_examples=200, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
