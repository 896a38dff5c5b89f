"""One attempt's I/O: records, join streams and timers that carry out :mod:`p2pavg.matchmaking.rules`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import trio

from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import GLANCE_SECONDS, MAX_BACKOFF_SECONDS, QUICK_REPLY_SECONDS, ROUND_TRIPS_SECONDS
from p2pavg.group.candidate import Candidate, read_candidate
from p2pavg.group.reach import Reach
from p2pavg.group.roster import Roster
from p2pavg.matchmaking.actions import Actions, Close, Expect, Formed, GaveUp, Open, Renew, Report, Send
from p2pavg.matchmaking.link import JoinLink
from p2pavg.matchmaking.messages import OF_FOLLOWERS, PROTOCOL, JoinRequest, Message, Nudge, encode
from p2pavg.matchmaking.rules import Matchmaking
from p2pavg.matchmaking.search import PlaceSearch
from p2pavg.matchmaking.timing import (
    ATTEMPT_SECONDS,
    HEARTBEAT_SECONDS,
    POLL_SECONDS,
    PROPOSAL_ANSWER_SECONDS,
    RECORD_TTL_SECONDS,
)
from p2pavg.net.addresses import is_circuit
from p2pavg.net.blame import guarded
from p2pavg.net.dialling import MAX_ADDRESSES_DIALLED
from p2pavg.net.transport import Stream, Transport, send_message
from p2pavg.runs.context import PeerContext
from p2pavg.runs.records.run_records import RunRecords
from p2pavg_dht import Record

logger = logging.getLogger(__name__)

MAX_RELAY_ADDRESSES = 3


class SearchListener(Protocol):
    """The round for which a group is looked for."""

    def searched(self, report: Report) -> None:
        """Handle the end of a match timeout that has passed without a group."""
        ...

    def expects(self, group_id: bytes | None) -> None:
        """Let streams of this group in from now on, and of no other; ``None``: of no group."""
        ...


class AttemptRunner:
    """One :class:`Matchmaking` and its join streams.

    Args:
        may_move: whether the attempt ends when this peer is reached in another way than it has signed.
    """

    def __init__(
        self,
        context: PeerContext,
        records: RunRecords,
        rules: Matchmaking,
        listener: SearchListener,
        search: PlaceSearch,
        *,
        may_move: bool,
    ) -> None:
        self._context = context
        self._records = records
        self._me = rules.state.me
        self.rules = rules
        self._listener = listener
        self._search = search
        self._may_move = may_move
        self._started = (rules.state.begun, trio.current_time())
        # Join streams by peer: the one on which this peer asked, and those on which it was asked.
        self._upward: dict[str, JoinLink] = {}
        self._downward: dict[str, JoinLink] = {}
        self._opening: dict[str, trio.CancelScope] = {}
        self._watched: set[bytes] = set()
        self._changed = trio.Event()
        self._done = trio.Event()
        self._outcome: Roster | GaveUp | Renew | None = None
        self._nursery: trio.Nursery | None = None

    @property
    def partners(self) -> list[Candidate]:
        """The leader that this peer has asked or follows, and its own followers."""
        leader = self.rules.state.leader
        return [*self.rules.group.followers.values(), *([] if leader is None else [leader])]

    @property
    def keys_said(self) -> list[bytes]:
        """The keys under which this peer has announced itself."""
        return self._search.said

    def blame(self, peer_id: str, error: Exception) -> None:
        """Ban a peer whose message or record raised an exception: it would send the same again."""
        reason = f"what it said raised {type(error).__name__} here"
        self.rules.state.memory.ban(peer_id, reason, trio.current_time() + MAX_BACKOFF_SECONDS)
        self.expel(peer_id, reason)

    def expel(self, peer_id: str, reason: str) -> None:
        """Drop a peer. If its message raised an exception, the rules may have handled half of the message."""
        left: Actions = []
        with guarded(peer_id, self._abandon, what="the loss"):
            left = self.rules.expel(peer_id, reason, self._now())
        self._do(left)

    def _abandon(self, peer_id: str, error: Exception) -> None:
        """End this attempt: the rules raise even without the peer. The next attempt starts afresh, without it."""
        self._outcome = GaveUp(f"what {peer_id} said raised {type(error).__name__} here")
        self._done.set()

    def _now(self) -> float:
        """Return the wall-clock time in seconds, which does not jump or run backwards within the attempt."""
        wall, monotonic = self._started
        return wall + trio.current_time() - monotonic

    async def run(self) -> Roster | GaveUp | Renew:
        """Run until a group is committed, the attempt gives up, or a new attempt is to begin."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._announce)
                nursery.start_soon(self._keep_time)
                try:
                    with (
                        self._context.transport.watching_connections(self._connected),
                        trio.move_on_after(ATTEMPT_SECONDS),
                    ):
                        await self._done.wait()
                finally:
                    self._nursery = None  # streams outlive the attempt, but their messages start no new tasks
                    nursery.cancel_scope.cancel()
        finally:
            # This runs after a cancellation too, so the peers that wait for this one need not find out by its silence.
            self._do(self.rules.stop("the peer has stopped looking for a group"))
            # Streams of an accepted group may already wait for its commit, which does not come any more.
            if not isinstance(self._outcome, Roster):
                self._listener.expects(None)
        return self._outcome or GaveUp(f"no group within {ATTEMPT_SECONDS:.0f} s")

    def _connected(self, peer_id: str) -> None:
        self._do(self.rules.connected(peer_id, self._now()))

    def nudged(self, candidate: Candidate) -> None:
        """Handle the nudge of an earlier candidate."""
        actions: Actions = []
        with guarded(candidate.peer_id, self.blame, what="a nudge"):
            actions = self.rules.nudged(candidate, self._now())
        self._do(actions)

    def exchange_begun(self, group_id: bytes, peer_id: str) -> None:
        """Note that a member has begun the exchange: it has heard of a commit that this peer may not know yet."""
        self._do(self.rules.exchange_begun(group_id, peer_id))

    async def serve(self, stream: Stream, candidate: Candidate) -> None:
        """Serve the join stream of a peer that asks to join."""
        old = self._downward.pop(candidate.peer_id, None)
        # The peer has given its first stream up. The rules hear of that loss before they hear that it asks again.
        if old is not None:
            old.close()
            self._do(self.rules.lost(candidate.peer_id, "it asked again", self._now()))
        link = JoinLink(stream, self, self._context.messages, upward=False)
        self._downward[candidate.peer_id] = link
        actions: Actions = []
        with guarded(candidate.peer_id, self.blame):
            actions = self.rules.asked(candidate, self._now())
        self._do(actions)
        await link.run()

    def heard(self, link: JoinLink, message: Message) -> None:
        """Pass a message to the rules."""
        # A link that was closed or replaced may still deliver a message, which belongs to a conversation that is over.
        if (self._upward if link.upward else self._downward).get(link.peer_id) is not link:
            return
        tell = self.rules.told_by_leader if link.upward else self.rules.told
        actions: Actions = []
        with guarded(link.peer_id, self.blame):
            actions = tell(link.peer_id, message, self._now())
        self._do(actions)

    def broke(self, link: JoinLink, reason: str) -> None:
        """Pass the loss of a peer to the rules, unless a newer link has taken this one's place."""
        links = self._upward if link.upward else self._downward
        if links.get(link.peer_id) is link:
            del links[link.peer_id]
            lose = self.rules.lost_leader if link.upward else self.rules.lost
            self._do(lose(link.peer_id, reason, self._now()))

    async def _announce(self) -> None:
        """Publish this peer's record, which returns the other peers' records; then poll at growing intervals.

        The record goes to one place after the other, until there is a group (:mod:`p2pavg.group.places.levels`). Each
        poll looks at one of them. Records that others store here are read at once: a lookup among hostile keepers can
        take seconds. A peer that hopes to be in its last group again only looks at these at first.
        """
        records, search, watched = self._records, self._search, deque[bytes]()
        try:
            # Hoping for its last group, this peer only listens at first: its leader's record comes here by itself.
            if self.rules.state.strangers_from > self._now():
                self._watch(first := search.key_on(search.ladder.start))
                records.keep_places(first)
                self._read(records.held(first))
                while (left := self.rules.state.strangers_from - self._now()) > 0:
                    # A peer that was not in the last group ends this wait at once.
                    with trio.move_on_after(left):
                        await self._changed.wait()
            pause = 0.0
            level: int | None = search.ladder.start
            while True:
                if level is not None:
                    # The answer to a publication names the other peers of the place.
                    # So polls begin again with a short pause.
                    watched.appendleft(await self._publish_on(level))
                    pause = GLANCE_SECONDS
                    stepped = trio.current_time()
                    poll_at = stepped + pause
                await trio.sleep_until(min(poll_at, stepped + self._patience()))
                if trio.current_time() >= poll_at:
                    self._take_found(watched[0], await records.find(watched[0]))
                    # The next poll looks at another one of the places in which this peer has announced itself.
                    watched.rotate(-1)
                    if self._may_move and self._has_moved():
                        self._do(self.rules.moved(self._now()))
                    pause = min(2 * pause, POLL_SECONDS)
                    poll_at = trio.current_time() + pause
                # The patience may have changed during the poll, with the peers that it has found.
                due = trio.current_time() >= stepped + self._patience()
                level = search.ladder.take(full=search.full) if due else None
        finally:
            for key in self._watched:
                records.unwatch(key)

    def _has_moved(self) -> bool:
        """Return whether others reach this peer in another way than it has signed.

        A part of its addresses may change: others dial those that are left. A peer without any has nothing new to sign.
        """
        reach, addresses = announced(self._context.transport)
        # The reach is part of the order of candidates, so it cannot change within an attempt.
        return bool(addresses) and (
            reach is not self._me.reach or not set(addresses) & set(self._me.addresses)
        )

    def _watch(self, key: bytes) -> None:
        self._watched.add(key)
        self._records.watch(key, lambda: self._read(self._records.held(key)))

    async def _publish_on(self, level: int) -> bytes:
        """Publish this peer's record in its place on a level; return the key."""
        records, key = self._records, self._search.key_on(level)
        # Noted before the call: keepers may have the record even if the call is cancelled,
        # and then it is to be withdrawn.
        self._search.said.append(key)
        # Watched before the call, so that records that arrive meanwhile are read at once.
        self._watch(key)
        published = await records.publish(key, self._me.record.value, ttl=RECORD_TTL_SECONDS)
        self._search.full = len(published.refused) >= published.stored
        self._take_found(key, published.records)
        return key

    def _take_found(self, key: bytes, records: Sequence[Record]) -> None:
        # The next attempt begins on a level that follows from what was seen in the first place alone.
        if key == self._search.said[0]:
            others = sum(record.publisher != self._me.peer_id for record in records)
            self._search.seen = max(self._search.seen, others)
        self._read(records)

    def _patience(self) -> float:
        """Return the seconds from one place to the next, as far as this peer knows now."""
        state = self.rules.state
        enough = len(state.peers.there(state.me, self._now())) + 1 >= state.settings.target
        return self._search.ladder.patience(enough=enough, follows=state.follows, full=self._search.full)

    def _read(self, records: Iterable[Record]) -> None:
        for record in records:
            if record.withdrawn:
                continue
            try:
                with guarded(record.publisher, self.blame, what="a record", expected=(RemoteProtocolError,)):
                    self.rules.state.learn_record(read_candidate(record), self._now())
            except RemoteProtocolError as error:
                logger.info("%s published an invalid candidate: %s", record.publisher, error)
        # The rules act once all records are read: the first one read need not be the first one to ask.
        self._do(self.rules.discovered((), self._now()))

    async def _keep_time(self) -> None:
        while True:
            self._changed = trio.Event()
            now = self._now()
            # Never asleep for longer than a leader is silent between two words: so a process that stood still for long
            # enough to miss some finds out by its own timer, whenever its rules are due.
            wait = min(max(self.rules.wake_at() - now, 0.0), HEARTBEAT_SECONDS)
            with trio.move_on_after(wait) as scope:
                await self._changed.wait()
            # Otherwise an event has come, which may have moved the time for which this task waits.
            if not scope.cancelled_caught:
                continue
            # This process stood still, and what others said meanwhile has not been read. Without it, they would be
            # taken for silent.
            if self._now() > now + wait + ROUND_TRIPS_SECONDS:
                await trio.sleep(ROUND_TRIPS_SECONDS)
            if self._now() < self.rules.wake_at():
                continue
            answers = self._context.transport.answers
            # What was said last was the proposal, or its repetition.
            seconds = PROPOSAL_ANSWER_SECONDS + ROUND_TRIPS_SECONDS
            answering = [peer_id for peer_id in self.rules.group.silent if answers(peer_id, seconds)]
            self._do(self.rules.tick(self._now(), answering))

    def _do(self, actions: Actions) -> None:
        self._changed.set()
        for number, action in enumerate(actions, start=1):
            logger.debug("%s: %s", self._me.peer_id, action)
            match action:
                case Send(peer_id, message):
                    self._send(peer_id, message)
                case Close(peer_id, _, upward):
                    self._close(peer_id, upward=upward)
                case Open(candidate, JoinRequest() as ask) if self._nursery is not None:
                    self._nursery.start_soon(self._ask, candidate, ask)
                case Open(candidate, Nudge() as nudge) if self._nursery is not None:
                    self._nursery.start_soon(self._nudge, candidate, nudge)
                case Expect(None) if any(isinstance(each, Expect) for each in actions[number:]):
                    pass  # the group that comes next takes the place of this one
                case Expect(group_id):
                    # It comes before the answer to a proposal: other members may open streams of the group at once.
                    self._listener.expects(group_id)
                case Report():
                    self._listener.searched(action)
                case GaveUp() | Renew():
                    self._outcome = action
                    self._done.set()
                case Formed(roster):
                    self._outcome = roster
                    self._done.set()

    def _send(self, peer_id: str, message: Message) -> None:
        links = self._upward if isinstance(message, OF_FOLLOWERS) else self._downward
        if (link := links.get(peer_id)) is not None:
            link.send(message)

    def _close(self, peer_id: str, *, upward: bool) -> None:
        if upward and (opening := self._opening.pop(peer_id, None)) is not None:
            opening.cancel()
        link = (self._upward if upward else self._downward).pop(peer_id, None)
        if link is not None:
            link.close()

    async def _ask(self, candidate: Candidate, ask: JoinRequest) -> None:
        peer_id = candidate.peer_id
        reason = "it could not be asked"
        with trio.CancelScope() as scope:
            self._opening[peer_id] = scope
            try:
                stream = await self._context.transport.open_stream(
                    peer_id, PROTOCOL, addresses=candidate.addresses, timeout=QUICK_REPLY_SECONDS
                )
            except UnreachableError as error:
                reason = str(error)
            else:
                if self._opening.get(peer_id) is not scope:  # the rules closed it while it was opening
                    await stream.reset()
                    return
                link = self._upward[peer_id] = JoinLink(stream, self, self._context.messages, upward=True)
                link.send(ask)
                # This nursery outlives the attempt, so queued messages are still sent.
                self._context.nursery.start_soon(link.run)
                return
            finally:
                if self._opening.get(peer_id) is scope:
                    del self._opening[peer_id]
            # A call that the rules have cancelled does not get here: they have left that peer already.
            self._do(self.rules.lost_leader(peer_id, reason, self._now(), reachable=False))

    async def _nudge(self, candidate: Candidate, nudge: Nudge) -> None:
        try:
            stream = await self._context.transport.open_stream(
                candidate.peer_id, PROTOCOL, addresses=candidate.addresses, timeout=QUICK_REPLY_SECONDS
            )
            try:
                await send_message(stream, encode(nudge))
                # A nudge has no answer. The nudged peer opens a join stream of its own.
                await stream.aclose()
            # The attempt may end while the other side reads nothing.
            except BaseException:
                await stream.reset()
                raise
        except (UnreachableError, StreamBrokenError, ClosedError) as error:
            logger.debug("%s was not nudged: %s", candidate.peer_id, error)
            self._do(self.rules.not_nudged(candidate.peer_id, str(error), self._now()))


def announced(transport: Transport) -> tuple[Reach, tuple[str, ...]]:
    """Return what a candidate signs about the ways to it: its reach, and as many of its addresses as others dial."""
    reach = Reach.PUNCHABLE if transport.reachability.punchable else Reach.RELAYED
    if transport.reachability.dialable:
        reach = Reach.DIALABLE
    # The direct addresses come first, and leave room for some of relays.
    relayed = [address for address in transport.addresses if is_circuit(address)][:MAX_RELAY_ADDRESSES]
    direct = [address for address in transport.addresses if not is_circuit(address)]
    return reach, (*direct[: MAX_ADDRESSES_DIALLED - len(relayed)], *relayed)
