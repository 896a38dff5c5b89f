"""Exhaustive search of a small group's states: every order of messages, every crash, every false suspicion.

A state of the world consists of every member's state and the messages in flight. :meth:`Group.explore` visits all
states that can be reached. Messages from one member to another arrive in order. A connection that breaks loses its last
messages, so a crash may lose any number of the last messages of a member.

A member may complete an attempt at any time after all of the attempt's members have begun it. Real exchanges allow less
than that, so guarantees that hold here hold in real rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from p2pavg.consensus.agreement import advance
from p2pavg.consensus.member import FINAL, MemberState, RoundPhase, asks_further, new_member
from p2pavg.consensus.votes import (
    Action,
    Completed,
    Dead,
    Drop,
    Event,
    Gather,
    GivenUp,
    Left,
    Lost,
    Members,
    PassOn,
    ResultCommit,
    ResultHeld,
    RunAttempt,
    TakeFrom,
    Tell,
    Trouble,
    Unknown,
    Vote,
    VoteHeard,
)


@dataclass(frozen=True, slots=True)
class Faults:
    """Numbers of faults that may still happen."""

    crashes: int = 0
    suspicions: int = 0
    blames: int = 0
    """A member wants to go on without another one that it can reach."""
    timeouts: int = 0


class Names:
    """Numbers for the components of a state. Equal components have one number, and comparing numbers is fast."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._things: list[Any] = []
        self._next: dict[tuple[int, Event], tuple[int, list[Action]]] = {}

    def number(self, key: Any, thing: Any) -> int:
        """Return the number of the thing that ``key`` identifies."""
        found = self._numbers.setdefault(key, len(self._things))
        if found == len(self._things):
            self._things.append(thing)
        return found

    def vote(self, number: int) -> Vote:
        """Return the vote with a number."""
        vote: Vote = self._things[number]
        return vote

    def member(self, number: int) -> MemberState:
        """Return the member's state with a number."""
        member: MemberState = self._things[number]
        return member

    def advance(self, number: int, event: Event) -> tuple[int, list[Action]]:
        """Return the result of :func:`p2pavg.consensus.agreement.advance`, computed once per state and event."""
        if (number, event) not in self._next:
            member, actions = advance(self.member(number), event)
            self._next[number, event] = (self.number(member.key(), member), actions)
        return self._next[number, event]


class Signed(NamedTuple):
    """A signature that a member holds a result."""

    signer: int
    attempt: int
    members: Members
    digest: bytes
    signature: bytes


class World(NamedTuple):
    """One state of the group, made of numbers of :class:`Names`."""

    numbers: tuple[int, ...]
    crashed: frozenset[int]
    queues: tuple[tuple[tuple[int, int], tuple[int, ...]], ...]
    """Messages in flight, by (sender, receiver)."""
    broken: frozenset[tuple[int, int]]
    """(a, b): b has lost a, and a has not noticed yet."""
    begun: frozenset[tuple[int, int]]
    """(attempt, member): the member has begun the attempt."""
    over: frozenset[tuple[int, int]]
    """(attempt, member): the member has begun a newer attempt, and has discarded the parts of this one."""
    faults: Faults
    signatures: frozenset[Signed] = frozenset()
    """Signatures that a hostile member has been sent: see ``hostile.py``."""
    passing: frozenset[tuple[int, int, int, int]] = frozenset()
    """(attempt, reducer, source, to): the source passes on the share of a reducer that is gone."""
    taking: frozenset[tuple[int, int, int, int]] = frozenset()
    """The same of members that take the share from that source."""


class Group:
    """A group whose rounds are searched exhaustively."""

    def __init__(
        self,
        size: int,
        faults: Faults,
        *,
        auxiliaries: int = 0,
        observers: int = 0,
        minimum: int = 2,
        strict: bool = True,
    ) -> None:
        self.strict = strict
        holders = frozenset(range(size - auxiliaries))
        contributors = frozenset(range(size - auxiliaries - observers))
        members = [new_member(me, size, holders, contributors, minimum) for me in range(size)]
        self.names = Names()
        numbers = tuple(self.names.number(member.key(), member) for member in members)
        begun = frozenset((0, me) for me in range(size))
        self.first = World(numbers, frozenset(), (), frozenset(), begun, frozenset(), faults)

    def members(self, world: World) -> list[MemberState]:
        """Return every member's state."""
        return [self.names.member(number) for number in world.numbers]

    def steps(self, world: World) -> Iterator[tuple[str, World, bool]]:
        """Yield each possible step: its description, the next state, and True if the step must happen sometime."""
        members = self.members(world)
        alive = [m for m in members if m.me not in world.crashed]
        for (a, b), queue in world.queues:
            vote = self.names.vote(queue[0])
            yield (
                f"{a}->{b} {vote}",
                self._happen(_with_queue(world, (a, b), queue[1:]), b, VoteHeard(a, vote)),
                True,
            )
        for member in alive:
            if member.phase not in FINAL:
                yield from self._steps_of(world, members, member)
            if member.phase not in FINAL or member.undecided:
                yield from self._ask(world, members, member)
        faults = world.faults
        if faults.crashes:
            less = world._replace(faults=replace(faults, crashes=faults.crashes - 1))
            for member in alive:
                yield f"{member.me} crashes", _crash(less, member.me), False
        if faults.suspicions:
            less = world._replace(faults=replace(faults, suspicions=faults.suspicions - 1))
            for member in alive:
                for other in alive:
                    if member.phase not in FINAL and other is not member and other.me not in member.lost:
                        yield f"{member.me} suspects {other.me}", self._lose(less, member.me, other.me), False
        if faults.blames:
            less = world._replace(faults=replace(faults, blames=faults.blames - 1))
            for member in alive:
                for other in alive:
                    if member.phase not in FINAL and other is not member and other.me not in member.apart:
                        blamed = Lost(other.me, reachable=True)
                        if other.me != member.leader:
                            yield (
                                f"{member.me} blames {other.me}",
                                self._happen(less, member.me, blamed),
                                False,
                            )
        if faults.timeouts:
            less = world._replace(faults=replace(faults, timeouts=faults.timeouts - 1))
            for member in alive:
                if member.phase not in FINAL:
                    yield f"{member.me} is out of time", self._happen(less, member.me, GivenUp()), False

    def _steps_of(
        self, world: World, members: list[MemberState], member: MemberState
    ) -> Iterator[tuple[str, World, bool]]:
        me = member.me
        has = member.complete is not None and member.complete.attempt == member.begun.attempt
        over = (member.begun.attempt, me) in world.over
        if (
            not has
            and not over
            and all((member.begun.attempt, other) in world.begun for other in member.begun.members)
        ):
            done = self._happen(world, me, completed(member))
            yield f"{me} completes {member.begun.attempt}", done, self._arrives(world, members, member)
        for other in members:
            gone = other.me in world.crashed or (me, other.me) in world.broken
            if other is not member and other.me not in member.lost and gone:
                yield f"{me} notices {other.me}", self._lose(world, me, other.me), True

    def _ask(
        self, world: World, members: list[MemberState], member: MemberState
    ) -> Iterator[tuple[str, World, bool]]:
        """Yield the steps in which a member asks one that it has lost, which is dead or tells the outcome."""
        me = member.me
        for other in members:
            if other is member or not asks_further(member, other.me):
                continue
            if other.me not in member.lost and member.phase is not RoundPhase.FAILED:
                continue
            if other.me in world.crashed:
                known = Unknown() if member.phase is RoundPhase.FAILED else None
                event = Dead(other.me) if known is None else VoteHeard(other.me, known)
                yield f"{me} knows {other.me} dead", self._happen(world, me, event), True
            elif other.phase in FINAL and not (other.committed is None and other.me in member.gone):
                answer = how_it_ended(other)
                yield (
                    f"{me} asks {other.me}: {answer}",
                    self._happen(world, me, VoteHeard(other.me, answer)),
                    True,
                )

    def _arrives(self, world: World, members: list[MemberState], member: MemberState) -> bool:
        """Return whether a member must get the result: no member is lost, or one passes on all that those would send.

        It has to know from which one it comes: what others pass on is not read.
        """
        gone = member.begun.members & (world.crashed | member.lost)
        served = world.passing & world.taking
        attempt, me = member.begun.attempt, member.me
        return not gone or any(
            all((attempt, reducer, other.me, me) in served for reducer in gone)
            for other in members
            if other.me not in gone
        )

    def _lose(self, world: World, me: int, other: int) -> World:
        """Let ``me`` give ``other`` up, and drop the messages in flight from it."""
        world = _with_queue(world, (other, me), ())
        broken = world.broken - {(me, other)}
        if other not in world.crashed and me not in self.names.member(world.numbers[other]).lost:
            broken |= {(other, me)}
        return self._happen(world._replace(broken=broken), me, Lost(other))

    def _happen(self, world: World, me: int, event: Event) -> World:
        number, actions = self.names.advance(world.numbers[me], event)
        world = world._replace(numbers=(*world.numbers[:me], number, *world.numbers[me + 1 :]))
        queues = dict(world.queues)
        begun, over, broken = world.begun, world.over, world.broken
        passing, taking = set(world.passing), set(world.taking)
        attempt_of = self.names.member(number).begun.attempt
        for action in actions:
            match action:
                case Tell(peer, vote):
                    if peer not in world.crashed and not self._deaf(world, peer, me, vote):
                        named = self.names.number(vote, vote)
                        queues[me, peer] = (*queues.get((me, peer), ()), named)
                case Drop(peer, _):
                    # The connection ends for both. What the other one told before does not arrive.
                    queues.pop((peer, me), None)
                    if peer not in world.crashed and me not in self.names.member(world.numbers[peer]).lost:
                        broken |= {(peer, me)}
                case PassOn(reducers, to):
                    passing |= {(attempt_of, one, me, other) for one in reducers for other in to}
                case TakeFrom(source, reducers):
                    taking |= {(attempt_of, one, source, me) for one in reducers}
                case RunAttempt(attempt, _):
                    over |= {(older, other) for older, other in begun if other == me}
                    begun |= {(attempt, me)}
        if self.names.member(number).phase in FINAL:
            # Messages that a member in a final phase ignores need not be delivered.
            for pair in [pair for pair in queues if pair[1] == me]:
                kept = tuple(
                    one for one in queues[pair] if _reacts(self.names.member(number), self.names.vote(one))
                )
                del queues[pair]
                if kept:
                    queues[pair] = kept
        queued = tuple(sorted(queues.items()))
        world = world._replace(queues=queued, begun=begun, over=over, broken=broken)
        return world._replace(passing=frozenset(passing), taking=frozenset(taking))

    def _deaf(self, world: World, peer: int, sender: int, vote: Vote) -> bool:
        member = self.names.member(world.numbers[peer])
        return sender in member.lost or not _reacts(member, vote)

    def explore(self, *, limit: int = 10_000_000) -> int:
        """Visit and check every state that can be reached, and return their number.

        Raises:
            FoundError: a check failed; the text lists the steps to that state.
        """
        seen: dict[World, tuple[World, str] | None] = {self.first: None}
        stack = [self.first]
        while stack:
            here = stack.pop()
            following = list(self.steps(here))
            wrong = self.what_is_wrong(here)
            if wrong is None and not any(must for _, _, must in following):
                wrong = self.what_is_left(here)
            if wrong is not None:
                raise FoundError("\n".join([*_way(seen, here), wrong, *map(str, self.members(here))]))
            for text, world, _ in following:
                if world not in seen:
                    seen[world] = (here, text)
                    stack.append(world)
            if len(seen) > limit:
                raise FoundError(f"more than {limit} states")
        return len(seen)

    def what_is_wrong(self, world: World) -> str | None:
        """Return a violation of safety in a state, or ``None``."""
        members = self.members(world)
        for member in members:
            if member.hostile:
                return f"{member.me} takes {set(member.hostile)} for liars, and all are honest"
        done = [member for member in members if member.phase is RoundPhase.COMMITTED]
        for member in done:
            if member.outcome is None or member.me not in member.outcome.members:
                return f"{member.me} committed a result without itself"
            if member.me in member.seat.holders and member.complete != member.outcome:
                return f"{member.me} committed a result that it does not hold"
            if not member.outcome.members & member.seat.contributors:
                return f"{member.me} committed an average without contributors"
            if member.outcome != done[0].outcome and not self._excused(world, member, done[0]):
                return f"{member.me} and {done[0].me} committed different results"
        for member in members:
            if member.phase is not RoundPhase.FAILED or member.me in world.crashed or member.undecided:
                continue
            for other in done:
                if other.me not in other.seat.holders:
                    continue  # an auxiliary has no result: if it alone commits, the contribution is used nowhere
                assert other.outcome is not None
                counted = member.me in other.outcome.members & member.seat.holders
                keeps = member.outcome is None and not member.presumed_used
                # A member that committed and then crashed has returned its result: its program may have saved it.
                if counted and keeps and not self._adopted_without(member, other):
                    return f"{member.me} keeps a contribution that {other.me} has committed"
        return None

    def _adopted_without(self, member: MemberState, committed: MemberState) -> bool:
        """The one way in which a contribution may count twice: see docs/explanation/agreement.md."""
        return not self.strict and committed.begun.must and member.me not in committed.begun.view

    def _excused(self, world: World, member: MemberState, committed: MemberState) -> bool:
        """The two ways in which members may commit different results: see docs/explanation/agreement.md."""
        died = not world.crashed.isdisjoint({member.me, committed.me})
        return self._adopted_without(member, committed) or (not self.strict and died)

    def what_is_left(self, world: World) -> str | None:
        """Return a violation of progress, or ``None``, in a state in which no step must happen any more.

        Every live member must have ended. The exception: after a false suspicion, a part of the group that is no quorum
        waits, together with the members that follow it.
        """
        split = self.first.faults.suspicions > world.faults.suspicions
        members = self.members(world)
        for member in members:
            if member.me in world.crashed or member.phase in FINAL:
                continue
            leader = members[member.leader]
            if not (split and (member.phase is RoundPhase.ASTRAY or leader.phase is RoundPhase.ASTRAY)):
                return f"{member.me} waits for ever"
        return None


def _reacts(member: MemberState, vote: Vote) -> bool:
    """Return whether a member would react to a vote."""
    if member.phase not in FINAL or isinstance(vote, Gather | Trouble | ResultHeld):
        return True
    return member.undecided and isinstance(vote, ResultCommit | Left | Unknown)


def completed(member: MemberState, average: bytes = b"average", reducer: int = 0) -> Completed:
    """Return the event that a member has the whole result of its attempt. Equal results have equal digests.

    Args:
        average: digest of the share of ``reducer``, if that member takes part; all other shares have usual ones.
    """
    if member.me not in member.seat.holders:
        return Completed(member.begun.attempt)
    reducers = sorted(member.begun.members)
    digests = tuple(average if one == reducer else b"average" for one in reducers)
    among = ",".join(map(str, sorted(member.begun.members)))
    return Completed(
        member.begun.attempt,
        digests,
        b"%d: %d, %s, %s" % (member.me, member.begun.attempt, among.encode(), b"".join(digests)),
        tuple(map(output, reducers, digests)),
    )


def output(reducer: int, digest: bytes) -> bytes:
    """Return bytes that stand for a reducer's signature of the digest of its share."""
    return b"%d: %s" % (reducer, digest)


def how_it_ended(member: MemberState) -> ResultCommit | Left:
    """Return a final member's answer to a question about the outcome."""
    if member.committed is not None:
        return member.committed
    return Left(-1 if member.accepted is None else member.accepted.ballot, member.reason)


class FoundError(AssertionError):
    """The search has found a state that violates a guarantee."""


def _crash(world: World, me: int) -> World:
    queues = tuple((pair, queue) for pair, queue in world.queues if pair[1] != me)
    return world._replace(crashed=world.crashed | {me}, queues=queues)


def _with_queue(world: World, pair: tuple[int, int], queue: tuple[int, ...]) -> World:
    others = tuple(entry for entry in world.queues if entry[0] != pair)
    return world._replace(queues=tuple(sorted((*others, (pair, queue)))) if queue else others)


def _way(seen: dict[World, tuple[World, str] | None], here: World) -> list[str]:
    way: list[str] = []
    while (before := seen[here]) is not None:
        here, text = before
        way.append(text)
    return way[::-1]
