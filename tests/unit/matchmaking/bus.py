"""Peers that run the real rules over streams made of lists, so a test chooses every event."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from p2pavg.group.candidate import Candidate, ready_key, sign_candidate
from p2pavg.group.participation import Participation, observers
from p2pavg.group.reach import Reach
from p2pavg.group.roster import Roster, ShareCutter
from p2pavg.matchmaking.actions import (
    Actions,
    Close,
    Expect,
    Formed,
    GaveUp,
    Open,
    Renew,
    Report,
    Send,
    Settings,
)
from p2pavg.matchmaking.attempt_state import AttemptPhase, Memory
from p2pavg.matchmaking.messages import Accept, Joined, JoinRequest, Message, Nudge, Refuse, decode, encode
from p2pavg.matchmaking.rules import Matchmaking
from p2pavg_dht import Ed25519Signer

KEY = ready_key("run", b"\1" * 32)
EPOCH = 1_800_000_000.0
MATCH_TIMEOUT = 10.0

SIGNERS = [Ed25519Signer(bytes([index + 1]) * 32) for index in range(40)]


def settings(
    target: int = 4,
    minimum: int = 2,
    rule: Participation | None = None,
    contributors: int = 0,
    expected: Collection[str] = (),
) -> Settings:
    return Settings(
        target=target,
        contributors=contributors,
        expected=frozenset(expected),
        minimum=minimum,
        match_timeout=MATCH_TIMEOUT,
        cutter=ShareCutter(1000, 64),
        choose_observers=partial(observers, rule),
    )


def candidate(
    index: int,
    deadline: float,
    *,
    key: bytes = KEY,
    auxiliary: bool = False,
    codec: str = "fp32",
    weight: float = 1.0,
    state: bytes = b"",
    tags: tuple[str, ...] = (),
    addresses: tuple[str, ...] | None = None,
    reach: Reach = Reach.DIALABLE,
) -> Candidate:
    return sign_candidate(
        SIGNERS[index],
        key=key,
        deadline=deadline,
        expiration_time=deadline + 3600.0,
        weight=0.0 if auxiliary else weight,
        bandwidth=100.0,
        codec=codec,
        auxiliary=auxiliary,
        addresses=(f"/ip4/10.0.0.{index}/tcp/1",) if addresses is None else addresses,
        state=state,
        tags=tags,
        reach=reach,
    )


def row(count: int, seconds: float = 1.0, **about: Any) -> list[Candidate]:
    """Return candidates whose deadlines are one second after the other, the first after some seconds."""
    return [candidate(index, EPOCH + seconds + index, **about) for index in range(count)]


def roster_of(*members: Candidate, proposal: int = 1, observers: Collection[str] = ()) -> Roster:
    """Return the roster that the first of these members may propose."""
    shares = settings().cutter.cut(members)
    return Roster(members=members, shares=shares, proposal=proposal, observers=frozenset(observers))


def following(
    leader: Candidate,
    me: Candidate,
    *known: Candidate,
    target: int = 4,
    rule: Participation | None = None,
    memory: Memory | None = None,
) -> Matchmaking:
    """Return the rules of a peer that follows a leader, and knows other candidates."""
    rules = Matchmaking(me, settings(target, rule=rule), EPOCH, memory)
    rules.discovered([leader, *known], EPOCH)
    assert rules.state.leader == leader
    rules.told_by_leader(leader.peer_id, Joined(leader), EPOCH)
    assert rules.state.phase is AttemptPhase.FOLLOWING
    return rules


def sent(actions: Actions) -> list[Message]:
    """Return the messages that are sent to peers with an open stream."""
    return [action.message for action in actions if isinstance(action, Send)]


def opened(actions: Actions) -> list[tuple[type[Message], Candidate]]:
    """Return the kind of each message for which a stream is opened, and the candidate that gets it."""
    return [(type(action.message), action.candidate) for action in actions if isinstance(action, Open)]


@dataclass
class Attempt:
    """One peer's rules, and the reports to its caller."""

    me: Candidate
    rules: Matchmaking
    formed: Roster | None = None
    gave_up: str | None = None
    reports: list[tuple[float, Report]] = field(default_factory=list)
    expected: bytes | None = None
    again: Callable[[], object] | None = None
    """Announces the same peer again, as its matchmaker does when an attempt is renewed."""

    @property
    def active(self) -> bool:
        return self.formed is None and self.gave_up is None


@dataclass
class Link:
    """A join stream. The asker's messages go up, and the asked peer's messages go down."""

    asker: Attempt
    asked: Attempt
    up: deque[bytes] = field(default_factory=deque)
    down: deque[bytes] = field(default_factory=deque)
    asker_closed: bool = False
    asked_closed: bool = False


class Bus:
    """The network. A message is encoded when sent and decoded when delivered."""

    def __init__(self, now: float = EPOCH) -> None:
        self.now = now
        self.attempts: dict[str, Attempt] = {}
        self.published: dict[str, Candidate] = {}
        self.links: list[Link] = []
        self.nudges: deque[tuple[Attempt, Candidate, Nudge]] = deque()
        self.history: list[Attempt] = []
        self.memories: dict[str, Memory] = {}

    def announce(
        self,
        index: int,
        *,
        target: int = 4,
        minimum: int = 2,
        contributors: int = 0,
        expected: Collection[str] = (),
        rule: Participation | None = None,
        auxiliary: bool = False,
        **about: Any,
    ) -> Attempt:
        """Let a peer look for a group; ``about`` it is what :func:`candidate` takes."""
        deadline = self.now + (3000.0 if auxiliary else MATCH_TIMEOUT)
        me = candidate(index, deadline, auxiliary=auxiliary, **about)
        how = settings(target, minimum, rule, contributors, expected)
        if auxiliary:
            how = replace(how, choose_observers=None)
        memory = self.memories.setdefault(me.peer_id, Memory())
        attempt = Attempt(me, Matchmaking(me, how, self.now, memory))
        options: dict[str, Any] = {
            "target": target,
            "minimum": minimum,
            "contributors": contributors,
            "expected": expected,
        }
        attempt.again = partial(self.announce, index, auxiliary=auxiliary, rule=rule, **options, **about)
        self.attempts[me.peer_id] = attempt
        self.history.append(attempt)
        self.published[me.peer_id] = me
        return attempt

    def discover(self, attempt: Attempt) -> None:
        self._do(attempt, attempt.rules.discovered(list(self.published.values()), self.now))

    def crash(self, attempt: Attempt) -> None:
        """Crash a peer, and break all its streams."""
        del self.attempts[attempt.me.peer_id]
        for link in [link for link in self.links if attempt in (link.asker, link.asked)]:
            self.break_link(link)

    def break_link(self, link: Link) -> None:
        if link not in self.links:
            return
        self.links.remove(link)
        if not link.asker_closed and self._alive(link.asker):
            self._do(
                link.asker, link.asker.rules.lost_leader(link.asked.me.peer_id, "the stream broke", self.now)
            )
        if not link.asked_closed and self._alive(link.asked):
            self._do(link.asked, link.asked.rules.lost(link.asker.me.peer_id, "the stream broke", self.now))

    def deliverable(self) -> list[tuple[Link, bool]]:
        """Return (link, upward) for each direction that has messages in flight."""
        found = []
        for link in self.links:
            if link.up or link.asker_closed:
                found.append((link, True))
            if link.down or link.asked_closed:
                found.append((link, False))
        return found

    def deliver(self, link: Link, upward: bool) -> None:
        """Deliver the next message of one direction, or the end of the stream after the last one."""
        queue = link.up if upward else link.down
        if not queue:
            self.break_link(link)
            return
        message = decode(queue.popleft())
        receiver, sender = (link.asked, link.asker) if upward else (link.asker, link.asked)
        closed = link.asked_closed if upward else link.asker_closed
        if closed or not self._alive(receiver):
            return
        if isinstance(message, JoinRequest):
            self._asked(link, message)
        elif upward:
            self._do(receiver, receiver.rules.told(sender.me.peer_id, message, self.now))
        else:
            self._do(receiver, receiver.rules.told_by_leader(sender.me.peer_id, message, self.now))

    def _asked(self, link: Link, message: JoinRequest) -> None:
        for old in [old for old in self.links if old is not link and old.asked is link.asked]:
            if old.asker.me.peer_id == message.me.peer_id and not old.asked_closed:
                old.asked_closed = True
                self._do(link.asked, link.asked.rules.lost(message.me.peer_id, "it asked again", self.now))
        self._do(link.asked, link.asked.rules.asked(message.me, self.now), link)

    def deliver_nudge(self) -> None:
        sender, target, nudge = self.nudges.popleft()
        receiver = self.attempts.get(target.peer_id)
        if receiver is not None:
            self._do(receiver, receiver.rules.nudged(nudge.me, self.now))
        elif self._alive(sender):
            self._do(sender, sender.rules.not_nudged(target.peer_id, "nobody answers", self.now))

    def advance(self, seconds: float) -> None:
        """Let time pass, and call every timer at the moment at which it is due."""
        end = self.now + seconds
        while True:
            due = min(
                (attempt for attempt in self.attempts.values() if attempt.active),
                key=lambda attempt: attempt.rules.wake_at(),
                default=None,
            )
            if due is None or due.rules.wake_at() > end:
                break
            self.now = max(self.now, due.rules.wake_at())
            before = due.rules.wake_at()
            self._do(due, due.rules.tick(self.now))
            assert not due.active or due.rules.wake_at() > before, "a timer that rings for ever"
        self.now = end

    def run(self, seconds: float) -> None:
        """Let time pass, and deliver every message at once."""
        end = self.now + seconds
        while self.now < end:
            self.settle()
            self.advance(min(0.25, end - self.now))
        self.settle()

    def settle(self) -> None:
        """Deliver all messages in flight, and all that result from them."""
        for _ in range(10_000):
            if self.nudges:
                self.deliver_nudge()
            elif found := self.deliverable():
                self.deliver(*found[0])
            else:
                return
        raise AssertionError("the peers never stop talking")

    def _alive(self, attempt: Attempt) -> bool:
        return self.attempts.get(attempt.me.peer_id) is attempt

    def _do(self, attempt: Attempt, actions: Actions, inbound: Link | None = None) -> None:
        for action in actions:
            match action:
                case Open(target, JoinRequest() as ask):
                    self._open(attempt, target, ask)
                case Open(target, Nudge() as nudge):
                    self.nudges.append((attempt, target, nudge))
                case Send(peer_id, message):
                    self._send(attempt, peer_id, message, inbound)
                case Close(peer_id, _, upward):
                    self._close(attempt, peer_id, upward, inbound)
                case Report():
                    attempt.reports.append((self.now, action))
                case GaveUp(reason):
                    assert attempt.active, "gave up after the end"
                    attempt.gave_up = reason
                case Renew(reason):
                    assert attempt.active, "renewed after the end"
                    attempt.gave_up = reason
                    assert attempt.again is not None
                    attempt.again()
                case Formed(roster):
                    assert attempt.active, "in two groups"
                    attempt.formed = roster
                case Expect(group_id):
                    attempt.expected = group_id

    def _open(self, attempt: Attempt, target: Candidate, ask: JoinRequest) -> None:
        asked = self.attempts.get(target.peer_id)
        if asked is None:
            self._do(
                attempt,
                attempt.rules.lost_leader(target.peer_id, "nobody answers", self.now, reachable=False),
            )
            return
        link = Link(attempt, asked)
        link.up.append(encode(ask))
        self.links.append(link)

    def _send(self, attempt: Attempt, peer_id: str, message: Message, inbound: Link | None) -> None:
        upward = isinstance(message, Accept | Refuse)
        for link in self._links_of(attempt, peer_id, upward, inbound):
            (link.up if upward else link.down).append(encode(message))

    def _close(self, attempt: Attempt, peer_id: str, upward: bool, inbound: Link | None) -> None:
        for link in self._links_of(attempt, peer_id, upward, inbound):
            if upward:
                link.asker_closed = True
            else:
                link.asked_closed = True

    def _links_of(self, attempt: Attempt, peer_id: str, upward: bool, inbound: Link | None) -> list[Link]:
        """Return the open streams with a peer in one direction, or ``inbound`` if it is the peer's."""
        if upward:
            mine = [link for link in self.links if link.asker is attempt and not link.asker_closed]
            return [link for link in mine if link.asked.me.peer_id == peer_id]
        if inbound is not None and inbound.asker.me.peer_id == peer_id:
            return [] if inbound.asked_closed else [inbound]
        mine = [link for link in self.links if link.asked is attempt and not link.asked_closed]
        return [link for link in mine if link.asker.me.peer_id == peer_id]
