"""Carries out the agreement of one member: hears votes, decides by :mod:`p2pavg.consensus.agreement`, and tells votes.

Everything that happens to the member in a round goes through :meth:`Voting.happen`: a vote, a loss, a completed result.
What has to be done about the parts is told to the :class:`ExchangeActions`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import trio

from p2pavg.base.errors import RefusedError
from p2pavg.base.limits import ASK_AGAIN_SECONDS
from p2pavg.consensus.agreement import advance
from p2pavg.consensus.choice import ballot_leader
from p2pavg.consensus.member import FINAL, MemberState, RoundPhase, asks_further
from p2pavg.consensus.votes import (
    Action,
    Begin,
    Dead,
    Drop,
    Event,
    Exclude,
    Gather,
    GivenUp,
    Left,
    Lost,
    PassOn,
    Promise,
    Readmit,
    ReceivedUpTo,
    ResultCommit,
    RunAttempt,
    SignedOutput,
    TakeFrom,
    Tell,
    Trouble,
    Unknown,
    Vote,
    VoteHeard,
)
from p2pavg.group.milestones import Milestone
from p2pavg.group.roster import Roster
from p2pavg.net.blame import guarded
from p2pavg.round.control import VoteStreams
from p2pavg.round.losses import Losses
from p2pavg.round.signing import Signing

PROMISE_SECONDS = 2.0  # for the promise of a member that is left out
SETTLE_VOTES_SECONDS = 0.5  # for the others' last word, when this member has failed
FIND_OUT_SECONDS = 600.0  # a member that was cut off asks for so long how the round ended, ever less often
MAX_ASK_AGAIN_SECONDS = 15.0

_MILESTONES = {
    RoundPhase.HOLDING: Milestone.HOLDING,
    RoundPhase.COMMITTED: Milestone.COMMITTED,
    RoundPhase.FAILED: Milestone.FAILED,
}


def max_votes(size: int) -> int:
    """Return how many votes a member of a group of so many may send in a round.

    Each of the others may be lost once. That costs at most two ballots, of six votes each, and the leader says why
    each of those that were lost before is left out. A member that goes on voting could keep a round from its end.
    """
    return 64 + size * (size + 12)


class ExchangeActions(Protocol):
    """The exchange, which moves the parts as the agreement decides."""

    def begin_attempt(self, number: int, members: frozenset[int]) -> None:
        """Begin an attempt among these members."""

    def pass_on(self, reducers: frozenset[int], to: frozenset[int]) -> None:
        """Send the averages of lost reducers to members that lack them."""

    def take_from(self, source: int, reducers: frozenset[int]) -> None:
        """Expect the averages of lost reducers from another member."""

    def came_from(self, position: int) -> ReceivedUpTo | None:
        """Return how far a member's contribution has come; ``None`` if nothing of it is kept."""

    def committed(self) -> None:
        """Answer members that ask from now on with the commit."""

    def reached(self, milestone: Milestone) -> None:
        """Tell the observer of a test how far this member is."""


class Voting:
    """The agreement of one member of one group. Members are named by their position in the roster.

    Args:
        member: the state that the member begins with.
        signing: checks the signatures of votes that come in.
        control: the streams of votes. The voting is what they report to, so they are set by the owner.
    """

    control: VoteStreams

    def __init__(self, roster: Roster, member: MemberState, moves: ExchangeActions, signing: Signing) -> None:
        self.member = member
        self.signing = signing
        self.losses = Losses(roster)
        self.ended = trio.Event()
        """Set when the member has committed or failed."""
        self.reduces_all = False
        """True while this member reduces for a whole star: only it sees which contributor keeps the others waiting."""
        self.nursery: trio.Nursery | None = None
        """Nursery of questions to other members; ``None`` before the round and after its end."""
        self._roster = roster
        self._moves = moves
        self.came: dict[int, ReceivedUpTo] = {}
        """What each other member said last of this member's contribution to its share."""
        self._heard_more = trio.Event()  # set when something was heard after the end
        self._votes: Counter[int] = Counter()  # sent by each member
        self._convicted: set[int] = set()  # by evidence

    # ------------------------------------------------------------------ what happens

    def happen(self, event: Event) -> None:
        """Advance the member, and carry out what follows."""
        # Votes count even after the end. They may tell a member that has failed how the round ended for the others.
        if self.member.phase in FINAL and not isinstance(event, VoteHeard):
            return
        if self.member.phase not in FINAL and self.nursery is None:
            return  # cancelled
        before = self.member
        self.member, actions = advance(before, event)
        self._note_losses(event, before, actions)
        self._carry_out(actions)
        for position in sorted(self.member.lost - before.lost):
            self.control.drop(position)
            if self.nursery is not None and self.member.phase not in FINAL:
                # It may have committed before it was cut off, so it is asked how the round ended.
                self.nursery.start_soon(self._ask_until_gone, position)
        if self.nursery is not None and self.member.phase is RoundPhase.GATHERING:
            # Each question has its own time: one that promised an earlier ballot may withhold the next promise.
            is_asked = before.phase is RoundPhase.GATHERING and before.promised == self.member.promised
            for position in sorted(self.member.blamed - (before.blamed if is_asked else frozenset())):
                self.nursery.start_soon(self._lose_unless_it_promises, position, self.member.promised)
        if self.member.phase is not before.phase and self.member.phase in _MILESTONES:
            self._moves.reached(_MILESTONES[self.member.phase])
        if self.member.phase in FINAL:
            if self.member.phase is RoundPhase.COMMITTED:
                self._moves.committed()
                self.control.end()  # nothing is left to say: so the last word goes out together with the commit
            self.ended.set()
            self._heard_more.set()
            self._heard_more = trio.Event()

    def _note_losses(self, event: Event, before: MemberState, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Drop):
                # Not as hostile: a ban of ten minutes must not follow from what other members say.
                self.losses.note(action.peer, action.reason)
            elif isinstance(action, Exclude):
                # It told this member something false itself, and cost the round an attempt. That may be damage.
                self.losses.note(action.peer, action.reason, silent=True)
            elif isinstance(action, Readmit):
                self.losses.forget(action.peer)
        for position in sorted(self.member.lost - before.lost):
            if position not in self.losses:
                left = isinstance(event, VoteHeard) and isinstance(event.vote, Left) and event.vote.reason
                self.losses.note(
                    position, f"it gave the round up: {left}" if left else "it gave the round up"
                )

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Tell(position, vote):
                    if isinstance(vote, Begin):
                        for trouble in self.losses.explanations(self.member.begun.view, vote.view):
                            self.control.tell(position, trouble)
                    if isinstance(vote, Gather | Promise):
                        self._tell_what_came(position)
                    self.control.tell(position, vote)
                case RunAttempt(number, members):
                    self._moves.begin_attempt(number, members)
                case PassOn(reducers, to):
                    self._moves.pass_on(reducers, to)
                case TakeFrom(source, reducers):
                    self._moves.take_from(source, reducers)

    def _tell_what_came(self, position: int) -> None:
        """Tell a member how far its contribution has come, in case that the next ballot is about a new attempt."""
        came = self._moves.came_from(position)
        if came is not None:
            self.control.tell(position, came)

    def lost(
        self,
        position: int,
        reason: str,
        *,
        hostile: bool = False,
        silent: bool = False,
        reachable: bool = False,
    ) -> None:
        """Lose a member: it can take part no longer. If it is ``reachable``, the agreement still asks it."""
        known = self.member.apart if reachable else self.member.lost
        if position not in known and self.member.phase not in FINAL:
            self.losses.note(position, reason, hostile=hostile, silent=silent)
            # In a butterfly every reducer misses a contribution that does not come. In a star one does. If it were its
            # word against the contributor's, the later one in the roster would go, and with it perhaps the reducer.
            accused = hostile or (reachable and self.reduces_all)
            self.happen(Lost(position, accused, reason, reachable))

    async def _lose_unless_it_promises(self, position: int, ballot: int) -> None:
        """Lose a member that this one has blamed, if it has promised neither this ballot nor a later one."""
        await trio.sleep(PROMISE_SECONDS)
        member = self.member
        if member.phase is not RoundPhase.GATHERING or position not in member.blamed:
            return
        # A member that calls the question out of date is asked with a newer ballot. That gives it no more time.
        has_promised = any(other == position and promised >= ballot for other, promised, _ in member.heard)
        if member.begun.ballot < ballot and not has_promised:
            self.lost(position, f"it did not answer for {PROMISE_SECONDS:g} s", silent=True)

    def leads(self, phase: RoundPhase) -> bool:
        """Return whether this member leads the ballot, in this phase."""
        member = self.member
        return member.phase is phase and ballot_leader(member.begun.ballot, member.size) == member.me

    # ------------------------------------------------------------------ votes

    def heard(self, position: int, vote: Vote) -> None:
        """Count and take a member's vote."""
        # Counted before anything is checked: a signature that is verified in vain costs time too.
        self._votes[position] += 1
        if self._votes[position] > max_votes(self.member.size):
            self.lost(position, "it sends more votes than a round needs", hostile=True)
            return
        self._receive(position, vote)

    def _receive(self, position: int, vote: Vote) -> None:
        """Take a member's word. An exception on the way costs that member, not the averager."""
        with guarded(self._roster.members[position].peer_id, self._fault, what="a vote"):
            wrong = self.signing.wrong_with(self.member, position, vote)
            # The vote may prove the lie of another member than the one that sent it,
            # such as a reducer that signed two averages.
            for liar in self.signing.evidence.keys() - self._convicted:
                self._convicted.add(liar)
                if self.member.phase not in FINAL:
                    self.losses.convict(liar, self.signing.lies[liar])
                    self.lost(liar, self.signing.lies[liar], hostile=True)
            if wrong:
                self.lost(position, wrong, hostile=True)
            if wrong or position in self.signing.evidence:
                return
            if isinstance(vote, ReceivedUpTo):
                self.came[position] = vote
                return
            if isinstance(vote, SignedOutput) and vote.reducer not in self.signing.evidence:
                return  # the reducer has signed one average only
            if isinstance(vote, Gather | Promise):
                came = self.came.get(position)
                # It says so before this vote. If it has said nothing, it has begun another attempt, and kept nothing.
                if came is not None and came.attempt != vote.attempt:
                    del self.came[position]
            if position not in self.member.lost:
                self._take_hint(position, vote)
            self.happen(VoteHeard(position, vote))

    def _fault(self, peer_id: str, error: Exception) -> None:
        position = self._roster.position(peer_id)
        self.lost(position, f"its vote cannot be handled: {error!r}", hostile=True)

    def _take_hint(self, position: int, vote: Vote) -> None:
        """Doubt the members that another one has lost: those that go on with a member and those that go on without it
        must not drift apart."""
        doubted: set[int] = set()
        if isinstance(vote, Trouble):
            self.losses.receive(vote)
            doubted = {vote.peer}
        elif isinstance(vote, Gather):
            doubted = set(range(position))  # it leads only when it has lost all that come before it
        for peer in sorted(doubted - self.member.lost - {self.member.me}):
            self.control.doubt(peer)

    # ------------------------------------------------------------------ questions

    def missing(self, position: int) -> None:
        """Ask a member whether it knows of the round, or has ended it."""
        if self.nursery is not None:
            self.nursery.start_soon(self._ask_first, position)

    async def _ask_first(self, position: int) -> None:
        """Ask a member that may have left the group: its leader may have died before it heard that the group stands.

        It may also have ended the round. Either way, it says so.
        """
        try:
            answer = await self.control.ask(position)
            if answer is None:  # over a connection that was just going, perhaps
                answer = await self.control.ask(position)
        except RefusedError as error:
            self.lost(position, str(error))
            return
        if position in self.member.lost:
            return
        if isinstance(answer, Unknown):
            self.losses.note(position, "it does not know this round")
        if isinstance(answer, ResultCommit | Left | Unknown):
            self._receive(position, answer)
        if isinstance(answer, ResultCommit):  # if it is no proof for this member, another one has to give it
            self.lost(position, "it has ended the round")

    async def _ask_until_gone(self, position: int) -> None:
        """Ask a lost member again and again how the round ended for it, until its process is known to be dead."""
        while position not in self.member.dead:
            if asks_further(self.member, position):
                try:
                    answer = await self.control.ask(position)
                except RefusedError:
                    self.happen(Dead(position))
                    return
                news = isinstance(answer, ResultCommit | Unknown) or position not in self.member.gone
                if news and isinstance(answer, ResultCommit | Left | Unknown):
                    self._receive(position, answer)
            await trio.sleep(ASK_AGAIN_SECONDS)

    async def settle(self) -> None:
        """Wait a moment for the others' last word, while it may still change this member's outcome."""
        with trio.move_on_after(SETTLE_VOTES_SECONDS):
            while self.member.undecided:
                await self._heard_more.wait()

    async def find_out(self) -> None:
        """Ask the members that may know how the round ended, until one answers or no member is left to ask."""
        pause = ASK_AGAIN_SECONDS
        with trio.move_on_after(FIND_OUT_SECONDS):
            while self.is_used() is None:
                await trio.sleep(pause)
                pause = min(1.5 * pause, MAX_ASK_AGAIN_SECONDS)
                for position in sorted(set(range(self.member.size)) - {self.member.me} - self.member.gone):
                    try:
                        answer = await self.control.ask(position)
                    except RefusedError:
                        # The member's process has ended, so it knows no more of the round than one that was restarted.
                        answer = Unknown()
                    if isinstance(answer, ResultCommit | Left | Unknown):
                        self._receive(position, answer)

    # ------------------------------------------------------------------ the outcome

    def is_used(self) -> bool | None:
        """Return whether this member's contribution is in the result; ``None`` when others may know."""
        member = self._at_the_end()
        if member.outcome is not None:
            return member.me in member.outcome.members
        return None if member.undecided else member.presumed_used

    def _at_the_end(self) -> MemberState:
        """Return this member's state; if the round was cancelled, as if it had given up."""
        if self.member.phase in FINAL:
            return self.member
        # What it would do is left undone, since its round is over.
        return advance(self.member, GivenUp("it was stopped"))[0]

    def last_word(self) -> ResultCommit | Left:
        """Return what this member answers to members that ask later how the round ended."""
        member = self._at_the_end()
        if member.committed is not None:
            return member.committed
        return Left(-1 if member.accepted is None else member.accepted.ballot, member.reason)
