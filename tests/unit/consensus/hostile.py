"""Exhaustive search with one hostile member: it may send any vote that it can sign, to any member, at any time.

The hostile member has no state of its own. It knows every signature that it was sent, and cannot forge others. It
decides which members get its averages and which bits these have, so it decides which members complete an attempt.

What it may send is unbounded, so the search is bounded in two ways that lose no attack of the same length:

* Of the votes that have the same effect on their receiver, one is sent; those without any effect are not.
* A vote names what the group can know: attempts that an honest member has begun, the two results that an attempt can
  have, and the next ballot that its sender leads.

``lies`` is the number of votes and broken connections of the hostile member. All other steps are unlimited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain, combinations

from p2pavg.consensus.choice import ballot_leader, next_ballot
from p2pavg.consensus.member import FINAL, MemberState, RoundPhase
from p2pavg.consensus.statements import result_digest
from p2pavg.consensus.votes import (
    Accepted,
    Action,
    Begin,
    Complete,
    Drop,
    Event,
    Gather,
    Left,
    Lost,
    Members,
    Promise,
    ResultCommit,
    ResultHeld,
    SignedOutput,
    StaleBallot,
    Tell,
    Trouble,
    Unknown,
    Vote,
    VoteHeard,
)
from tests.unit.consensus.world import Faults, FoundError, Group, Signed, World, _way, completed, output

AVERAGES = (b"average", b"another")


class HostileGroup(Group):
    """A group of which one member is hostile.

    Args:
        liar: position of the hostile member.
        lies: how many of its votes and broken connections there are at most.
        may_lead: false if it sends no votes that only a leader sends.
        only: the votes that it sends; it then breaks no connection, and makes no member blame another one.
        averages: number of different results that it makes members complete.
    """

    def __init__(
        self,
        size: int,
        faults: Faults,
        *,
        liar: int,
        lies: int,
        may_lead: bool = True,
        only: Callable[[Vote], bool] | None = None,
        averages: int = len(AVERAGES),
    ) -> None:
        super().__init__(size, faults)
        self.only = only
        self.averages = AVERAGES[:averages]
        self.liar = liar
        self.lies = lies
        self.may_lead = may_lead
        self.honest = frozenset(range(size)) - {liar}
        self._options: dict[tuple[int, frozenset[Signed], frozenset[tuple[int, Members]]], list[Vote]] = {}

    # ------------------------------------------------------------------ steps

    def moves(self, world: World) -> Iterator[tuple[str, World, int]]:
        """Yield each possible step, the state after it, and the number of lies that it takes."""
        for text, after, _ in self.steps(world):
            if not text.startswith(f"{self.liar} "):
                yield text, after, 0
        attempts = frozenset((m.begun.attempt, m.begun.members) for m in self._honest(world))
        for member in self._honest(world):
            if member.me in world.crashed:
                continue
            for average in self.averages:
                if self._may_complete(world, member, average):
                    event = completed(member, average, self.liar)
                    yield (
                        f"{member.me} completes {member.begun.attempt}: {average!r}",
                        self._happen(world, member.me, event),
                        0,
                    )
            for vote in self._votes(world, member, attempts):
                text = f"{self.liar} tells {member.me}: {vote}"
                yield text, self._happen(world, member.me, VoteHeard(self.liar, vote)), 1
            if self.only is not None:
                continue
            for other in sorted(self.honest - member.apart - {member.me, member.leader}):
                if member.phase not in FINAL:
                    # It can make one member wait in vain for another one's parts.
                    blamed = self._happen(world, member.me, Lost(other, reachable=True))
                    yield f"{self.liar} makes {member.me} blame {other}", blamed, 1
            if member.phase not in FINAL and self.liar not in member.lost:
                yield (f"{self.liar} leaves {member.me}", self._happen(world, member.me, Lost(self.liar)), 1)

    def _honest(self, world: World) -> list[MemberState]:
        return [self.names.member(world.numbers[me]) for me in sorted(self.honest)]

    def _steps_of(
        self, world: World, members: list[MemberState], member: MemberState
    ) -> Iterator[tuple[str, World, bool]]:
        if member.me != self.liar:
            for text, after, must in super()._steps_of(world, members, member):
                if "completes" not in text and f"notices {self.liar}" not in text:
                    yield text, after, must

    def _ask(
        self, world: World, members: list[MemberState], member: MemberState
    ) -> Iterator[tuple[str, World, bool]]:
        if member.me != self.liar:
            others = [other for other in members if other.me != self.liar]
            yield from super()._ask(world, others, member)

    def _may_complete(self, world: World, member: MemberState, average: bytes) -> bool:
        """Return whether a member may get this result: from the others, or from one that passes a share on."""
        attempt = member.begun.attempt
        has = member.complete is not None and member.complete.attempt == attempt
        if member.phase in FINAL or has or (attempt, member.me) in world.over:
            return False
        if self.liar not in member.begun.members and average != AVERAGES[0]:
            return False
        return all((attempt, other) in world.begun for other in member.begun.members & self.honest)

    def _happen(self, world: World, me: int, event: Event) -> World:
        """Let an event happen. What is told to the hostile member is known to it at once."""
        if me == self.liar:
            return world
        _, actions = self.names.advance(world.numbers[me], event)
        liar_hears = [a.vote for a in actions if isinstance(a, Tell) and a.peer == self.liar]
        if isinstance(event, VoteHeard) and event.sender != self.liar:
            for action in actions:
                if isinstance(action, Drop) and action.reason.startswith("it sent an impossible vote"):
                    raise FoundError(f"{me} excludes {action.peer}, which is honest, for {event.vote}")
        world = super()._happen(world, me, event)
        queues = tuple(entry for entry in world.queues if entry[0][1] != self.liar)
        member = self.names.member(world.numbers[me])
        heard = chain.from_iterable(_signatures(member, vote) for vote in liar_hears)
        return world._replace(queues=queues, signatures=world.signatures | frozenset(heard))

    # ------------------------------------------------------------------ the hostile member's votes

    def _votes(
        self, world: World, member: MemberState, attempts: frozenset[tuple[int, Members]]
    ) -> Iterator[Vote]:
        """Yield the votes to which a member reacts."""
        number = world.numbers[member.me]
        key = (number, world.signatures, attempts)
        if key not in self._options:
            options: dict[tuple[int, tuple[Action, ...]], Vote] = {}
            for vote in self._all_votes(world, member, attempts):
                if self.only is not None and not self.only(vote):
                    continue
                after, actions = self.names.advance(number, VoteHeard(self.liar, vote))
                if after != number or actions:
                    options.setdefault((after, tuple(actions)), vote)
            self._options[key] = list(options.values())
        yield from self._options[key]

    def _all_votes(
        self, world: World, member: MemberState, attempts: frozenset[tuple[int, Members]]
    ) -> Iterator[Vote]:
        size, liar, promised = member.size, self.liar, member.promised
        all_members = frozenset(range(size))
        yield Unknown()
        for accepted in {-1, 0, member.begun.ballot}:
            yield Left(accepted, "")
        yield from self._commits(world, attempts)
        if member.phase in FINAL:
            return
        for peer in all_members - {liar}:
            for hostile in (False, True):
                yield Trouble(peer, hostile, "")
        for average in AVERAGES:  # it has signed both; of any other reducer it has one signature
            yield SignedOutput(member.begun.attempt, liar, average, output(liar, average))
        for average in AVERAGES:
            one = completed(replace(member, seat=replace(member.seat, me=liar)), average, liar)
            yield ResultHeld(member.begun.ballot, one.digests, one.signature)
            for share in range(len(one.digests)):  # a digest that differs in one share accuses its reducer
                false = (*one.digests[:share], b"false", *one.digests[share + 1 :])
                yield ResultHeld(member.begun.ballot, false, one.signature)
        yield StaleBallot(promised)
        if self.may_lead:
            for attempt, _ in sorted(attempts, key=repr):
                yield Gather(next_ballot(liar, size, promised), attempt)
            if ballot_leader(promised, size) == liar and promised > member.begun.ballot:
                yield from self._begins(member, attempts)
        if member.phase is RoundPhase.GATHERING:
            yield from self._promises(member, attempts)
        for ballot in (promised, *(next_ballot(leader, size, promised) for leader in range(size))):
            for attempt, _ in sorted(attempts, key=repr):
                yield Promise(ballot, attempt, None, None, frozenset(), frozenset())

    def _commits(self, world: World, attempts: Iterable[tuple[int, Members]]) -> Iterator[Vote]:
        for attempt, members in sorted(attempts, key=repr):
            for average in AVERAGES:
                digest = _digest(average, members, self.liar)
                signed = [
                    (one.signer, one.signature)
                    for one in sorted(world.signatures)
                    if (one.attempt, one.members, one.digest) == (attempt, members, digest)
                ]
                if self.liar in members:
                    signed.append((self.liar, b"%d: its own" % self.liar))
                for chosen in _subsets(sorted(signed)):
                    yield ResultCommit(attempt, members, digest if chosen else b"", chosen)

    def _begins(self, member: MemberState, attempts: Iterable[tuple[int, Members]]) -> Iterator[Vote]:
        ballot, size = member.promised, member.size
        for view in map(frozenset, _subsets(range(size))):
            if member.me not in view:
                continue
            yield Begin(ballot, ballot, view, view, min(view), frozenset())
            for attempt, members in attempts:
                for source in view:
                    for lacking in map(frozenset, _subsets(sorted(view & members - {source}))):
                        for must in (False, True):
                            yield Begin(ballot, attempt, members, view, source, lacking, must)

    def _promises(self, member: MemberState, attempts: Iterable[tuple[int, Members]]) -> Iterator[Vote]:
        size, ballot = member.size, member.promised
        all_members = frozenset(range(size))
        for attempt, members in attempts:
            older = [
                None,
                *(
                    Accepted(b, attempt, members, v, m)
                    for b in {attempt, member.begun.ballot}
                    if b < ballot
                    for v in {members, all_members, member.begun.view}
                    for m in (False, True)
                ),
            ]
            for accepted in older:
                for complete in (None, Complete(attempt, members)):
                    for other in sorted(all_members - {self.liar, member.me}):
                        for apart, hostile in (
                            (frozenset(), frozenset()),
                            (frozenset({other}), frozenset()),
                            (frozenset({other}), frozenset({other})),
                        ):
                            yield Promise(ballot, attempt, accepted, complete, apart, hostile)
                    if complete is not None:  # a digest that no other member holds
                        yield Promise(ballot, attempt, accepted, complete, frozenset(), frozenset(), b"false")

    # ------------------------------------------------------------------ checks

    def search(self, *, limit: int = 10_000_000) -> int:
        """Visit and check every state that can be reached, those with few steps first, and return their number.

        Raises:
            FoundError: a check failed; the text lists the steps to that state.
        """
        seen: dict[World, tuple[World, str] | None] = {self.first: None}
        lies = {self.first: 0}
        waiting = deque([self.first])
        while waiting:
            here = waiting.popleft()
            wrong = self.what_is_wrong(here)
            if wrong is not None:
                raise FoundError("\n".join([*_way(seen, here), wrong, *map(str, self._honest(here))]))
            try:
                following = [step for step in self.moves(here) if lies[here] + step[2] <= self.lies]
            except FoundError as error:
                raise FoundError("\n".join([*_way(seen, here), str(error)])) from None
            for text, world, count in following:
                spent = lies[here] + count
                if world not in seen:
                    seen[world] = (here, text)
                elif spent >= lies[world]:
                    continue
                lies[world] = spent
                waiting.append(world)
            if len(seen) > limit:
                raise FoundError(f"more than {limit} states")
        return len(seen)

    def what_is_wrong(self, world: World) -> str | None:
        """Return a violation of safety among the honest members, or ``None``."""
        members = self._honest(world)
        done = [member for member in members if member.phase is RoundPhase.COMMITTED]
        for member in done:
            assert member.committed is not None
            if not _holds(member, member.committed):
                return f"{member.me} committed a result that it does not hold"
            if _result(member.committed) != _result(done[0].committed):
                return f"{member.me} and {done[0].me} committed different results"
        for member in members:
            if member.phase is not RoundPhase.FAILED or member.me in world.crashed or member.undecided:
                continue
            for other in done:
                assert other.outcome is not None
                if member.me in other.outcome.members and member.outcome is None and not member.presumed_used:
                    return f"{member.me} keeps a contribution that {other.me} has committed"
            lost = member.committed is not None and member.me in member.committed.members
            if lost and not any(_holds(other, member.committed) for other in members):
                return f"the contribution of {member.me} is used up, and no honest member holds the result"
        return None


def _holds(member: MemberState, commit: ResultCommit | None) -> bool:
    return (
        commit is not None
        and member.complete == Complete(commit.attempt, commit.members)
        and member.own.digest == commit.digest
    )


def _result(commit: ResultCommit | None) -> tuple[int, Members, bytes] | None:
    return None if commit is None else (commit.attempt, commit.members, commit.digest)


@lru_cache
def _digest(average: bytes, members: Members, liar: int) -> bytes:
    return result_digest(average if one == liar else b"average" for one in sorted(members))


def _signatures(member: MemberState, vote: Vote) -> Iterator[Signed]:
    """Yield the signatures that a vote of a member shows."""
    if isinstance(vote, ResultHeld) and vote.digests:
        digest = result_digest(vote.digests)
        yield Signed(member.me, member.begun.attempt, member.begun.members, digest, vote.signature)
    if isinstance(vote, ResultCommit):
        for signer, signature in vote.signatures:
            yield Signed(signer, vote.attempt, vote.members, vote.digest, signature)


def _subsets(items: Iterable) -> Iterator[tuple]:  # type: ignore[type-arg]
    known = list(items)
    return chain.from_iterable(combinations(known, count) for count in range(len(known) + 1))
