"""Exhaustive search for progress with a member that lies: the honest ones end with success, after few attempts.

The liar says anything that a member may say that does not lead, to any member, as often as it likes: it names false
digests, accuses others, denies what it holds, signs two averages of its share and shows either. It may fall silent at
any time. Then the others give it up when nothing else is left to happen, as the failure detector and the limits of time
do. The search leaves out two things, of which docs/explanation/agreement.md says what they cost ("What can still go
wrong"): what the liar says as a leader, and a liar that is silent to some members only.

The states form a finite graph. It has no cycle, so each way through it ends, whatever the liar does; and each end is
checked. So success follows from every state, under any order of steps in which no message waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from p2pavg.consensus.choice import ballot_leader
from p2pavg.consensus.member import FINAL, MemberState, RoundPhase, Seat
from p2pavg.consensus.votes import (
    Accepted,
    Complete,
    Lost,
    Promise,
    ResultHeld,
    SignedOutput,
    Trouble,
    Vote,
    VoteHeard,
)
from tests.unit.consensus.hostile import AVERAGES, HostileGroup, _digest
from tests.unit.consensus.world import Faults, FoundError, World, _way, completed, output


class LyingFollower(HostileGroup):
    """A group of which one member lies without end.

    Args:
        liar: its position.
        accuses: true if it also accuses other members.
        most_attempts: number of attempts that the honest members begin at most.
        most_left_out: number of honest members that may be left out of the result.
    """

    def __init__(
        self, size: int, *, liar: int, accuses: bool, most_attempts: int, most_left_out: int = 0
    ) -> None:
        super().__init__(size, Faults(), liar=liar, lies=0)
        self.accuses = accuses
        self.most_attempts = most_attempts
        self.most_left_out = most_left_out

    # ------------------------------------------------------------------ steps

    def every_step(self, world: World) -> list[tuple[str, World, bool]]:
        """Return each possible step: its description, the next state, and True if the step must happen sometime."""
        found = [step for step in self.steps(world) if not step[0].startswith(f"{self.liar} ")]
        for member in self._honest(world):
            for average in AVERAGES:
                if self._may_complete(world, member, average):
                    event = completed(member, average, self.liar)
                    after = self._happen(world, member.me, event)
                    found.append((f"{member.me} completes {member.begun.attempt}: {average!r}", after, True))
        if not any(must for _, _, must in found):  # all wait for the liar
            found += [
                (f"{member.me} gives {self.liar} up", self._happen(world, member.me, Lost(self.liar)), True)
                for member in self._honest(world)
                if member.phase not in FINAL and self.liar not in member.lost
            ]
        members = self._honest(world)
        for member in members if all(self.liar not in one.lost for one in members) else ():
            if member.phase in FINAL:
                continue
            for vote in self._words(member):
                after = self._happen(world, member.me, VoteHeard(self.liar, vote))
                if after != world:
                    found.append((f"{self.liar} tells {member.me}: {vote}", after, False))
        return found

    def _words(self, member: MemberState) -> Iterator[Vote]:
        """Yield what the liar may say to a member that is not what it said before."""
        begun, liar = member.begun, self.liar
        leads = ballot_leader(begun.ballot, member.size) == member.me == member.leader
        if leads and member.phase in (RoundPhase.EXCHANGING, RoundPhase.HOLDING):
            for average in AVERAGES if liar in begun.members else ():
                one = completed(MemberState(self._seat(member), begun), average, liar)
                yield ResultHeld(begun.ballot, one.digests, one.signature)
                for share in range(len(one.digests)):
                    false = (*one.digests[:share], b"false", *one.digests[share + 1 :])
                    yield ResultHeld(begun.ballot, false, one.signature)
        if liar in member.blamed:
            for average in AVERAGES:
                yield SignedOutput(begun.attempt, liar, average, output(liar, average))
        if self.accuses and member.leader == member.me:
            for other in sorted(self.honest - {member.me}):
                yield Trouble(other, False, "")
                yield Trouble(other, True, "")
        if member.phase is RoundPhase.GATHERING:
            yield from self._answers(member)
        elif member.phase is RoundPhase.PROMISED:
            yield Promise(member.promised, begun.attempt, None, None, frozenset(), frozenset())

    def _seat(self, member: MemberState) -> Seat:
        return replace(member.seat, me=self.liar)

    def _answers(self, member: MemberState) -> Iterator[Promise]:
        begun, none = member.begun, frozenset[int]()
        yield Promise(member.promised, begun.attempt, None, None, none, none)
        if self.liar in begun.members:
            accepted = Accepted(begun.ballot, begun.attempt, begun.members, begun.view)
            whole = Complete(begun.attempt, begun.members)
            for digest in (_digest(AVERAGES[0], begun.members, self.liar), b"false"):
                yield Promise(member.promised, begun.attempt, accepted, whole, none, none, digest)
        for other in sorted(self.honest - {member.me}) if self.accuses else ():
            apart = frozenset({other})
            yield Promise(member.promised, begun.attempt, None, None, apart, none)
            yield Promise(member.promised, begun.attempt, None, None, apart, apart)

    # ------------------------------------------------------------------ checks

    def progress(self, *, limit: int = 5_000_000) -> int:
        """Visit every state, check that each way ends and how, and return the number of states.

        Raises:
            FoundError: a check failed; the text lists the steps to that state.
        """
        before: dict[World, tuple[World, str] | None] = {self.first: None}
        on_way = {self.first}
        over: set[World] = set()
        stack = [(self.first, iter(self._checked_steps(self.first, before)))]
        while stack:
            here, following = stack[-1]
            step = next(following, None)
            if step is None:
                stack.pop()
                on_way.discard(here)
                over.add(here)
                continue
            text, world, _ = step
            if world in on_way:
                raise FoundError("\n".join([*_way(before, here), text, "the round goes round in a circle"]))
            if world in over:
                continue
            before.setdefault(world, (here, text))
            on_way.add(world)
            stack.append((world, iter(self._checked_steps(world, before))))
            if len(before) > limit:
                raise FoundError(f"more than {limit} states")
        return len(over)

    def _checked_steps(
        self, here: World, before: dict[World, tuple[World, str] | None]
    ) -> list[tuple[str, World, bool]]:
        steps = self.every_step(here)
        wrong = self.what_is_wrong(here)
        if len({attempt for attempt, _ in here.begun}) > self.most_attempts:
            wrong = f"more than {self.most_attempts} attempts"
        if wrong is None and not any(must for _, _, must in steps):
            wrong = self.what_is_missing(here)
        if wrong is not None:
            raise FoundError("\n".join([*_way(before, here), wrong, *map(str, self._honest(here))]))
        # The liar's words first: the search goes to the depth first, and a fault that it causes lies there.
        return sorted(steps, key=lambda step: step[2])

    def what_is_missing(self, world: World) -> str | None:
        """Return what is wrong at an end, or ``None``."""
        members = self._honest(world)
        waiting = [member.me for member in members if member.phase not in FINAL]
        done = {member.me for member in members if member.phase is RoundPhase.COMMITTED}
        if waiting:
            return f"{waiting} wait for ever"
        if len(self.honest - done) > self.most_left_out:
            return f"only {sorted(done)} end with success"
        return None
